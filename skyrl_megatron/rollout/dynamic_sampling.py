"""Dynamic sampling, for prompts whose responses all have the same reward.

Group-relative estimators learn nothing from these zero-variance groups. ``filter`` (DAPO, arXiv:2503.14476) drops them
and samples further batches until a batch is full. ``replace`` (POLARIS) replaces them with other groups of the batch.
"""

from __future__ import annotations

import math

import numpy as np

from skyrl_megatron.config import DynamicSamplingConfig
from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.interface import GeneratorOutput, sampled_trajectories
from skyrl_megatron.rollout.outputs import concatenate_generator_outputs, row_uids, select_rows

Batch = tuple[GeneratorOutput, list[str]]
"""(rows, uid of each row)."""
TOLERANCE = 1e-6
"""Rewards that differ by at most this count as equal."""


class DynamicSampler:
    """Collects the batch of one training step.

    ``prompts``: number of prompts of a full batch. ``seed``: of the random choice of replacements. In each step, call
    :meth:`add` with sampled batches until it returns the batch to train on.
    """

    def __init__(self, config: DynamicSamplingConfig, prompts: int, seed: int = 0) -> None:
        self.config, self.prompts = config, prompts
        self.rng = np.random.default_rng(seed)
        self.sampled_batches = 0
        """Number of batches added in the current step."""
        self._kept: list[Batch] = []
        self.refused: set[str] = set()
        """Uids in the batch that is added next whose groups a gate refused (``admission.py``)."""

    def add(self, output: GeneratorOutput, uids: list[str]) -> Batch | None:
        """Add a sampled batch. Return the batch to train on, or None if another one is needed.

        ``uids``: [rows]; the rows of a prompt must be adjacent. Raises DataError if ``max_sample_batches`` batches are
        not enough.
        """
        self.sampled_batches += 1
        match self.config.type:
            case None if not self.refused and not self._kept:
                batch: Batch | None = (output, uids)
            case "replace":
                batch = self._replace(output, uids)
            case _:
                batch = self._filter(output, uids)
        self.refused = set()
        if batch is not None:
            self.sampled_batches, self._kept = 0, []
            return batch
        limit = self.config.max_sample_batches
        if 0 <= limit <= self.sampled_batches:
            raise DataError(
                f"trainer.algorithm.dynamic_sampling.max_sample_batches={limit}: too few prompts in {limit} batches"
                " had responses with different rewards, or passed the gates. The task is too easy or too hard for the"
                " policy, or generator.n_samples_per_prompt is too small"
            )
        return None

    def _filter(self, output: GeneratorOutput, uids: list[str]) -> Batch | None:
        useful = [rows for rows, good in self._groups(output, uids) if good]
        if useful:
            rows = [row for group in useful for row in group]
            self._kept.append((select_rows(output, rows), [uids[row] for row in rows]))
        if not self._kept:
            return None
        joined = concatenate_generator_outputs([output for output, _ in self._kept])
        names = distinct_uids([names for _, names in self._kept])
        starts = [row for row, name in enumerate(names) if row == 0 or name != names[row - 1]]
        if len(starts) < self.prompts:
            return None
        end = starts[self.prompts] if len(starts) > self.prompts else len(names)
        return select_rows(joined, range(end)), names[:end]

    def _groups(self, output: GeneratorOutput, uids: list[str]) -> list[tuple[list[int], bool]]:
        """Return (rows, whether to train on them) for each prompt, in order."""
        varied = self.config.type is not None
        return [
            (rows, (good or not varied) and uids[rows[0]] not in self.refused) for rows, good in groups(output, uids)
        ]

    def _replace(self, output: GeneratorOutput, uids: list[str]) -> Batch | None:
        found = self._groups(output, uids)
        useful = [rows for rows, good in found if good]
        if not useful or len(useful) < self.config.min_replace_ratio * len(found):
            return None
        poor = len(found) - len(useful)
        chosen = self.rng.choice(len(useful), size=poor, replace=poor > len(useful)).tolist()
        taken = [rows if good else useful[chosen.pop()] for rows, good in found]
        names = distinct_uids([[uids[row] for row in rows] for rows in taken])
        return select_rows(output, [row for rows in taken for row in rows]), names


def groups(output: GeneratorOutput, uids: list[str]) -> list[tuple[list[int], bool]]:
    """Return (rows, whether the rewards of trajectories differ) for each prompt, in order.

    Trajectories that failed do not count. For a prompt with one sample in the batch the second value is True.
    """
    rows: dict[str, list[int]] = {}
    rewards: dict[str, list[float]] = {}
    samples: dict[str, int] = {}
    for trajectory in sampled_trajectories(output, uids):
        uid = trajectory.uid
        rows.setdefault(uid, []).extend(trajectory.rows)
        samples[uid] = samples.get(uid, 0) + 1
        rewards.setdefault(uid, []).extend([] if trajectory.failed else [trajectory.reward])
    return [
        (of_prompt, samples[uid] == 1 or max(rewards[uid], default=0) - min(rewards[uid], default=0) > TOLERANCE)
        for uid, of_prompt in rows.items()
    ]


def zero_variance(output: GeneratorOutput, uids: list[str]) -> float | None:
    """Return the share of prompts with several samples whose rewards are all the same; None without such prompts.
    ``uids``: [rows]."""
    several = [rewards for rewards in _rewards_by_uid(output, uids).values() if len(rewards) > 1]
    return sum(max(each) - min(each) <= TOLERANCE for each in several) / len(several) if several else None


def measured_rewards(output: GeneratorOutput, uids: list[str]) -> dict[str, list[float]]:
    """Return the rewards of the trajectories of each prompt by uid, without those that failed or whose reward is not
    finite. ``uids``: [rows] or, step-wise, [trajectories]."""
    return _rewards_by_uid(output, row_uids(output, uids))


def _rewards_by_uid(output: GeneratorOutput, uids: list[str]) -> dict[str, list[float]]:
    measured: dict[str, list[float]] = {uid: [] for uid in uids}
    for trajectory in sampled_trajectories(output, uids):
        if not trajectory.failed and math.isfinite(trajectory.reward):
            measured[trajectory.uid].append(trajectory.reward)
    return measured


def distinct_uids(names: list[list[str]]) -> list[str]:
    """Join the uids of several batches. A prompt that occurs again gets the uid ``UID#NUMBER``."""
    seen: dict[str, int] = {}
    joined: list[str] = []
    for batch in names:
        new: dict[str, str] = {}
        for uid in dict.fromkeys(batch):
            plain = uid.partition("#")[0]
            seen[plain] = seen.get(plain, -1) + 1
            new[uid] = f"{plain}#{seen[plain]}" if seen[plain] else plain
        joined += [new[uid] for uid in batch]
    return joined
