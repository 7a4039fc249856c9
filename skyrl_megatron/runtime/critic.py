"""Engine of a critic: values, and the step of the value loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.metrics import ReducibleMetrics
from skyrl_megatron.algorithms.objective import CriticObjective
from skyrl_megatron.runtime.engine import MegatronEngine
from skyrl_megatron.runtime.forward_step import ForwardStep, MicroBatch, TrainingStep
from skyrl_megatron.runtime.loss_scale import loss_for_schedule
from skyrl_megatron.runtime.packed_inputs import PackedInputs

if TYPE_CHECKING:
    from skyrl_megatron.algorithms.objective import Objective
    from skyrl_megatron.algorithms.reduction import StepTotals
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.trained_model import RoleName
    from skyrl_megatron.types import TrainingBatch


class CriticEngine(MegatronEngine):
    """One rank of a critic.

    It has :meth:`compute_values` in place of log-probs. :meth:`forward_backward` reads ``values`` (before the update)
    and ``returns`` of a batch. The output layer is a :class:`ValueHead`; parameters, layout and optimizer come from
    ``trainer.critic``.
    """

    def __init__(self, cfg: SkyRLTrainConfig, role: RoleName = "critic", *, total_steps: int | None = None) -> None:
        super().__init__(cfg, role, total_steps=total_steps)

    @torch.no_grad()
    def compute_values(self, batch: TrainingBatch) -> Tensor:
        """Return the value of the state before each response token, [R] float32.

        ``batch``: the rows of this replica. Every rank of the replica gets the result.
        """
        self.onload("weights")
        return self.forward_only(ValueStep(), batch)

    def objective(self, changes: Mapping[str, Any] | None = None) -> CriticObjective:
        """Return the value loss of ``trainer.algorithm``. ``changes`` replaces some of its fields."""
        return CriticObjective(self._algorithm(changes))

    def _training_step(self, objective: Objective, totals: StepTotals) -> TrainingStep:
        assert isinstance(objective, CriticObjective)
        return CriticStep(objective, totals)


def response_values(output: Tensor, packed: PackedInputs) -> Tensor:
    """Map the value head's output, [1, p, 1] (padded: [b, S, 1]) → values [b, T], equal on all tp and cp ranks."""
    return packed.sources_to_responses(output.flatten())


class ValueStep(ForwardStep):
    """Forward pass only. The schedule returns the values [b, T] of each micro-batch."""

    def on_last_stage(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (scalar 0, token count 0, values [b, T], in units of reward); ``output`` as in
        :func:`response_values`."""
        # The schedule wants a loss also where nothing is trained.
        values = response_values(output, micro_batch.packed)
        return loss_for_schedule(values.new_zeros(()), values)


class CriticStep(TrainingStep):
    """Forward and backward of the value loss."""

    def __init__(self, objective: CriticObjective, totals: StepTotals) -> None:
        self.objective, self.totals = objective, totals

    def on_last_stage(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, ReducibleMetrics]:
        """Return (scalar loss, token count 0, metrics); ``output`` as in :func:`response_values`."""
        batch, values = micro_batch.batch, response_values(output, micro_batch.packed)
        # Checked before the schedule, where an error of one rank would block the others.
        assert batch.values is not None and batch.returns is not None
        loss, metrics = self.objective(self.totals, values, batch.values, batch.returns, batch.loss_mask)
        return loss_for_schedule(loss, metrics)
