"""What all sources have whose tokens may be older than the weights that are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.sources.source import PromptRollouts
from skyrl_megatron.sources.staleness import token_staleness, token_staleness_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.types import TrainingBatch


class AgedRollouts(PromptRollouts):
    """Rollouts whose tokens may be older than the weights that are trained."""

    prefix: ClassVar[str]
    """Of the metrics by age."""
    bound: int
    """Maximum staleness in steps."""
    _token_ages: Tensor | None = None  # [R], of the current batch

    def to_batch(self, output: GeneratorOutput, uids: list[str]) -> TrainingBatch:
        """Return the tensors of the selected rows, and keep the age of each token."""
        batch = super().to_batch(output, uids)
        self._token_ages = None
        if spans := output.get("rollout_versions"):
            self._token_ages = token_staleness(spans, batch.responses, self.run.step)
        return batch

    def staleness_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        """Return ``…/token_lag…`` and ``…/logprob_diff_lag…`` of the last batch."""
        if self._token_ages is None:
            return {}
        return token_staleness_metrics(batch, self._token_ages, self.bound, self.prefix)
