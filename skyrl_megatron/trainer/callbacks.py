"""Hooks into the training loop, for code that watches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


class ObservedTrainer(Protocol):
    """What a callback may count on; it gets the :class:`RayPPOTrainer` itself."""

    cfg: SkyRLTrainConfig
    global_step: int
    """Steps that are complete."""
    total_steps: int
    metrics: dict[str, float]
    """Numbers of the step so far; what a callback adds is logged with them."""


class TrainerCallback:
    """Override what you need; exceptions end the run."""

    def on_train_start(self, trainer: ObservedTrainer) -> None:
        """Run when models are loaded and engines hold the policy's weights."""

    def on_step_start(self, trainer: ObservedTrainer) -> None:
        """Run before prompts are taken."""

    def on_step_end(self, trainer: ObservedTrainer) -> None:
        """Run after training, checkpoint and weight sync of a step."""

    def on_evaluate(self, trainer: ObservedTrainer, metrics: Mapping[str, float]) -> None:
        """Run after an evaluation, with its scores."""

    def on_save(self, trainer: ObservedTrainer, folder: str) -> None:
        """Run after a checkpoint was begun in ``folder``."""

    def on_log(self, trainer: ObservedTrainer, metrics: Mapping[str, float]) -> None:
        """Run with the step's metrics as they are logged."""

    def on_train_end(self, trainer: ObservedTrainer) -> None:
        """Run after the last step."""


def notify(callbacks: Sequence[TrainerCallback], event: str, *arguments: object) -> None:
    """Call ``event`` of each, in order."""
    for callback in callbacks:
        getattr(callback, event)(*arguments)
