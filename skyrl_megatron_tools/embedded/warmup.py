"""A warm-up before the RL steps: the steps of ``skyrl-megatron sft`` on known answers, until some samples are right.

Group-relative advantages are 0 while every sample of a prompt is wrong. The warm-up uses the same ranks and the same
objective as training, with the policy loss ``cross_entropy``. It is logged as ``warmup/…``, at step 0.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_megatron.envs.base_text_env import make
from skyrl_megatron.errors import AlgorithmError
from skyrl_megatron.trainer.ppo import FullyAsyncRayPPOTrainer, RayPPOTrainer
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron_supervised.chat_rows import taught_batch
from skyrl_megatron_supervised.trained_answers import trained_sequences


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Duration and learning rates of the warm-up."""

    min_score: float = 0.24
    """Held-out score (greedy) at which the warm-up ends."""
    max_score: float = 0.3
    """Held-out score that it must not exceed, so that the RL steps have something to learn."""
    lr: float = 1e-3
    eval_loss: float = 0.9
    """Loss in nats per token from which on the score is measured, because it rises soon."""
    fine_lr: float = 2e-4
    """Learning rate from then on. With ``lr``, the score changes by 0.05 between two measurements."""
    rows: int = 256
    """Answers per optimizer step."""
    eval_interval: int = 2
    max_steps: int = 1000


TWO_TURNS = WarmUp(min_score=0.36, max_score=0.48)
"""The warm-up of runs with several turns, whose held-out score counts an answer of any turn."""
FARTHEST = 12
"""Largest distance of the wrong answers of a warm-up from the right one."""


def known_answer(row: Mapping[str, Any], env_class: str, max_turns: int, rng: random.Random) -> list[Any]:
    """Return the prompt of a row and its known answer, as a conversation.

    With several turns, every second answer comes after a wrong number and what the environment says to it. A policy
    that has not seen these turns gets no reward in them, and then half of its tokens have negative advantages only.
    """
    answer = str(row["env_extras"]["reward_spec"]["ground_truth"])
    messages = list(row["prompt"])
    if max_turns > 1 and rng.random() < 0.5:
        near = [int(answer) + step for step in range(-FARTHEST, FARTHEST + 1) if step]
        wrong = str(rng.choice([number for number in near if 10 <= number <= 99]))
        env = make(row["env_class"] or env_class, extras={**row["env_extras"], "max_turns": max_turns})
        env.init(row["prompt"])
        messages += [{"role": "assistant", "content": wrong}, *env.step(wrong)["observations"]]
        env.close()
    return [*messages, {"role": "assistant", "content": answer}]


class WarmedUpTrainer(RayPPOTrainer):
    """A trainer that warms up when it starts at step 0."""

    @property
    def warm_up_plan(self) -> WarmUp:
        """The plan of this run."""
        return WarmUp() if self.cfg.generator.max_turns == 1 else TWO_TURNS

    def before_training(self) -> None:
        """Warm up, then evaluate as usual."""
        if self.global_step == 0:
            with self.phases("warm_up"):
                self.warm_up(self.warm_up_plan)
        super().before_training()

    def warm_up(self, plan: WarmUp) -> None:
        """Train on known answers until the held-out score is ``plan.min_score``. Raises AlgorithmError if it does not
        get there in ``plan.max_steps``, or exceeds ``plan.max_score``."""
        rng = random.Random(self.cfg.trainer.seed)
        self.policy.restart_schedule(lr=plan.lr)
        score, fine = 0.0, False
        for step in range(1, plan.max_steps + 1):
            self.stop.check()
            self.begin_training()
            sharded = self.policy.dispatch(self.answer_batch(rng, plan.rows))
            result = self.policy.train_mini_batch(sharded, policy_loss_type="cross_entropy", use_kl_loss=False)
            if not fine and result["policy_loss"] <= plan.eval_loss:
                fine = True
                self.policy.restart_schedule(lr=plan.fine_lr)
            if not fine or step % plan.eval_interval:
                continue
            self.sync_weights()
            score = self.evaluation_score()
            measured = {"step": step, "loss": result["policy_loss"], "grad_norm": result["grad_norm"], "score": score}
            self.tracker.log({f"warmup/{name}": value for name, value in measured.items()}, 0)
            if score >= plan.min_score:
                break
        else:
            raise AlgorithmError(f"warm-up: held-out score {score:.3f} after {plan.max_steps} steps: raise WarmUp.lr")
        if score > plan.max_score:
            raise AlgorithmError(
                f"warm-up: held-out score rose to {score:.3f}, above WarmUp.max_score={plan.max_score}: "
                "choose another trainer.seed, or lower WarmUp.fine_lr"
            )
        self.start_up.done(f"warm-up: {step} supervised steps, held-out score {score:.3f}")
        self.policy.restart_schedule(total_steps=self.updates)
        self.metrics = {}

    def evaluation_score(self) -> float:
        """Return the mean score on the evaluation data, or on the training prompts if there is none."""
        if self.eval_dataset is None:
            self.eval_dataset = self.train_dataset
            try:
                return self.evaluation_score()
            finally:
                self.eval_dataset = None
        return float(self.eval()["eval/all/avg_score"])

    def answer_batch(self, rng: random.Random, rows: int) -> TrainingBatch:
        """Return a batch of random training prompts with their known answers as responses."""
        drawn = [self.train_dataset[rng.randrange(len(self.train_dataset))] for _ in range(rows)]
        picked, sequences = self.train_dataset.collate_fn(drawn), []
        for row in picked:
            conversation = known_answer(row, self.cfg.environment.env_class, self.cfg.generator.max_turns, rng)
            last_only = [turn == len(conversation) - 1 for turn in range(len(conversation))]
            sequences += trained_sequences(self.generator.chat, conversation, last_only)
        uids = [str(row["uid"]) for row in picked]
        batch = taught_batch(sequences, uids)
        batch.adapters = self.train_dataset.adapters_of(uids)
        return batch


class WarmedUpAsyncTrainer(WarmedUpTrainer, FullyAsyncRayPPOTrainer):
    """An asynchronous trainer that warms up first.

    It keeps the optimizer's moments of the warm-up. With new ones the same learning rate is too high: the first RL
    steps are larger, and the policy unlearns half of the problems (benchmarks/RESULTS.md).
    """


class WarmUpOnlyTrainer(WarmedUpTrainer):
    """A trainer that warms up, exports the model, and ends."""

    def before_training(self) -> None:
        """Warm up. The run that starts from the export evaluates."""
        with self.phases("warm_up"):
            self.warm_up(self.warm_up_plan)

    def train_steps(self) -> None:
        """Export instead of training."""
        self.save_models()
