"""What people see of a run: a progress bar on a terminal, plain lines elsewhere, all of it in ``console.log``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_megatron.progress import spoke

SHOWN = (
    ("reward/avg_raw_reward", "reward {:.3f}"),
    ("policy/policy_kl", "kl {:.4f}"),
    ("policy/grad_norm", "grad {:.3g}"),
    ("trainer/tokens_per_second", "{:,.0f} tok/s"),
    ("timing/step", "{:.2f} s"),
)
"""Metrics of a step's line, in order; those that a step does not have are left out."""


class ConsoleSink:
    """The lines of a run, on the terminal and in the log file ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._progress: Any = None
        self._task: Any = None
        self._total = self._first = 0
        self._began: float | None = None

    def start(self, total_steps: int, first_step: int) -> None:
        """Show the progress of steps ``first_step`` + 1 … ``total_steps``, where there is a terminal."""
        self._total = total_steps
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns)
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._progress.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a line for the step; evaluations have lines of their own, those of the warm-up too."""
        if "warmup/step" in metrics:
            line = "warm-up step {warmup/step:.0f} · loss {warmup/loss:.3f} · score {warmup/score:.3f}"
            self.say(line.format(**metrics))
        if "timing/step" in metrics:
            if self._began is None:  # what came before the first step is no measure of the others
                self._first, self._began = step - 1, time.monotonic() - metrics["timing/step"]
            parts = [text.format(metrics[name]) for name, text in SHOWN if name in metrics]
            if self._progress is not None:
                self._progress.update(self._task, completed=step, description=" · ".join(parts))
            else:
                parts.append(f"ETA {duration(self._seconds_left(step))}")
            self._write(f"step {step}/{self._total} · " + " · ".join(parts), shown=self._progress is None)
        if "eval/all/avg_score" in metrics:
            self.say(f"eval at step {step} · score {metrics['eval/all/avg_score']:.3f}")

    def say(self, text: str) -> None:
        """Write a line of its own."""
        self._write(text, shown=True)

    def _write(self, text: str, *, shown: bool) -> None:
        spoke()
        if shown and self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        elif shown:
            print(text, flush=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _seconds_left(self, step: int) -> float:
        assert self._began is not None
        return (time.monotonic() - self._began) / (step - self._first) * (self._total - step)

    def finish(self) -> None:
        """Leave the terminal as it was."""
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
