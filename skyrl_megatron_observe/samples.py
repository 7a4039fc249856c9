"""Samples of some steps, in files for the report.

A sample has its tokens and, for each response token, the log-probs of engine and trainer, advantage, reward and mask.
They are little-endian arrays in base64: int32 ids and counts, uint8 masks, and float32 for the rest.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.derive import supervised
from skyrl_megatron.config.resolve import private_folder, run_folder
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.trainer.recorders import sample_interval
from skyrl_megatron.trainer.step_batch import rewards_of_trajectories, trajectories_of, trajectory_rewards
from skyrl_megatron.trainer.tracking import ShownSample
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron_observe.run_report import SAMPLE_FORMAT, SAMPLES

if TYPE_CHECKING:
    from torch import Tensor

ANSWERS = ("rejected", "preferred")
"""Names of an answer in a page, by whether it is the better one."""
MOST_TOKENS = 65_536
"""Maximum tokens of the samples of a step."""
MOST_GROUPS = 512
"""Maximum number of groups whose rewards are written."""


class SampleLog:
    """Writes samples of some steps."""

    def __init__(self, cfg: SkyRLTrainConfig, tokenizer: Any, total_steps: int) -> None:
        self.folder, self.tokenizer = run_folder(cfg) / SAMPLES, tokenizer
        self.rows, self.interval = cfg.trainer.samples_per_step, sample_interval(cfg, total_steps)
        self.algorithm = cfg.trainer.algorithm
        self.of_rows = supervised(cfg) is not None
        """Whether the samples are rows of data, which have neither rewards nor advantages."""
        self._pieces: dict[int, str] = {}
        self._facts: dict[str, Sequence[Any] | None] = {}

    def due(self, step: int) -> bool:
        """Return whether samples of this step are written: the first step, and every ``interval`` steps."""
        return self.interval > 0 and (step - 1) % self.interval == 0

    def note(self, output: GeneratorOutput) -> None:
        """Take the fields of the generator's output that the batch does not have."""
        names = ("stop_reasons", "loss_masks", "rollout_versions")
        self._facts = {name: output.get(name) for name in names}  # type: ignore[misc]

    def chosen(self, batch: TrainingBatch) -> list[int]:
        """Return the rows to write, group by group, until ``self.rows`` or :data:`MOST_TOKENS` is reached.

        Groups whose rewards differ, which alone have advantages, come first, those that differ most before others; of
        each the best row, the worst, the one with the largest share of tokens beyond the limits of the clip
        (:meth:`_beyond_clip`), and one that a length limit cut off."""
        tokens, rows, lengths = 0, list[int](), batch.lengths
        totals = np.zeros(len(batch)) if batch.rewards is None else batch.responses.sum(batch.rewards).numpy()
        ends = np.ones(len(batch), bool) if batch.is_last_step is None else batch.is_last_step.numpy()
        cut = np.zeros(len(batch), bool) if batch.truncated is None else batch.truncated.numpy()
        beyond = self._beyond_clip(batch)
        groups: dict[str, list[int]] = defaultdict(list)
        for row, uid in enumerate(batch.uids):
            groups[uid].append(row)
        spread = {
            uid: float(np.ptp(totals[[row for row in group if ends[row]] or group])) for uid, group in groups.items()
        }
        for uid in sorted(groups, key=lambda uid: -spread[uid]):
            best_first = sorted(groups[uid], key=lambda row: -totals[row])
            order = [best_first[n // 2 if n % 2 == 0 else -1 - n // 2] for n in range(len(best_first))]
            clipped = sorted((row for row in order[2:] if beyond[row]), key=lambda row: -beyond[row])[:1]
            shortened = [row for row in order[2:] if cut[row] and row not in clipped][:1]
            order = [*order[:2], *clipped, *shortened, *(row for row in order[2:] if row not in clipped + shortened)]
            for row in (order if spread[uid] else groups[uid])[: max(self.rows // 2, 1)]:
                if len(rows) == self.rows or tokens + lengths[row] > MOST_TOKENS:
                    return rows
                rows.append(row)
                tokens += int(lengths[row])
        return rows

    def _beyond_clip(self, batch: TrainingBatch) -> np.ndarray:
        """Return for each row the share of its trained tokens whose probability by the trainer before the update is
        beyond ``eps_clip_low`` and ``eps_clip_high`` around the engine's, [B] in 0 to 1; zeros if one of the two is
        unknown. What the update itself will clip depends on its optimizer steps: nobody knows it when samples are
        kept."""
        if batch.old_logprobs is None or batch.rollout_logprobs is None:
            return np.zeros(len(batch))
        limits, trained = self.algorithm, batch.loss_mask > 0
        ratio = (batch.old_logprobs.float() - batch.rollout_logprobs).exp()
        beyond = ((ratio < 1 - limits.eps_clip_low) | (ratio > 1 + limits.eps_clip_high)) & trained
        counts = batch.responses.sum(trained.float()).clamp(min=1)
        return np.asarray(batch.responses.sum(beyond.float()) / counts)

    def write(self, step: int, batch: TrainingBatch, rows: Sequence[int], logprobs: np.ndarray | None) -> Path:
        """Write the step's file, and return its path. ``logprobs``: of the trainer before the update, those of the
        response tokens of ``rows``, [r] float32, in nats."""
        scores, ends = trajectory_rewards(batch), np.cumsum(batch.response_lengths[list(rows)])
        of_rows = [None] * len(rows) if logprobs is None else np.split(logprobs, ends)[:-1]
        samples = [self._sample(batch, row, scores, of_row) for row, of_row in zip(rows, of_rows, strict=True)]
        ids = np.unique(batch.rows.select(batch.tokens, rows).numpy())
        record = {
            "format": SAMPLE_FORMAT,
            "step": step,
            "rows": len(batch),
            "of_rows": self.of_rows,
            "samples": samples,
            "pieces": {str(token): self._piece(int(token)) for token in ids},
            **reward_groups(batch),
        }
        path = self.folder / f"step_{step}.json"
        private_folder(path.parent)
        unfinished = path.with_name(f".{path.name}")
        unfinished.write_text(json.dumps(record))
        unfinished.replace(path)
        return path

    def texts(self, batch: TrainingBatch, rows: Sequence[int]) -> list[ShownSample]:
        """Return rows as texts, for trackers."""
        stops, shown, rewards = self._facts.get("stop_reasons"), list[ShownSample](), trajectory_rewards(batch)
        for row in rows:
            response, length = shown_tokens(batch, row), int(batch.lengths[row])
            tokens = batch.tokens[batch.rows.of(row)].tolist()
            reward = None if rewards is None else float(rewards[row])
            stop = "" if stops is None else stops[row] or ""
            split = length - response
            shown.append(
                (batch.uids[row], reward, stop, *(self.tokenizer.decode(p) for p in (tokens[:split], tokens[split:])))
            )
        return shown

    def _sample(
        self, batch: TrainingBatch, row: int, scores: Tensor | None, logprobs: np.ndarray | None
    ) -> dict[str, Any]:
        response, length, of_row = shown_tokens(batch, row), int(batch.lengths[row]), batch.responses.of(row)
        tokens = batch.tokens[batch.rows.of(row)].numpy()
        facts = {name: None if rows is None else rows[row] for name, rows in self._facts.items()}
        sampled = facts.get("loss_masks")
        support = batch.rollout_support[row].last(response).counts if batch.rollout_support else None

        def last(values: Any, kind: str = "<f4") -> str | None:
            return None if values is None else _packed(np.asarray(values)[-response:] if response else [], kind)

        rewards = None if batch.rewards is None or self.of_rows else batch.rewards[of_row].numpy()
        advantages = None if batch.advantages is None or self.of_rows else batch.advantages[of_row].numpy()
        return {
            "uid": batch.uids[row],
            "answer": "" if batch.preferences is None else ANSWERS[float(batch.preferences[row, 0]) > 0],
            "adapter": batch.adapters[row] if batch.adapters else "",
            "reward": None if scores is None or self.of_rows else float(scores[row]),
            "stop": facts.get("stop_reasons") or "",
            "versions": [list(span) for span in facts.get("rollout_versions") or ()],
            "prompt": _packed(tokens[: length - response], "<i4"),
            "tokens": _packed(tokens[length - response :], "<i4"),
            "mask": last(batch.loss_mask[of_row].numpy(), "u1"),
            "sampled": None if sampled is None else _packed(sampled, "u1"),
            "engine": last(None if batch.rollout_logprobs is None else batch.rollout_logprobs[of_row].numpy()),
            "trainer": last(logprobs),
            "advantages": last(advantages),
            "rewards": last(rewards),
            "support": last(support, "<i4"),
        }

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self.tokenizer.decode([token])
        return self._pieces[token]


def shown_tokens(batch: TrainingBatch, row: int) -> int:
    """Return the number of response tokens of a row; 0 if it failed."""
    return int(batch.response_mask[batch.responses.of(row)].sum())


def reward_groups(batch: TrainingBatch) -> dict[str, Any]:
    """Return ``groups``: (uid, mean reward, standard deviation, rows) of each group; ``group_count``; ``flat_groups``:
    the number of groups whose rewards are all equal. ``rows`` counts the trajectories."""
    trajectories, names = trajectories_of(batch), dict[str, int]()
    uids = trajectories.of_last(batch.uids)
    groups = np.asarray([names.setdefault(uid, len(names)) for uid in uids], dtype=np.int64)
    totals, count = np.zeros(len(uids)), len(names)
    if batch.rewards is not None:
        totals = rewards_of_trajectories(batch).numpy().astype(np.float64)
    rows = np.maximum(np.bincount(groups, minlength=count), 1)
    means = np.bincount(groups, totals, count) / rows
    deviations = np.sqrt(np.bincount(groups, (totals - means[groups]) ** 2, count) / rows)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, groups, totals)
    np.maximum.at(high, groups, totals)
    flat = low == high
    measured = zip(names, means.tolist(), np.where(flat, 0.0, deviations).tolist(), rows.tolist(), strict=True)
    return {"groups": list(measured)[:MOST_GROUPS], "group_count": count, "flat_groups": int(flat.sum())}


def _packed(values: Any, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode()
