"""The terminal output of a run and its copy in ``console.log``, and the time and memory of the run's phases."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from skyrl_megatron import progress as spans
from skyrl_megatron import progress as start_times
from skyrl_megatron.progress import current_task, note_output

SHOWN = (
    ("reward/avg_raw_reward", "reward {:.3f}"),
    ("sft/loss", "loss {:.4f}"),
    ("dpo/loss", "loss {:.4f}"),
    ("reward/loss", "loss {:.4f}"),
    ("rewards/accuracies", "accuracy {:.3f}"),
    ("policy/policy_kl", "kl {:.4f}"),
    ("policy/grad_norm", "grad {:.3g}"),
    ("trainer/tokens_per_second", "{:,.0f} tok/s"),
    ("timing/step", "{:.2f} s"),
)
"""Metrics in the line of a step, in order. Missing metrics are omitted."""
RECENT = 20
"""Steps whose time tells how long the others will take."""


class ConsoleSink:
    """Writes the lines of a run to the terminal and to the log file ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._progress: Any = None
        self._task: Any = None
        self._total = 0
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)
        """The last steps, and when they ended."""
        self._has_first = False

    def start(self, total_steps: int, first_step: int) -> None:
        """Show a progress bar for steps ``first_step`` + 1 … ``total_steps``, if stdout is a terminal."""
        self._total = total_steps
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns)
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._progress.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a line for the step, and separate lines for an evaluation and a step of the warm-up."""
        if "warmup/step" in metrics:
            line = "warm-up step {warmup/step:.0f} · loss {warmup/loss:.3f} · score {warmup/score:.3f}"
            self.say(line.format(**metrics))
        if "timing/step" in metrics:
            if not self._ends:  # the time before the first step says nothing about the next steps
                self._ends.append((step - 1, time.monotonic() - metrics["timing/step"]))
                self._has_first = True
            elif self._has_first:  # nor does the first step, which compiles and allocates
                self._ends.popleft()
                self._has_first = False
            self._ends.append((step, time.monotonic()))
            parts = [text.format(metrics[name]) for name, text in SHOWN if name in metrics]
            if self._progress is not None:
                self._progress.update(self._task, completed=step, description=" · ".join(parts))
            else:
                parts.append(f"ETA {duration(self._seconds_left(step))}")
            self._write(f"step {step}/{self._total} · " + " · ".join(parts), shown=self._progress is None)
        if "eval/all/avg_score" in metrics:
            self.say(f"eval at step {step} · score {metrics['eval/all/avg_score']:.3f}")
        if "eval/all/loss" in metrics:
            self.say(f"eval at step {step} · loss {metrics['eval/all/loss']:.4f}")

    def say(self, text: str) -> None:
        """Write a line."""
        self._write(text, shown=True)

    def _write(self, text: str, *, shown: bool) -> None:
        note_output()
        if shown and self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        elif shown:
            print(text, flush=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _seconds_left(self, step: int) -> float:
        """Return the seconds of the steps that are left, as the last ones took with all that passed between them."""
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        return (ended - began) / max(last - first, 1) * (self._total - step)

    def finish(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def duration(seconds: float) -> str:
    """Return ``1h05m``, ``3m20s`` or ``12s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


_process = psutil.Process()


class Phases:
    """Measures phases: ``with phases("generate"): …`` adds the seconds to ``timings["generate"]``, and records the
    memory of this process and of the roles at the end of the phase.

    ``role_bytes``: returns role → bytes of device memory; it is called with the name of the phase.
    """

    def __init__(self, role_bytes: Callable[[str], dict[str, int]] = lambda phase: {}) -> None:
        self.timings: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self._role_bytes, self._began = role_bytes, dict[str, float]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = self._began[name] = time.perf_counter()
        try:
            with current_task(name), spans.span("trainer", name):
                yield
                self.memory |= {f"{name}_{role}": nbytes / 1e9 for role, nbytes in self._role_bytes(name).items()}
        finally:
            del self._began[name]
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - began
            self.memory[f"{name}_trainer"] = _process.memory_info().rss / 1e9

    def so_far(self) -> dict[str, float]:
        """Return :attr:`timings`, including the seconds of unfinished phases so far."""
        now = time.perf_counter()
        return self.timings | {name: self.timings.get(name, 0.0) + now - began for name, began in self._began.items()}

    def metrics(self) -> dict[str, float]:
        """Return ``timing/<phase>`` in seconds, ``memory/<phase>_trainer_gb`` and ``memory/<phase>_<role>_gb``, and
        reset them."""
        timings = {f"timing/{name}": seconds for name, seconds in self.timings.items()}
        memory = {f"memory/{name}_gb": gigabytes for name, gigabytes in self.memory.items()}
        self.timings, self.memory = {}, {}
        return timings | memory


class StartUp:
    """Reports each phase before the first step with its seconds. ``began``: the start, by ``time.perf_counter``."""

    def __init__(self, say: Callable[[str], None], began: float | None = None) -> None:
        self.say, self._last = say, time.perf_counter() if began is None else began

    def done(self, text: str) -> None:
        """Write ``text`` and the seconds since the previous line. The text before its colon names the phase."""
        start_times.done(text.partition(":")[0])
        now = time.perf_counter()
        self.say(f"{text:<74}{now - self._last:6.1f} s")
        self._last = now
