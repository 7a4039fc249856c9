"""``curves.png``, drawn at the end of a run from its ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.trainer.recorders import RunRecorder
from skyrl_megatron.trainer.tracking import METRICS_FILE, read_metrics

CURVES = (
    ("warm-up by imitation", ("warmup/loss", "warmup/score")),
    ("reward", ("reward/avg_raw_reward", "eval/all/avg_score")),
    ("loss", ("policy/final_loss", "policy/policy_kl")),
    ("gradient norm", ("policy/grad_norm",)),
    ("seconds per step", ("timing/step", "timing/generate", "timing/policy_train", "timing/sync_weights")),
    ("tokens per second", ("trainer/tokens_per_second",)),
    ("trainer − engine log-prob", ("policy/rollout_train_logprobs_abs_diff_max",)),
)
"""Panels and the metrics of each, drawn over the step; metrics of the warm-up are drawn over its own steps."""


class CurvesRecorder(RunRecorder):
    """Draws the curves when the run has ended."""

    ends_run = True

    def on_end(self) -> None:
        write_curves(run_folder(self.run.cfg))


def write_curves(folder: Path) -> Path:
    """Draw ``curves.png`` into the run's ``folder`` and return its path."""
    return draw_curves(read_metrics(folder / METRICS_FILE), folder / "curves.png")


def draw_curves(lines: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw a panel for each entry of :data:`CURVES` that has values, and return ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(title, names) for title, names in CURVES if any(_points(lines, name) for name in names)]
    figure = Figure(figsize=(12, 3.2 * max(1, -(-len(panels) // 2))), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (title, names) in enumerate(panels, 1):
        axes = figure.add_subplot(-(-len(panels) // 2), 2, number)
        for name in names:
            if points := _points(lines, name):
                axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else "", linewidth=1)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(_step_name(names[0]), fontsize=8)
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    return path


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(line[_step_name(name)], line[name]) for line in lines if line.get(name) is not None]


def _step_name(name: str) -> str:
    return "warmup/step" if name.startswith("warmup/") else "step"
