"""A warm-up before the RL steps: known answers are imitated until the policy is right now and then.

Group-relative advantages teach nothing while every sample of a prompt is wrong. The warm-up runs through the same
ranks and the same objective as training, with the policy loss ``cross_entropy``, and is logged as a phase of its own
(``warmup/…``, at step 0).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from skyrl_megatron.data.batch import collate
from skyrl_megatron.errors import AlgorithmError
from skyrl_megatron.trainer.fully_async import FullyAsyncRayPPOTrainer
from skyrl_megatron.trainer.ppo import RayPPOTrainer
from skyrl_megatron.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How long and how fast."""

    enough: float = 0.24
    """Held-out score (greedy) at which the warm-up ends …"""
    too_much: float = 0.3
    """… and which it must not exceed: the rest is for the RL steps to learn."""
    lr: float = 1e-3
    promising: float = 0.9
    """Loss at which the score is about to rise, nats a token; only from there on is it measured."""
    fine_lr: float = 2e-4
    """Learning rate from there on. The score moves by 0.05 from one measurement to the next with ``lr``."""
    rows: int = 256
    """Answers per optimizer step."""
    eval_interval: int = 2
    max_steps: int = 1000


class WarmedUpTrainer(RayPPOTrainer):
    """A trainer that warms up when it starts at step 0."""

    warm_up_plan = WarmUp()

    def before_training(self) -> None:
        """Warm up, then evaluate as every trainer does."""
        if self.global_step == 0:
            with self.phases("warm_up"):
                self.warm_up(self.warm_up_plan)
        super().before_training()

    def warm_up(self, plan: WarmUp) -> None:
        """Imitate until the held-out score is ``plan.enough``. Raises AlgorithmError when it never is, or jumps past
        ``plan.too_much``."""
        rng = random.Random(self.cfg.trainer.seed)
        self.policy.restart_schedule(lr=plan.lr)
        score, fine = 0.0, False
        for step in range(1, plan.max_steps + 1):
            self.stop.check()
            self.begin_training()
            sharded = self.policy.dispatch(self.answers(rng, plan.rows))
            result = self.policy.train_mini_batch(sharded, policy_loss_type="cross_entropy", use_kl_loss=False)
            if not fine and result["policy_loss"] <= plan.promising:
                fine = True
                self.policy.restart_schedule(lr=plan.fine_lr)
            if not fine or step % plan.eval_interval:
                continue
            self.sync_weights()
            score = self.measured_score()
            measured = {"step": step, "loss": result["policy_loss"], "grad_norm": result["grad_norm"], "score": score}
            self.tracker.log({f"warmup/{name}": value for name, value in measured.items()}, 0)
            if score >= plan.enough:
                break
        else:
            raise AlgorithmError(f"warm-up: held-out score {score:.3f} after {plan.max_steps} steps: raise WarmUp.lr")
        if score > plan.too_much:
            raise AlgorithmError(
                f"warm-up: held-out score jumped to {score:.3f}, past {plan.too_much}: "
                "choose another trainer.seed, or lower WarmUp.fine_lr"
            )
        self.start_up.done(f"warm-up: {step} steps of imitation, held-out score {score:.3f}")
        self.policy.restart_schedule(total_steps=self.updates)
        self.metrics = {}

    def measured_score(self) -> float:
        """Return the mean score on the evaluation data; without any, on the training prompts."""
        if self.eval_dataset is None:
            self.eval_dataset = self.train_dataset
            try:
                return self.measured_score()
            finally:
                self.eval_dataset = None
        return float(self.eval()["eval/all/avg_score"])

    def answers(self, rng: random.Random, rows: int) -> TrainingBatch:
        """Return random training prompts with their known answers as responses."""
        drawn = [self.train_dataset[rng.randrange(len(self.train_dataset))] for _ in range(rows)]
        picked = self.train_dataset.collate_fn(drawn)
        chat: Any = self.generator.chat
        prompts = [chat.prompt(row["prompt"]) for row in picked]
        truths = [str(row["env_extras"]["reward_spec"]["ground_truth"]) for row in picked]
        encoded = self.tokenizer(truths, add_special_tokens=False)["input_ids"]
        responses = [[*ids, self.tokenizer.eos_token_id] for ids in encoded]
        batch = collate(prompts, responses, uids=[str(row["uid"]) for row in picked], rewards=[0.0] * rows)
        batch.adapters = self.train_dataset.adapters_of([row["uid"] for row in picked])
        batch.advantages = batch.returns = torch.zeros_like(batch.response_mask)
        return batch


class WarmedUpAsyncTrainer(WarmedUpTrainer, FullyAsyncRayPPOTrainer):
    """A trainer that warms up before its rollouts run ahead.

    The optimizer's moments stay as the warm-up left them. With new ones the same learning rate is too high: the first
    steps of RL are larger, and the policy gives up half of the problems (benchmarks/RESULTS.md)."""


class WarmUpAlone(WarmedUpTrainer):
    """A trainer that warms up, exports what it has, and ends."""

    def before_training(self) -> None:
        """Warm up; the run that goes on from the export evaluates."""
        with self.phases("warm_up"):
            self.warm_up(self.warm_up_plan)

    def train_steps(self) -> None:
        """Export in place of any step."""
        self.save_models()
