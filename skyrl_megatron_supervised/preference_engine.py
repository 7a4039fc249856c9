"""Engines of a policy, and of a reward model, that learn from preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.metrics import ReducibleMetrics
from skyrl_megatron.config.derive import preferences
from skyrl_megatron.runtime.critic import CriticEngine, response_values
from skyrl_megatron.runtime.engine import MegatronEngine
from skyrl_megatron.runtime.forward_step import LogprobHead, MicroBatch, TrainingStep
from skyrl_megatron.runtime.loss_scale import loss_for_schedule
from skyrl_megatron_supervised.preference_losses import KL, Answers, PreferenceObjective, RewardObjective, summed

if TYPE_CHECKING:
    from skyrl_megatron.algorithms.objective import Objective
    from skyrl_megatron.algorithms.reduction import StepTotals
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.trained_model import RoleName
    from skyrl_megatron.types import TrainingBatch


class PreferenceEngine(MegatronEngine):
    """One rank of the policy of ``skyrl-megatron dpo``.

    :meth:`forward_backward` reads ``preferences`` of a batch, and the metadata ``KL``. Its losses are those of
    ``skyrl_megatron_supervised/preference_losses.py``.
    """

    def objective(self, changes: Mapping[str, Any] | None = None) -> PreferenceObjective:
        """Return the loss of the section ``dpo``."""
        settings = preferences(self.cfg)
        assert settings is not None
        return PreferenceObjective(settings)

    def find_problem(self, batch: TrainingBatch, objective: Objective) -> Exception | None:
        """Return an error if ``preferences`` are missing or not finite, else None."""
        return _without_preferences(batch)

    def _training_step(self, objective: Objective, totals: StepTotals) -> TrainingStep:
        assert isinstance(objective, PreferenceObjective)
        return PreferenceStep(self.head(), objective, totals)


def _without_preferences(batch: TrainingBatch) -> Exception | None:
    if batch.preferences is None or not bool(torch.isfinite(batch.preferences).all()):
        return ValueError("the batch has no preferences, or log-probs of the reference that are not finite")
    return None


class PreferenceStep(TrainingStep):
    """Forward and backward of the loss of preferences."""

    def __init__(self, head: LogprobHead, objective: PreferenceObjective, totals: StepTotals) -> None:
        self.head, self.objective, self.totals = head, objective, totals

    def on_last_stage(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, ReducibleMetrics]:
        batch = micro_batch.batch
        logprobs, _ = self.head(output, micro_batch.packed)
        assert batch.preferences is not None
        sums, counts = summed(logprobs, batch.loss_mask), (batch.loss_mask > 0).sum(dim=1)
        answers = Answers.of(sums, counts, batch.preferences, batch.uids)
        loss, metrics = self.objective(self.totals, answers, batch.metadata.get(KL, 0.0))
        return loss_for_schedule(loss.to(logprobs.dtype) + 0.0 * logprobs.sum(), metrics)


class RewardEngine(CriticEngine):
    """One rank of a reward model: the policy of ``skyrl-megatron reward``, or the teacher of a run that it scores.

    :meth:`forward_backward` reads ``preferences`` of a batch. The score of a row is the value of its trained token.
    """

    def __init__(self, cfg: SkyRLTrainConfig, role: RoleName = "policy", *, total_steps: int | None = None) -> None:
        super().__init__(cfg, role, total_steps=total_steps)

    def objective(self, changes: Mapping[str, Any] | None = None) -> RewardObjective:  # type: ignore[override]
        """Return the loss of pairs."""
        return RewardObjective()

    def find_problem(self, batch: TrainingBatch, objective: Objective) -> Exception | None:
        """Return an error if ``preferences`` are missing or not finite, else None."""
        return _without_preferences(batch)

    def _training_step(self, objective: Objective, totals: StepTotals) -> TrainingStep:
        assert isinstance(objective, RewardObjective)
        return RewardStep(objective, totals)


class RewardStep(TrainingStep):
    """Forward and backward of the loss of scores."""

    def __init__(self, objective: RewardObjective, totals: StepTotals) -> None:
        self.objective, self.totals = objective, totals

    def on_last_stage(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, ReducibleMetrics]:
        batch, scores = micro_batch.batch, response_values(output, micro_batch.packed)
        assert batch.preferences is not None
        sums, counts = summed(scores, batch.loss_mask), (batch.loss_mask > 0).sum(dim=1)
        answers = Answers.of(sums, counts, batch.preferences, batch.uids)
        loss, metrics = self.objective(self.totals, answers)
        return loss_for_schedule(loss.to(scores.dtype) + 0.0 * scores.sum(), metrics)
