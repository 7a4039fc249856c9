"""Teachers: their log-probs for the rows of a batch, and the rewards for the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.algorithms.distillation import teacher_rewards
from skyrl_megatron.algorithms.metrics import metric_values
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.config.roles import (
    distils_in_reward,
    role_key,
    teacher_addresses,
    teacher_is_reward_model,
    teacher_names,
    teachers_on_ranks,
)
from skyrl_megatron.data.batch import failed_uid
from skyrl_megatron.data.splitting import PROMPT_UIDS
from skyrl_megatron.errors import DataError
from skyrl_megatron.plugins import TEACHERS
from skyrl_megatron.trainer.step_batch import last_tokens, trained_trajectories, trajectories_of
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron.workers.dispatch import TopTokens, top_tensors

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.trainer.event_loop import LoopThread
    from skyrl_megatron.workers.worker_group import WorkerGroup


class TeacherServer(Protocol):
    """A teacher that runs elsewhere, made with its address: a class of ``plugins.TEACHERS``."""

    async def score(self, rows: Sequence[Sequence[int]], starts: Sequence[int], k: int) -> list[np.ndarray]:
        """Return for each row of token ids an array [tokens from its start, 1 + 2k] float32: the token's log-prob
        (nats, temperature 1), the log-probs of the ``k`` likeliest tokens, and their ids. ``starts``: at least 1."""


class Teachers:
    """The teachers of a run. ``roles``: the run's roles, with the ranks of the teachers that have ranks.

    Raises ConfigError for the address of a teacher that no plugin serves.
    """

    def __init__(self, cfg: SkyRLTrainConfig, roles: Mapping[str, WorkerGroup], loop: LoopThread) -> None:
        self.cfg, self.roles, self.loop, self.names = cfg, roles, loop, teacher_names(cfg)
        self.remote: dict[str, TeacherServer] = {
            name: TEACHERS.require(address.partition("://")[0])(address)
            for name, address in teacher_addresses(cfg).items()
        }
        self.on_ranks = tuple(teachers_on_ranks(cfg))
        settings = cfg.trainer.algorithm.distillation
        self.give_rewards = teacher_is_reward_model(cfg)
        """Whether the teacher is a reward model: :meth:`add_rewards` in place of :meth:`score`."""
        self.k = settings.top_k if settings.loss_coef else 0

    def score(self, batch: TrainingBatch, names: list[str]) -> None:
        """Set ``teacher_logprobs`` of ``batch``, and the teachers' top-k tokens if the loss uses them.

        ``names``: the teacher of each row; if the list or a name is empty, the first teacher scores. Raises DataError
        for an unknown name.
        """
        logprobs = torch.zeros(len(batch.response_mask))
        top: TopTokens = {}
        whose = np.asarray([name or self.names[0] for name in names or [""] * len(batch)])
        if unknown := set(whose.tolist()) - set(self.names):
            raise DataError(
                f"the teacher {min(unknown)!r} of a row is unknown: add it to trainer.teacher.models, or name one of "
                f"{', '.join(self.names)}"
            )
        for name in self.names:
            rows = np.flatnonzero(whose == name)
            if len(rows):
                scored = self._remote(name, batch, rows) if name in self.remote else self._ranks(name, batch, rows)
                logprobs += scored[0]
                top |= scored[1]
        self._set(batch, logprobs, top)

    def add_rewards(self, batch: TrainingBatch) -> dict[str, float]:
        """Add ``distillation.reward_coef`` times the score of each trajectory, that of its last row, to the reward of
        the last token. Returns the metrics.

        A trajectory whose last row has no finite score, or is longer than the reward model's context, is no sample:
        all its rows are masked and leave the group of their prompt. Raises DataError if none gets a score.
        """
        assert batch.rewards is not None
        role, settings = self.roles[role_key(self.names[0])], self.cfg.trainer.algorithm.distillation
        trajectories = trajectories_of(batch)
        rows = torch.zeros(len(batch), dtype=torch.bool)
        rows[trajectories.last] = trained_trajectories(batch, batch.loss_mask)
        limit = (read_hf_config(self.cfg, "teacher") or {}).get("max_position_embeddings")
        fits = torch.from_numpy(batch.lengths) + 1 <= (limit or math.inf)
        scores = torch.full((len(batch),), math.nan)
        if len(scorable := (rows & fits).nonzero().flatten()):
            scores[scorable] = role.start_values(with_end(batch.select(scorable.numpy())))()
        if self.cfg.trainer.placement.colocate_all:
            role.offload()
        scored, failed = rows & scores.isfinite(), rows & ~scores.isfinite()
        if failed.any() and not scored.any():
            raise DataError(
                f"trainer.teacher.model.path={self.cfg.trainer.teacher.model.path}: none of {int(failed.sum())} "
                f"responses has a finite score within the {limit} positions of this reward model: use another one"
            )
        batch.rewards[last_tokens(batch)[scored]] += (settings.reward_coef or 0.0) * scores[scored]
        masked = trajectories.any(failed)[trajectories.ids]
        batch.loss_mask[batch.responses.spread(masked)] = False
        for row in masked.nonzero().flatten().tolist():
            batch.uids[row] = failed_uid(batch.uids[row], row)
        metrics = {"reward/unscored_samples": float(failed.sum())}
        return metrics | ({"reward/avg_model_score": scores[scored].mean().item()} if scored.any() else {})

    def score_by_policy(self, batch: TrainingBatch, hints: Sequence[Sequence[int]]) -> None:
        """Set ``teacher_logprobs`` of ``batch``, and the likeliest tokens if the loss uses them, to those of the
        policy itself after the tokens of a hint for each row."""
        policy, hinted = self.roles["policy"], with_hints(batch, hints)
        if not self.k:
            batch.teacher_logprobs = policy.compute_logprobs(hinted, "log-probs with demonstrations")
            return
        self._set(batch, *policy.start_scores(hinted, self.k)())

    def _set(self, batch: TrainingBatch, logprobs: Tensor, top: TopTokens) -> None:
        batch.teacher_logprobs = logprobs
        if self.k:
            batch.teacher_top_logprobs, batch.teacher_top_ids = top_tensors(top, batch.responses, self.k)

    def _ranks(self, name: str, batch: TrainingBatch, rows: np.ndarray) -> tuple[Tensor, TopTokens]:
        role = self.roles[role_key(name)]
        scores = role.start_scores(batch, self.k, rows, self.roles["policy"].flops)()
        if self.cfg.trainer.placement.colocate_all:
            role.offload()
        return scores

    def _remote(self, name: str, batch: TrainingBatch, rows: np.ndarray) -> tuple[Tensor, TopTokens]:
        tokens, responses, masked = batch.tokens.split(batch.lengths.tolist()), batch.responses, batch.response_mask
        scored_tokens = responses.any(masked).tolist()
        texts = [tokens[row].tolist() for row in rows.tolist()]
        starts = [
            len(text) - int(batch.response_lengths[row]) * int(scored_tokens[row])
            for row, text in zip(rows.tolist(), texts, strict=True)
        ]
        scored = self.loop.run(
            self.remote[name].score(texts, starts, self.k), "teacher", timeout_s=self.cfg.trainer.phase_timeout_s
        )
        logprobs = torch.zeros(len(masked))
        top: TopTokens = {}
        for row, scores in zip(rows.tolist(), scored, strict=True):
            of_row = responses.of(row)
            out = np.zeros((of_row.stop - of_row.start, 1 + 2 * self.k), np.float32)
            if len(scores):
                out[-len(scores) :] = scores
            out *= masked[of_row].numpy()[:, None]
            logprobs[of_row] = torch.from_numpy(out[:, 0])
            arrays = (out[:, 1 : 1 + self.k].copy(), out[:, 1 + self.k :].astype(np.int32))
            top[row] = [(array, 0, len(array)) for array in arrays]
        return logprobs, top


def with_hints(batch: TrainingBatch, hints: Sequence[Sequence[int]]) -> TrainingBatch:
    """Return the rows with the tokens of a hint before each prompt, as log-probs of the responses need them."""
    before = np.asarray([len(hint) for hint in hints], np.int64)
    rows = zip(hints, batch.tokens.split(batch.lengths.tolist()), strict=True)
    pieces = [part for hint, row in rows for part in (torch.tensor(list(hint), dtype=torch.int32), row)]
    return TrainingBatch(
        tokens=torch.cat(pieces),
        lengths=batch.lengths + before,
        response_lengths=batch.response_lengths,
        response_mask=batch.response_mask,
        loss_mask=batch.loss_mask,
        uids=batch.uids,
        adapters=batch.adapters,
        rollout_support=batch.rollout_support,
    )


def with_end(batch: TrainingBatch) -> TrainingBatch:
    """Return the rows with one more token, the only token of the response: its value is the score of the row, that of
    the state after the last token."""
    pieces = [part for row in batch.tokens.split(batch.lengths.tolist()) for part in (row, row[-1:])]
    ones = torch.ones(len(batch), dtype=torch.bool)
    return TrainingBatch(
        tokens=torch.cat(pieces),
        lengths=batch.lengths + 1,
        response_lengths=np.ones(len(batch), np.int64),
        response_mask=ones,
        loss_mask=ones,
        uids=batch.uids,
    )


def with_teacher_rewards(batch: TrainingBatch, algorithm: Any) -> dict[str, float]:
    """Add ``reward_coef · (log p_teacher − log p_student)`` of each token to its reward, and return the metrics.

    The estimator ``distillation`` replaces the environment's rewards instead.
    """
    assert batch.teacher_logprobs is not None and batch.old_logprobs is not None and batch.rewards is not None
    difference, measured = teacher_rewards(batch.teacher_logprobs, batch.old_logprobs, batch.loss_mask)
    rewards = algorithm.distillation.reward_coef * difference
    batch.rewards = rewards if algorithm.advantage_estimator == "distillation" else batch.rewards + rewards
    return {f"distillation/{name}": value for name, value in metric_values(measured).items()}


class TeacherScorer:
    """The scorer of the run's teachers, or of the policy itself after a demonstration.

    ``dataset``: the training data, which says which teacher and which demonstration belong to a prompt.
    """

    phase = "teacher"

    def __init__(
        self, cfg: SkyRLTrainConfig, roles: Mapping[str, WorkerGroup], loop: LoopThread, dataset: Any
    ) -> None:
        self.algorithm, self.dataset = cfg.trainer.algorithm, dataset
        self.teachers = Teachers(cfg, roles, loop)
        self.reads_logprobs = distils_in_reward(cfg)
        self.gives_signal = bool(self.teachers.names)

    def score(self, batch: TrainingBatch) -> dict[str, float]:
        """See :class:`~skyrl_megatron.trainer.step_batch.Scorer`."""
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
        """See :class:`~skyrl_megatron.trainer.step_batch.Scorer`."""
        return with_teacher_rewards(batch, self.algorithm) if self.reads_logprobs else {}
