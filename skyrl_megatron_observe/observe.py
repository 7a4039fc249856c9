"""The files from which the report of a run is made: samples, timeline of trainer, ranks and engines, expert loads.

A sample has its tokens and, for each response token, the log-probs of engine and trainer, advantage, reward and mask.
They are little-endian arrays in base64: int32 ids and counts, uint8 masks, and float32 for the rest.
"""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron import progress as spans
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.derive import supervised
from skyrl_megatron.config.resolve import private_folder, run_folder
from skyrl_megatron.progress import Span
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.trainer.recorders import RecordedRun, RunRecorder, Score, remove_later_steps, sample_interval
from skyrl_megatron.trainer.step_batch import trajectories_of, trajectory_rewards
from skyrl_megatron.trainer.tracking import ShownSample
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron_observe.exporters import SpanSender
from skyrl_megatron_observe.run_report import EXPERTS, SAMPLE_FORMAT, SAMPLES, SPANS

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.workers.worker_group import WorkerGroup


RANKS = 64
"""Number of ranks of a role that get lanes in the timeline."""
SHORTEST_S = 0.0005
"""Duration of the shortest span in the timeline."""
OUTER = ("step", "train_critic_and_policy")
"""Phases that contain other phases."""


class LaneLog:
    """Writes the timeline: one line per step, in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, roles: Mapping[str, WorkerGroup], *, record: bool = True) -> list[Span]:
        """Return the spans of trainer, ranks and engines since the last call, and write them unless ``record`` is
        false."""
        taken = [span for span in spans.take() if span[1] not in OUTER]
        for name, role in roles.items():
            if role.group.actors:
                for rank, of_rank in enumerate(role.take_spans()[:RANKS]):
                    taken += [(f"{name} rank {rank}", what, begin, end) for _, what, begin, end in of_rank]
        # Thousands of short spans would make the page slow, and none of them is wide enough to be seen.
        visible = [span for span in taken if span[3] - span[2] >= SHORTEST_S]
        if visible and record:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(lanes(step, visible)) + "\n")
        return visible


def lanes(step: int, spans_of_step: Sequence[Span]) -> dict[str, object]:
    """Return a line of the timeline: lane → spans in seconds since ``began``; the trainer is first, then by name."""
    began = min(begin for _, _, begin, _ in spans_of_step)
    by_lane: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for lane, name, begin, end in spans_of_step:
        by_lane[lane].append((name, round(begin - began, 4), round(end - began, 4)))
    order = sorted(by_lane, key=lambda lane: (lane != "trainer", [_as_number(part) for part in lane.split()]))
    outer_first = {lane: sorted(by_lane[lane], key=lambda span: (span[1], -span[2])) for lane in order}
    return {"step": step, "began": round(began, 3), "lanes": outer_first}


def _as_number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)


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

        Groups whose rewards differ, which alone have advantages, come first; of each the best and the worst row."""
        tokens, rows, lengths = 0, list[int](), batch.lengths
        totals = np.zeros(len(batch)) if batch.rewards is None else batch.rewards.sum(dim=1).numpy()
        ends = np.ones(len(batch), bool) if batch.is_last_step is None else batch.is_last_step.numpy()
        groups: dict[str, list[int]] = defaultdict(list)
        for row, uid in enumerate(batch.uids):
            groups[uid].append(row)
        flat = {uid: len({totals[row] for row in group if ends[row]}) < 2 for uid, group in groups.items()}
        for uid in sorted(groups, key=flat.__getitem__):
            best_first = sorted(groups[uid], key=lambda row: -totals[row])
            order = [best_first[n // 2 if n % 2 == 0 else -1 - n // 2] for n in range(len(best_first))]
            for row in (groups[uid] if flat[uid] else order)[: max(self.rows // 2, 1)]:
                if len(rows) == self.rows or tokens + lengths[row] > MOST_TOKENS:
                    return rows
                rows.append(row)
                tokens += int(lengths[row])
        return rows

    def write(self, step: int, batch: TrainingBatch, rows: Sequence[int], logprobs: np.ndarray | None) -> Path:
        """Write the step's file, and return its path. ``logprobs``: of the trainer before the update,
        [rows, T] float32, in nats."""
        scores = trajectory_rewards(batch)
        samples = [
            self._sample(batch, row, scores, None if logprobs is None else logprobs[number])
            for number, row in enumerate(rows)
        ]
        ids = np.unique(batch.sequences[list(rows)].numpy())
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
            response, whole = int(batch.response_mask[row].sum()), int(batch.attention_mask[row].sum())
            tokens = batch.sequences[row, -whole:].tolist()
            reward = None if rewards is None else float(rewards[row])
            stop = "" if stops is None else stops[row] or ""
            split = whole - response
            shown.append(
                (batch.uids[row], reward, stop, *(self.tokenizer.decode(p) for p in (tokens[:split], tokens[split:])))
            )
        return shown

    def _sample(
        self, batch: TrainingBatch, row: int, scores: Tensor | None, logprobs: np.ndarray | None
    ) -> dict[str, Any]:
        response = int(batch.response_mask[row].sum())
        whole = int(batch.attention_mask[row].sum())
        tokens = batch.sequences[row, -whole:].numpy()
        facts = {name: None if rows is None else rows[row] for name, rows in self._facts.items()}
        sampled = facts.get("loss_masks")
        support = batch.rollout_support[row].last(response).counts if batch.rollout_support else None

        def last(values: Any, kind: str = "<f4") -> str | None:
            return None if values is None else _packed(np.asarray(values)[-response:] if response else [], kind)

        rewards = None if batch.rewards is None or self.of_rows else batch.rewards[row].numpy()
        advantages = None if batch.advantages is None or self.of_rows else batch.advantages[row].numpy()
        return {
            "uid": batch.uids[row],
            "answer": "" if batch.preferences is None else ANSWERS[float(batch.preferences[row, 0]) > 0],
            "adapter": batch.adapters[row] if batch.adapters else "",
            "reward": None if scores is None or self.of_rows else float(scores[row]),
            "stop": facts.get("stop_reasons") or "",
            "versions": [list(span) for span in facts.get("rollout_versions") or ()],
            "prompt": _packed(tokens[: whole - response], "<i4"),
            "tokens": _packed(tokens[whole - response :], "<i4"),
            "mask": last(batch.loss_mask[row].numpy() > 0, "u1"),
            "sampled": None if sampled is None else _packed(sampled, "u1"),
            "engine": last(None if batch.rollout_logprobs is None else batch.rollout_logprobs[row].numpy()),
            "trainer": last(logprobs),
            "advantages": last(advantages),
            "rewards": last(rewards),
            "support": last(support, "<i4"),
        }

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self.tokenizer.decode([token])
        return self._pieces[token]


def reward_groups(batch: TrainingBatch) -> dict[str, Any]:
    """Return ``groups``: (uid, mean reward, standard deviation, rows) of each group; ``group_count``; ``flat_groups``:
    the number of groups whose rewards are all equal. ``rows`` counts the trajectories."""
    trajectories, names = trajectories_of(batch), dict[str, int]()
    uids = trajectories.of_last(batch.uids)
    groups = np.asarray([names.setdefault(uid, len(names)) for uid in uids], dtype=np.int64)
    totals, count = np.zeros(len(uids)), len(names)
    if batch.rewards is not None:
        totals = trajectories.rewards(batch.rewards).numpy().astype(np.float64)
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


PAGE_EVERY_S = 30.0
LAST_PAGE_S = 60.0
"""How long the end of a run waits for its last page."""


class ReportRecorder(RunRecorder):
    """Writes samples, timeline, expert loads and the report into the run's folder."""

    ends_run = True

    def __init__(self, run: RecordedRun) -> None:
        super().__init__(run)
        cfg = run.cfg
        self.folder = run_folder(cfg)
        self.samples = SampleLog(cfg, run.tokenizer, run.total_steps)
        self.lanes = LaneLog(self.folder / SPANS)
        self.page = PageWriter(self.folder)
        endpoint, name = cfg.trainer.opentelemetry_endpoint, f"{cfg.trainer.project_name}/{cfg.trainer.run_name}"
        self.collector = None if endpoint is None else SpanSender(endpoint, name)

    def on_load(self, resumed_from: int | None) -> None:
        after = -1 if resumed_from is None else resumed_from
        for path in (self.folder / SPANS, self.folder / EXPERTS):
            if path.is_file():
                lines = [line for line in path.read_text().splitlines() if _step_of(line) <= after]
                path.write_text("".join(f"{line}\n" for line in lines))
        remove_later_steps(self.folder / SAMPLES, resumed_from)

    def on_start(self, step: int, roles: Mapping[str, WorkerGroup]) -> None:
        # The timeline of the start ends here, so that the next line begins with the first step. It is written only at
        # step 0: a resumed run has a line for ``step`` already.
        self.lanes.write(step, roles, record=step == 0)

    def on_rollouts(self, output: GeneratorOutput) -> None:
        self.samples.note(output)

    def before_update(self, step: int, batch: TrainingBatch, score: Score | None) -> None:
        if not self.samples.due(step):
            return
        rows = self.samples.chosen(batch)
        logprobs: np.ndarray | None = None
        if batch.old_logprobs is not None:
            logprobs = batch.old_logprobs[rows].numpy()
        elif rows and score is not None:
            logprobs = score(batch.select(rows))
        self.samples.write(step, batch, rows, logprobs)
        if rows and self.run.tracker.takes_samples:
            self.run.tracker.samples(self.samples.texts(batch, rows), step)

    def on_step_end(self, step: int, roles: Mapping[str, WorkerGroup]) -> None:
        step_spans = self.lanes.write(step, roles)
        if self.collector is not None:
            self.collector.send(step, step_spans)
        if self.samples.due(step) and (load := roles["policy"].expert_load()):
            line = {"step": step, "layers": sorted(load), "load": [load[layer] for layer in sorted(load)]}
            with (self.folder / EXPERTS).open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.page.begin()

    def on_end(self) -> None:
        if self.collector is not None:
            self.collector.finish()
        self.page.finish()


class PageWriter:
    """Writes ``report.html`` in a separate process, one at a time and at most every 30 s."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._began = time.monotonic()

    def begin(self) -> None:
        """Start a page, unless one is being written or was started recently."""
        busy = self._process is not None and self._process.poll() is None
        if not busy and time.monotonic() - self._began >= PAGE_EVERY_S:
            self._start()

    def finish(self) -> None:
        """Write the last page, and wait for it."""
        self._wait()
        self._start()
        self._wait()

    def _start(self) -> None:
        self._began = time.monotonic()
        command = [sys.executable, "-m", f"{__package__}.run_report", str(self.folder)]
        with (self.folder / "console.log").open("a") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)

    def _wait(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_PAGE_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process = None


def _step_of(line: str) -> float:
    """Return the step of a line, infinity for an incomplete line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
