"""Callbacks of the training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


class ObservedTrainer(Protocol):
    """The attributes of a trainer that a callback may use. A callback gets the :class:`RayPPOTrainer` itself."""

    cfg: SkyRLTrainConfig
    global_step: int
    """Completed steps."""
    total_steps: int
    metrics: dict[str, float]
    """Metrics of the step so far. A callback may add metrics, which are logged with them."""


class TrainerCallback:
    """Base class of callbacks: override what you need. Exceptions end the run."""

    def on_train_start(self, trainer: ObservedTrainer) -> None:
        """Run when the models are loaded and the engines have the policy's weights."""

    def on_step_start(self, trainer: ObservedTrainer) -> None:
        """Run before a step takes its prompts."""

    def on_step_end(self, trainer: ObservedTrainer) -> None:
        """Run after training, checkpoint and weight sync of a step."""

    def on_evaluate(self, trainer: ObservedTrainer, metrics: Mapping[str, float]) -> None:
        """Run after an evaluation, with its scores."""

    def on_save(self, trainer: ObservedTrainer, folder: str) -> None:
        """Run after a checkpoint was started in ``folder``."""

    def on_log(self, trainer: ObservedTrainer, metrics: Mapping[str, float]) -> None:
        """Run when the metrics of a step are logged."""

    def on_train_end(self, trainer: ObservedTrainer) -> None:
        """Run after the last step."""


def notify(callbacks: Sequence[TrainerCallback], event: str, *arguments: object) -> None:
    """Call the method ``event`` of each callback, in order."""
    for callback in callbacks:
        getattr(callback, event)(*arguments)
