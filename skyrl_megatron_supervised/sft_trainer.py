"""Supervised training on conversations: rows → optimizer steps on their answers, with the ranks and the loop of RL.

:class:`SFTTrainer` replaces the rollouts of :class:`~skyrl_megatron.trainer.ppo.RayPPOTrainer` by rows of the data,
and has neither engines nor weight syncs. Its loss is the cross-entropy of the trained tokens, averaged over all of
them in an optimizer step (``algorithm.loss_reduction=token_mean``), and the KL to a reference with ``use_kl_loss``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.config.roles import needs_reference, policy_is_reference
from skyrl_megatron.sources.source import PromptRollouts
from skyrl_megatron.trainer.callbacks import notify
from skyrl_megatron.trainer.ppo import RayPPOTrainer
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron_supervised.chat_rows import taught_batch


class SFTTrainer(RayPPOTrainer):
    """The loop over the policy, and a reference with ``use_kl_loss``. ``train_dataset``, ``eval_dataset``:
    ``ChatRows``."""

    # ------------------------------------------------------------------ a step
    def collect_experience(self) -> TrainingBatch:
        """Return the sequences of the step's rows."""
        with self.phases("read_rows"):
            batch = batch_of(next(self.rollouts.prompts))
        self.keep_samples(batch)
        return batch

    def keep_samples(self, batch: TrainingBatch) -> None:
        """Let the recorders see the sequences and what is trained of them."""
        with self.phases("keep_samples"):
            self.recorders.before_update(self.global_step + 1, batch, None)

    def update_on(self, batch: TrainingBatch) -> None:
        """Take the optimizer steps of a training step."""
        if needs_reference(self.cfg):
            with self.phases("fwd_logprobs_values_reward"):
                batch.ref_logprobs = self.reference_logprobs(batch)
        with self.phases("train_critic_and_policy"):
            self.train_critic_and_policy(batch)
        self.metrics["sft/loss"] = self.metrics["policy/policy_loss"]
        self.metrics["sft/trained_tokens"] = float(batch.loss_mask.sum(dtype=torch.float64))

    def reference_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the reference's log-probs [R]: of the policy without its adapters, or of a model of its own."""
        if policy_is_reference(self.cfg):
            return self.policy.start_logprobs(batch, "reference log-probs", adapters=False)()
        assert self.ref is not None
        logprobs = self.ref.compute_logprobs(batch, "reference log-probs")
        self.offload_others("policy")
        return logprobs

    def eval(self) -> dict[str, float]:
        """Return ``eval/<data set>/loss``, nats per trained token, and that of ``all`` rows; {} without such data."""
        if self.eval_dataset is None:
            return {}
        sums: dict[str, np.ndarray] = {}
        size = self.cfg.trainer.eval_batch_size
        with self.phases("eval"):
            for start in range(0, len(self.eval_dataset), size):
                self.stop.check()
                rows = [self.eval_dataset[row] for row in range(start, min(start + size, len(self.eval_dataset)))]
                for name, sum_and_count in zip(_sources(rows), self._losses(batch_of(rows)), strict=True):
                    for key in (name, "all"):
                        sums[key] = sums.get(key, np.zeros(2)) + sum_and_count
        metrics = {f"eval/{name}/loss": float(total / count) for name, (total, count) in sums.items()}
        self.metrics |= metrics
        notify(self.callbacks, "on_evaluate", self, metrics)
        return metrics

    def _losses(self, batch: TrainingBatch) -> np.ndarray:
        """Return for each sequence the summed loss of its trained tokens, and their number: [B, 2] float64."""
        count = len(batch)
        filled = batch.select(np.resize(np.arange(count), max(count, self.policy.dp_size)))  # each replica needs a row
        logprobs = self.policy.compute_logprobs(filled, "evaluation")[: len(batch.loss_mask)]
        sums = batch.responses.sum(keep_masked(logprobs, batch.loss_mask))
        return torch.stack([-sums, batch.responses.sum(batch.loss_mask)], dim=1).numpy()

    # ------------------------------------------------------------------ no engines
    def make_rollouts(self) -> PromptRollouts:
        """Return the source whose ``prompts`` are the rows of each step."""
        return PromptRollouts(self.run_state, self)

    @property
    def needs_engines(self) -> bool:
        """Nothing is sampled."""
        return False

    def init_weight_sync_state(self) -> None:
        """Nothing receives weights."""

    def give_first_weights(self) -> None:
        """Nothing receives weights."""

    def sync_weights(self) -> None:  # type: ignore[override]
        """Nothing receives weights."""

    def begin_training(self) -> None:
        """No engine has to wait."""


def batch_of(rows: Sequence[dict[str, Any]]) -> TrainingBatch:
    """Return the sequences of ``rows``, items of ``ChatRows``, as a batch."""
    sequences = [sequence for row in rows for sequence in row["sequences"]]
    return taught_batch(sequences, [row["uid"] for row in rows for _ in row["sequences"]])


def _sources(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the name in metrics of the data set of each sequence of ``rows``."""
    return [str(row["name"]) for row in rows for _ in row["sequences"]]
