"""What an advantage estimator reads in addition to the rewards of a batch, and what it remembers from step to step.

An estimator is a function (``advantages.py``). One that needs more has an :class:`EstimatorState` of the same name,
which the trainer makes once and asks in each step; its memory is part of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.plugins import ClassRegistry

if TYPE_CHECKING:
    from skyrl_megatron.config import AlgorithmConfig


class EstimatorState:
    """The state of an estimator that needs nothing more and remembers nothing; base class of the others."""

    reward_names: tuple[str, ...] = ()
    """Metrics of the environment that the estimator takes as separate rewards, ``reward_parts`` [B, R]."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """``algorithm``: its settings."""

    def arguments(self, roles: Callable[[], list[str]]) -> dict[str, Any]:
        """Return further keyword arguments of the estimator for a batch. ``roles``: returns the role of each row in
        its conversation [B], a column of the data."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what it remembers as plain values, under keys of its own in a checkpoint's trainer state."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned. ``state`` may lack it, and has the keys of others."""


ESTIMATOR_STATES = ClassRegistry("trainer.algorithm.advantage_estimator")
ESTIMATOR_STATES.register_path("gdpo", "skyrl_megatron.algorithms.gdpo:SeparateRewards")
ESTIMATOR_STATES.register_path("rae", "skyrl_megatron.algorithms.role_baselines:RoleBaselines")

register_estimator_state = ESTIMATOR_STATES.register


def estimator_state(algorithm: AlgorithmConfig) -> EstimatorState:
    """Return the state of the configured estimator (``algorithm.advantage_estimator``) at the start of a run."""
    state: EstimatorState = (ESTIMATOR_STATES.find(str(algorithm.advantage_estimator)) or EstimatorState)(algorithm)
    return state
