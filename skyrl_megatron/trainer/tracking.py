"""Log the metrics of a run to ``metrics.jsonl``, to the console, and to the registered sinks.

Sinks are registered with ``register_sink``: TensorBoard, the trackers of ``trainer.logger`` and a Prometheus endpoint
are in ``skyrl_megatron_observe``.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skyrl_megatron.config.resolve import run_folder, trackers
from skyrl_megatron.errors import LaunchError, SkyRLMegatronWarning
from skyrl_megatron.plugins import SINKS, TRACKERS
from skyrl_megatron.trainer.console import ConsoleSink

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


METRICS_FILE = "metrics.jsonl"


type ShownSample = tuple[str, float | None, str, str, str]
"""A sample as trackers show it: uid, reward, reason of the stop, prompt, response."""


class MetricSink:
    """A destination of metrics. A factory registered with ``register_sink`` gets the configuration, and whether the
    run continues from a checkpoint, and returns the sinks of the run."""

    takes_samples: ClassVar[bool] = False
    """Whether :meth:`samples` does anything, so that the texts of samples have to be decoded."""

    def open(self, after: int | None) -> None:
        """Begin, or begin again when the run returns to an earlier step. ``after``: the step from which the run
        continues; metrics of later steps are void. None: all of them are."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""

    def samples(self, rows: Sequence[ShownSample], step: int) -> None:
        """Log samples of a step."""

    def finish(self) -> None:
        """Flush and close."""


class JsonLines(MetricSink):
    """Writes a JSON object per step, flushed at once. ``after``: the step from which the run continues; lines of later
    steps and damaged lines are dropped. Numbers that are not finite become null."""

    def __init__(self, path: Path, after: int | None) -> None:
        kept = [] if after is None else [line for line in read_metrics(path) if line["step"] <= after]
        self.steps = {line["step"] for line in kept}
        """Steps that an earlier process logged."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.new")  # the old file stays until all lines are copied
        self._file = unfinished.open("w")
        for line in kept:
            self._write(line)
        os.fsync(self._file.fileno())
        os.replace(unfinished, path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        self._write({"step": step, **finite})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``, without an incomplete last line, which a killed run leaves, and without
    damaged lines, which cause a SkyRLMegatronWarning."""
    texts = path.read_bytes().splitlines() if path.is_file() else []
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            line["step"] + 0
        except (ValueError, TypeError, KeyError):
            if number < len(texts):
                message = f"{path}: line {number} is damaged and ignored"
                warnings.warn(message, SkyRLMegatronWarning, stacklevel=2)
        else:
            lines.append(line)
    return lines


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as floats, without those that are None."""
    return {name: float(value) for name, value in metrics.items() if value is not None}


class Tracking:
    """All metric sinks of a run. Call :meth:`open` once the step from which the run continues is known.

    With ``resumed``, experiment trackers continue the run that they recorded; otherwise they begin another. Raises
    LaunchError for a tracker that is not registered, or that does not start.
    """

    def __init__(self, cfg: SkyRLTrainConfig, *, resumed: bool = False) -> None:
        self.cfg, self.folder = cfg, run_folder(cfg)
        self.console = ConsoleSink(self.folder / "console.log")
        for name in trackers(cfg):
            if TRACKERS.find(name) is None:
                raise LaunchError(
                    f"trainer.logger={name}: no installed package registers it; install skyrl-megatron with all its "
                    "packages, or set trainer.logger=console"
                )
        # Sinks start before the run does: a tracker that cannot be reached then costs no start of models.
        self._registered: list[MetricSink] = [sink for make in SINKS.all() for sink in make(cfg, resumed)]
        self.sinks: list[MetricSink] = []
        """The open sinks but the console; the first one is :class:`JsonLines`."""

    def open(self, *, total_steps: int, resumed_from: int | None = None) -> bool:
        """Open the sinks, and return whether step ``resumed_from`` is logged already. Metrics of later steps are
        discarded. Call it again when the run returns to an earlier step."""
        for lines_before in self.sinks[:1]:
            lines_before.finish()
        lines = JsonLines(self.folder / METRICS_FILE, resumed_from)
        for sink in self._registered:
            sink.open(resumed_from)
        self.sinks = [lines, *self._registered]
        self.console.start(total_steps, resumed_from or 0)
        return resumed_from in lines.steps

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Log the metrics of a step to every sink."""
        metrics = as_numbers(data)
        for sink in self.sinks:
            sink.log(metrics, step)
        self.console.log(metrics, step)

    @property
    def takes_samples(self) -> bool:
        """Whether a sink takes samples, so that their texts have to be decoded."""
        return any(sink.takes_samples for sink in self._registered)

    def samples(self, rows: Sequence[ShownSample], step: int) -> None:
        """Log samples of a step to the sinks that take them."""
        for sink in self._registered:
            sink.samples(rows, step)

    def say(self, text: str) -> None:
        """Write a line to the terminal and ``console.log``."""
        self.console.say(text)

    def finish(self) -> None:
        """Close every sink. May be called twice."""
        sinks, self.sinks = self.sinks, []
        for sink in sinks:
            sink.finish()
        self.console.finish()
