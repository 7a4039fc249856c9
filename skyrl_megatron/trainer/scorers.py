"""Scorers of a batch: what other models than policy, reference and critic say of its rows, such as teachers.

A step asks each scorer twice: :meth:`Scorer.score` with the passes of reference and policy, and :meth:`Scorer.reward`
once the policy's log-probs are known. A trainer's ``scorers`` is a list to which a subclass may add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_megatron.config.roles import distils_in_reward, teacher_names
from skyrl_megatron.data.packing import PROMPT_UIDS
from skyrl_megatron.trainer.teachers import Teachers, with_teacher_rewards

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.trainer.event_loop import LoopThread
    from skyrl_megatron.types import TrainingBatch
    from skyrl_megatron.workers.worker_group import WorkerGroup


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


class TeacherScorer:
    """The teachers of a run (``teachers.py``), or the policy itself after a demonstration.

    ``dataset``: the training data, which says which teacher and which demonstration belong to a prompt.
    """

    phase = "teacher"

    def __init__(self, cfg: SkyRLTrainConfig, teachers: Teachers, dataset: Any) -> None:
        self.algorithm, self.teachers, self.dataset = cfg.trainer.algorithm, teachers, dataset
        self.reads_logprobs = distils_in_reward(cfg)
        self.gives_signal = bool(teachers.names)

    def score(self, batch: TrainingBatch) -> dict[str, float]:
        """See :class:`Scorer`."""
        metrics: dict[str, float] = {}
        uids = batch.metadata[PROMPT_UIDS]
        if self.teachers.give_rewards:
            metrics = self.teachers.add_rewards(batch)
        elif self.teachers.names:
            self.teachers.score(batch, self.dataset.teachers_of(uids))
        if (column := self.algorithm.distillation.demonstration) is not None:
            hints = self.dataset.hints_of(uids, column)
            tokens = {hint: self.dataset.hint_tokens(hint) for hint in dict.fromkeys(hints)}
            self.teachers.score_by_policy(batch, [tokens[hint] for hint in hints])
        return metrics

    def reward(self, batch: TrainingBatch) -> dict[str, float]:
        """See :class:`Scorer`."""
        return with_teacher_rewards(batch, self.algorithm) if self.reads_logprobs else {}


def run_scorers(
    cfg: SkyRLTrainConfig, roles: Mapping[str, WorkerGroup], loop: LoopThread, dataset: Any
) -> list[Scorer]:
    """Return the scorers that the configuration asks for. ``roles``: the run's, in which the ranks of teachers will be
    once they are built."""
    demonstrates = cfg.trainer.algorithm.distillation.demonstration is not None
    if not (teacher_names(cfg) or demonstrates or distils_in_reward(cfg)):
        return []
    return [TeacherScorer(cfg, Teachers(cfg, roles, loop), dataset)]
