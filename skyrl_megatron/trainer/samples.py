"""Samples of a run that people can look at: ``samples/step_N.json`` in its folder, a few rows of a few steps.

A row holds its tokens and, of each response token, log-probs of engine and trainer, advantage, reward and mask, as
little-endian arrays in base64: int32 ids and counts, uint8 masks, float32 the rest.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.run_folder import private_folder, run_folder
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.trainer.dashboard.reading import SAMPLE_FORMAT, SAMPLES
from skyrl_megatron.trainer.trackers import ShownSample
from skyrl_megatron.types import TrainingBatch

MOST_TOKENS = 65_536
"""Tokens of a step's samples; further rows are left out."""
MOST_GROUPS = 512
"""Groups whose rewards are told."""


def look_interval(cfg: SkyRLTrainConfig, total_steps: int) -> int:
    """Return every how many steps samples are kept, so that the run has ``samples_per_run``; 0: never."""
    rows, most = cfg.trainer.samples_per_step, cfg.trainer.samples_per_run
    return 0 if rows == 0 else max(1, -(-total_steps * rows // max(most, rows)))


class SampleLog:
    """Keeps samples of the steps that are looked at."""

    def __init__(self, cfg: SkyRLTrainConfig, tokenizer: Any, total_steps: int) -> None:
        self.folder, self.tokenizer = run_folder(cfg) / SAMPLES, tokenizer
        self.rows, self.interval = cfg.trainer.samples_per_step, look_interval(cfg, total_steps)
        self._pieces: dict[int, str] = {}
        self._facts: dict[str, Sequence[Any] | None] = {}

    def due(self, step: int) -> bool:
        """Whether this step is looked at: the first one, and others evenly."""
        return self.interval > 0 and (step - 1) % self.interval == 0

    def note(self, output: GeneratorOutput) -> None:
        """Take what the generator knows of the rows and the batch does not hold."""
        names = ("stop_reasons", "loss_masks", "rollout_versions")
        self._facts = {name: output.get(name) for name in names}  # type: ignore[misc]

    def chosen(self, batch: TrainingBatch) -> list[int]:
        """Return the rows to keep: whole groups one after the other, as many as there is room for."""
        tokens, rows, uids = 0, list[int](), np.asarray(batch.uids)
        left, lengths = np.ones(len(uids), bool), batch.lengths
        while left.any():
            group = np.flatnonzero(uids == uids[left.argmax()])
            left[group] = False
            for row in group[: max(self.rows // 2, 1)].tolist():
                if len(rows) == self.rows or tokens + lengths[row] > MOST_TOKENS:
                    return rows
                rows.append(row)
                tokens += int(lengths[row])
        return rows

    def write(self, step: int, batch: TrainingBatch, rows: Sequence[int], logprobs: np.ndarray | None) -> Path:
        """Write the step's file. ``logprobs`` [rows, T] float32, nats: of the trainer, before the update."""
        samples = [
            self._sample(batch, row, None if logprobs is None else logprobs[number]) for number, row in enumerate(rows)
        ]
        ids = np.unique(batch.sequences[list(rows)].numpy())
        record = {
            "format": SAMPLE_FORMAT,
            "step": step,
            "rows": len(batch),
            "samples": samples,
            "pieces": {str(token): self._piece(int(token)) for token in ids},
            **reward_groups(batch),
        }
        path = self.folder / f"step_{step}.json"
        private_folder(path.parent)
        beside = path.with_name(f".{path.name}")
        beside.write_text(json.dumps(record))
        beside.replace(path)
        return path

    def texts(self, batch: TrainingBatch, rows: Sequence[int]) -> list[ShownSample]:
        """Return rows as texts, for trackers."""
        stops, told = self._facts.get("stop_reasons"), list[ShownSample]()
        for row in rows:
            response, whole = int(batch.response_mask[row].sum()), int(batch.attention_mask[row].sum())
            tokens = batch.sequences[row, -whole:].tolist()
            reward = None if batch.rewards is None else float(batch.rewards[row].sum())
            stop = "" if stops is None else stops[row] or ""
            split = whole - response
            told.append(
                (batch.uids[row], reward, stop, *(self.tokenizer.decode(p) for p in (tokens[:split], tokens[split:])))
            )
        return told

    def _sample(self, batch: TrainingBatch, row: int, logprobs: np.ndarray | None) -> dict[str, Any]:
        response = int(batch.response_mask[row].sum())
        whole = int(batch.attention_mask[row].sum())
        tokens = batch.sequences[row, -whole:].numpy()
        facts = {name: None if known is None else known[row] for name, known in self._facts.items()}
        sampled = facts.get("loss_masks")
        support = batch.rollout_support[row].last(response).counts if batch.rollout_support else None

        def last(values: Any, kind: str = "<f4") -> str | None:
            return None if values is None else _packed(np.asarray(values)[-response:] if response else [], kind)

        rewards = None if batch.rewards is None else batch.rewards[row].numpy()
        return {
            "uid": batch.uids[row],
            "adapter": batch.adapters[row] if batch.adapters else "",
            "reward": None if rewards is None else float(rewards.sum()),
            "stop": facts.get("stop_reasons") or "",
            "versions": [list(span) for span in facts.get("rollout_versions") or ()],
            "prompt": _packed(tokens[: whole - response], "<i4"),
            "tokens": _packed(tokens[whole - response :], "<i4"),
            "mask": last(batch.loss_mask[row].numpy() > 0, "u1"),
            "sampled": None if sampled is None else _packed(sampled, "u1"),
            "engine": last(None if batch.rollout_logprobs is None else batch.rollout_logprobs[row].numpy()),
            "trainer": last(logprobs),
            "advantages": last(None if batch.advantages is None else batch.advantages[row].numpy()),
            "rewards": last(rewards),
            "support": last(support, "<i4"),
        }

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self.tokenizer.decode([token])
        return self._pieces[token]


def reward_groups(batch: TrainingBatch) -> dict[str, Any]:
    """Return (uid, mean, deviation, rows) of the reward in each group, how many groups there are, and how many have
    one reward for all rows; of the rows that end a trajectory, where some do not."""
    totals = np.zeros(len(batch)) if batch.rewards is None else batch.rewards.sum(dim=1).numpy().astype(np.float64)
    ends = np.ones(len(batch), bool) if batch.is_last_step is None else batch.is_last_step.numpy()
    names: dict[str, int] = {}
    groups = np.asarray([names.setdefault(uid, len(names)) for uid in batch.uids], dtype=np.int64)[ends]
    totals, known = totals[ends], len(names)
    rows = np.maximum(np.bincount(groups, minlength=known), 1)
    means = np.bincount(groups, totals, known) / rows
    deviations = np.sqrt(np.bincount(groups, (totals - means[groups]) ** 2, known) / rows)
    low, high = np.full(known, np.inf), np.full(known, -np.inf)
    np.minimum.at(low, groups, totals)
    np.maximum.at(high, groups, totals)
    flat = low == high
    told = zip(names, means.tolist(), np.where(flat, 0.0, deviations).tolist(), rows.tolist(), strict=True)
    return {"groups": list(told)[:MOST_GROUPS], "group_count": known, "flat_groups": int(flat.sum())}


def _packed(values: Any, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode()
