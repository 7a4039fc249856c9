"""Hooks into the training loop, for code that watches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl_megatron.trainer.ppo import RayPPOTrainer


class TrainerCallback:
    """Override what you need. ``trainer.global_step`` is the step at hand; exceptions end the run."""

    def on_train_start(self, trainer: RayPPOTrainer) -> None:
        """Models are loaded, engines hold the policy's weights."""

    def on_step_start(self, trainer: RayPPOTrainer) -> None:
        """Before prompts are taken."""

    def on_step_end(self, trainer: RayPPOTrainer) -> None:
        """After training, checkpoint and weight sync of a step."""

    def on_evaluate(self, trainer: RayPPOTrainer, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""

    def on_save(self, trainer: RayPPOTrainer, folder: str) -> None:
        """After a checkpoint was begun in ``folder``."""

    def on_log(self, trainer: RayPPOTrainer, metrics: Mapping[str, float]) -> None:
        """The step's metrics, as they are logged."""

    def on_train_end(self, trainer: RayPPOTrainer) -> None:
        """After the last step."""


def notify(callbacks: Sequence[TrainerCallback], event: str, *arguments: object) -> None:
    """Call ``event`` of each, in order."""
    for callback in callbacks:
        getattr(callback, event)(*arguments)
