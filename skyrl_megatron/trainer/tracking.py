"""Logging a run's numbers: to ``metrics.jsonl``, TensorBoard, the console, and a tracker by name."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_megatron.config.run_folder import run_folder
from skyrl_megatron.errors import SkyRLMegatronWarning
from skyrl_megatron.trainer.checkpoints import resumed_step
from skyrl_megatron.trainer.console import ConsoleSink
from skyrl_megatron.trainer.exporters import PrometheusEndpoint
from skyrl_megatron.trainer.trackers import ShownSample, named_trackers

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

METRICS_FILE = "metrics.jsonl"


class MetricSink(Protocol):
    """One place that numbers go to."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the numbers of a step."""

    def finish(self) -> None:
        """Write out what is buffered."""


class JsonLines:
    """A JSON object for each step, on disk at once. ``after``: the step that the run continues from; lines of later
    steps are dropped, and those that are none. Numbers that are not finite become null."""

    def __init__(self, path: Path, after: int | None) -> None:
        kept = [] if after is None else [line for line in read_metrics(path) if line["step"] <= after]
        self.steps = {line["step"] for line in kept}
        """Steps that an earlier run logged."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.new")  # what was logged stays until all that is kept is written again
        self._file = beside.open("w")
        for line in kept:
            self._write(line)
        os.fsync(self._file.fileno())
        os.replace(beside, path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        self._write({"step": step, **finite})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``, without those that are none: the last one, where a run was killed as it
    wrote it, and any that was damaged, of which a SkyRLMegatronWarning tells."""
    texts = path.read_bytes().splitlines() if path.is_file() else []
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            line["step"] + 0
        except (ValueError, TypeError, KeyError):
            if number < len(texts):
                message = f"{path}: line {number} is damaged and left out"
                warnings.warn(message, SkyRLMegatronWarning, stacklevel=2)
        else:
            lines.append(line)
    return lines


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers, without those that have none."""
    return {name: float(value) for name, value in metrics.items() if value is not None}


class TensorBoard:
    """Event files that ``tensorboard --logdir`` shows: an event for each step, with all its numbers. ``after``: as in
    :class:`JsonLines`; TensorBoard is told to forget later steps."""

    def __init__(self, folder: Path, after: int | None) -> None:
        from torch.utils.tensorboard.writer import FileWriter

        self._writer = FileWriter(str(folder), flush_secs=10)
        if after is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            self._writer.add_event(Event(file_version="brain.Event:2"), after + 1)
            self._writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), after + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_summary(Summary(value=values), step)

    def finish(self) -> None:
        self._writer.close()


def _prometheus(cfg: SkyRLTrainConfig) -> PrometheusEndpoint | None:
    if (port := cfg.trainer.prometheus_port) is None:
        return None
    from skyrl_megatron.inference.http_server import endpoint_token

    return PrometheusEndpoint(port, endpoint_token(run_folder(cfg) / "prometheus_token", "prometheus_token"))


class Tracking:
    """All sinks of a run as one. :meth:`open` comes once the step that the run continues from is known."""

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        self.cfg, self.folder = cfg, run_folder(cfg)
        self.console = ConsoleSink(self.folder / "console.log")
        self._named = named_trackers(cfg, resumed=resumed_step(cfg) > 0)
        self._endpoint = _prometheus(cfg)
        self.sinks: list[MetricSink] = []

    def open(self, *, total_steps: int, resumed_from: int | None = None) -> bool:
        """Start to take numbers, and return whether those of step ``resumed_from`` were taken before; numbers of later
        steps are of a run that came to nothing. Called again when the run goes back to an earlier step."""
        after = resumed_from
        for sink in self.sinks[:2]:
            sink.finish()
        lines = JsonLines(self.folder / METRICS_FILE, after)
        self.sinks = [
            lines,
            TensorBoard(self.folder / "tensorboard", after),
            *self._named,
            *([self._endpoint] if self._endpoint is not None else []),
        ]
        self.console.start(total_steps, resumed_from or 0)
        return resumed_from in lines.steps

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Give the numbers of a step, by name, to every sink."""
        metrics = as_numbers(data)
        for sink in (*self.sinks, self.console):
            sink.log(metrics, step)

    @property
    def takes_samples(self) -> bool:
        """Whether some sink takes samples, so that their texts are worth making."""
        return bool(self._named)

    def samples(self, rows: Sequence[ShownSample], step: int) -> None:
        """Give samples of a step to the sinks that take them."""
        for tracker in self._named:
            tracker.samples(rows, step)

    def say(self, text: str) -> None:
        """Write a line for people."""
        self.console.say(text)

    def finish(self) -> None:
        """Close every sink. May be called twice."""
        sinks, self.sinks = self.sinks, []
        for sink in (*sinks, self.console):
            sink.finish()
