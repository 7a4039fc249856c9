"""What the core needs of adapters: small matrices that are trained in place of a policy's frozen weights.

A package brings them and registers itself in ``plugins.ADAPTERS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.plugins import ADAPTERS

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups


class TrainedAdapters(ABC):
    """One adapter of a rank's model, which is a submodule of each chunk while it is attached. The base is frozen."""

    @abstractmethod
    def attach(self) -> None:
        """Make the model compute with this adapter, and its chunks hold it."""

    @abstractmethod
    def detach(self) -> None:
        """Remove the adapter from the model, so that another can be attached."""

    @abstractmethod
    def disabled(self) -> AbstractContextManager[None]:
        """Compute as the base model within the block. The base model is the reference of a policy with adapters."""

    @abstractmethod
    def on_hidden(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what the output layer adds to the logits of hidden states [P, H], as two factors: h [P, rank] and
        this rank's rows of B [V_padded / tp, rank] (h·Bᵀ). None if it adds nothing."""

    @abstractmethod
    def merged(self, parameter: Tensor) -> Tensor:
        """Return a base weight, [out, in] or [E, out, in], with the adapter merged, in the weight's dtype."""

    @abstractmethod
    def sum_over_etp(self) -> None:
        """Sum the gradients that Megatron does not: of experts' parameters that are replicated over etp. Collective
        over etp, after Megatron's reduction."""


def attach_adapters(
    cfg: SkyRLTrainConfig, model: ModelChunks, groups: ProcessGroups, base: str | None
) -> TrainedAdapters:
    """Attach the policy's adapter to ``model``: that of the configured folder, else a new one.

    ``base``: fingerprint of the base weights. Raises ConfigError for settings that do not fit the model or the layout,
    ModelLoadError for a folder that does not fit. Collective over all ranks.
    """
    adapters: TrainedAdapters = ADAPTERS.require("trained")(cfg, model, groups, base)
    return adapters


def save_adapter(adapters: TrainedAdapters, groups: ProcessGroups, folder: Path, base: str | None) -> None:
    """Write an adapter as a folder in PEFT format, with the fingerprint ``base`` of the base weights. Collective over
    all ranks. Raises CheckpointError on every rank if it cannot be written."""
    ADAPTERS.require("saved")(adapters, groups, folder, base)
