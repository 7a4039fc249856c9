"""Optimizers that take Adam's place for some parameters, such as Muon's matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.plugins import OPTIMIZERS

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer.optimizer_config import ParamKey

    from skyrl_megatron.config import OptimizerConfig as TrainOptimizerConfig
    from skyrl_megatron.runtime.adapters import TrainedAdapters
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups

RATIO = "ratio"
"""Key of parameter groups: their rate as a multiple of the schedule's."""


class PartialOptimizer:
    """An optimizer that takes the place of Adam, inside of Megatron's optimizers, for some parameters.

    ``OPTIMIZERS`` of ``plugins.py`` has the classes by the values of ``optimizer_config.optimizer``. It is made
    before the gradient buffers. The tensors of torch optimizers in ``scale_invariant`` (ids) are not clipped.
    """

    def __init__(self, model: ModelChunks, groups: ProcessGroups, adapters: TrainedAdapters | None, key: str) -> None:
        """``adapters``: trained in place of the weights. Raises ConfigError, which names ``key``, for a model that
        it cannot train."""
        raise NotImplementedError

    def overrides(self, settings: TrainOptimizerConfig) -> dict[ParamKey, Any]:
        """Return Megatron's overrides of parameter groups."""
        raise NotImplementedError

    def install(self, optimizer: MegatronOptimizer, options: Mapping[str, Any]) -> None:
        """Take Adam's place. ``options``: ``optimizer_config_kwargs``."""
        raise NotImplementedError


def partial_optimizer(
    name: str, model: ModelChunks, groups: ProcessGroups, adapters: TrainedAdapters | None, key: str
) -> PartialOptimizer | None:
    """Return the registered optimizer ``name``; None for Adam alone. Raises ConfigError if there is none."""
    # Megatron's own, which needs nothing in its place.
    if name == "adam":
        return None
    cls = OPTIMIZERS.find(name)
    # The configuration knows all names; the package of this one may not be installed where the ranks run.
    if cls is None:
        raise ConfigError([Problem(key, name, "no installed package registers this optimizer: use adam")])
    optimizer: PartialOptimizer = cls(model, groups, adapters, key)
    return optimizer
