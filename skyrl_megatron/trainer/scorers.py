"""Scorers of a batch: what other models than policy, reference and critic say of its rows, such as teachers.

A step asks each scorer twice: :meth:`Scorer.score` with the passes of reference and policy, and :meth:`Scorer.reward`
once the policy's log-probs are known. A trainer's ``scorers`` is a list to which a subclass may add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_megatron.config.roles import distils_in_reward, teacher_names
from skyrl_megatron.plugins import SCORERS

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.trainer.event_loop import LoopThread
    from skyrl_megatron.types import TrainingBatch
    from skyrl_megatron.workers.worker_group import WorkerGroup

SCORERS.register_path("teacher", "skyrl_megatron.trainer.teachers:TeacherScorer")


class Scorer(Protocol):
    """Changes fields of a batch, and measures what it did."""

    phase: str
    """Name of the time that it takes, in ``timing/…``."""
    reads_logprobs: bool
    """Whether :meth:`reward` reads the policy's log-probs before the update."""
    gives_signal: bool
    """Whether the policy learns from it also where all rewards of the environment are the same."""

    def score(self, batch: TrainingBatch) -> dict[str, float]:
        """Add scores to the batch, and return metrics."""

    def reward(self, batch: TrainingBatch) -> dict[str, float]:
        """Change the rewards of tokens, and return metrics."""


def run_scorers(
    cfg: SkyRLTrainConfig, roles: Mapping[str, WorkerGroup], loop: LoopThread, dataset: Any
) -> list[Scorer]:
    """Return the scorers that the configuration asks for. ``roles``: the run's, in which the ranks of teachers will be
    once they are built."""
    demonstrates = cfg.trainer.algorithm.distillation.demonstration is not None
    if not (teacher_names(cfg) or demonstrates or distils_in_reward(cfg)):
        return []
    return [SCORERS.require("teacher")(cfg, roles, loop, dataset)]
