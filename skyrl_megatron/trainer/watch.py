"""What a run leaves for those who look at it: samples, lanes, expert loads, and a page that is made anew meanwhile."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.run_folder import run_folder
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.trainer.dashboard.reading import EXPERTS, SAMPLES, SPANS
from skyrl_megatron.trainer.exporters import SpanSender
from skyrl_megatron.trainer.lanes import LaneLog
from skyrl_megatron.trainer.samples import SampleLog

if TYPE_CHECKING:
    import numpy as np

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.types import TrainingBatch
    from skyrl_megatron.workers.worker_group import WorkerGroup

PAGE_EVERY_S = 30.0
LAST_PAGE_S = 60.0
"""How long the end of a run waits for its last page."""


class RunWatch:
    """Writes into the run's folder beside ``metrics.jsonl``. :meth:`open` comes first."""

    def __init__(self, cfg: SkyRLTrainConfig, tokenizer: Any, total_steps: int) -> None:
        self.folder = run_folder(cfg)
        self.samples = SampleLog(cfg, tokenizer, total_steps)
        self.lanes = LaneLog(self.folder / SPANS)
        self.page = PageWriter(self.folder)
        endpoint, run = cfg.trainer.opentelemetry_endpoint, f"{cfg.trainer.project_name}/{cfg.trainer.run_name}"
        self.collector = None if endpoint is None else SpanSender(endpoint, run)

    def open(self, resumed_from: int | None) -> None:
        """Remove what an earlier run in the folder left of steps after ``resumed_from``; None: all of it."""
        after = -1 if resumed_from is None else resumed_from
        for path in (self.folder / SPANS, self.folder / EXPERTS):
            if path.is_file():
                kept = [line for line in path.read_text().splitlines() if _step_of(line) <= after]
                path.write_text("".join(f"{line}\n" for line in kept))
        if resumed_from is None:
            shutil.rmtree(self.folder / SAMPLES, ignore_errors=True)
        for path in (self.folder / SAMPLES).glob("step_*.json"):
            if int(path.stem[5:]) > after:
                path.unlink()

    def begin_steps(self, step: int, roles: Mapping[str, WorkerGroup]) -> None:
        """Put the start of a run, which is resumed at ``step`` unless that is 0, apart from its first step."""
        self.lanes.write(step, roles, told=step == 0)

    def keep_samples(
        self, step: int, batch: TrainingBatch, score: Callable[[TrainingBatch], np.ndarray] | None
    ) -> list[int]:
        """Keep some rows, where it is this step's turn, and return which. ``score``: gives the trainer's log-probs
        [rows, T] of rows whose batch has none."""
        rows: list[int] = []
        if self.samples.due(step):
            rows = self.samples.chosen(batch)
            logprobs: np.ndarray | None = None
            if batch.old_logprobs is not None:
                logprobs = batch.old_logprobs[rows].numpy()
            elif rows and score is not None:
                logprobs = score(batch.select(rows))
            self.samples.write(step, batch, rows, logprobs)
        return rows

    def note(self, output: GeneratorOutput) -> None:
        """Take what the generator knows of a batch's rows."""
        self.samples.note(output)

    def end_step(self, step: int, roles: Mapping[str, WorkerGroup]) -> None:
        """Write lanes and, where it is this step's turn, expert loads; begin a new page when the last one is old."""
        done = self.lanes.write(step, roles)
        if self.collector is not None:
            self.collector.send(step, done)
        if self.samples.due(step) and (load := roles["policy"].expert_load()):
            line = {"step": step, "layers": sorted(load), "load": [load[layer] for layer in sorted(load)]}
            with (self.folder / EXPERTS).open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.page.begin()

    def close(self) -> None:
        """Write the last page, and send what was not sent yet."""
        if self.collector is not None:
            self.collector.finish()
        self.page.finish()


class PageWriter:
    """Makes ``report.html`` in a process of its own, one at a time and every 30 s at most."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._began = time.monotonic()

    def begin(self) -> None:
        """Begin a page, unless one is under way or new."""
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
        command = [sys.executable, "-m", f"{__package__}.dashboard", str(self.folder)]
        with (self.folder / "console.log").open("a") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

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
    """Return the step of a line; of one that was cut off a step that is after all."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
