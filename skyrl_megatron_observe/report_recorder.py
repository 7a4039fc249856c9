"""The recorder of the report: it writes samples, timeline and expert loads, and has the page made of them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.trainer.recorders import RecordedRun, RunRecorder, Score, remove_later_steps
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron_observe.exporters import SpanSender
from skyrl_megatron_observe.run_report import EXPERTS, SAMPLES, SPANS
from skyrl_megatron_observe.samples import SampleLog
from skyrl_megatron_observe.timeline import LaneLog

if TYPE_CHECKING:
    import numpy as np

    from skyrl_megatron.workers.worker_group import WorkerGroup

PAGE_EVERY_S = 30.0
"""Shortest time between two pages of a run."""
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
            logprobs = batch.responses.select(batch.old_logprobs, rows).numpy()
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
