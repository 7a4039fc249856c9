"""Compare a run with a baseline, metric by metric: ``skyrl-megatron compare RUN BASELINE [METRIC=BAND …]``

BAND is the largest allowed relative change of the mean over the last steps: ``eval/all/avg_score=0.02``. By default,
the command compares reward, evaluation score, log-prob mismatch between trainer and engine, expert load balance and
tokens per second, if both runs have them. Exit code 0: every metric stays within its band. 1: a metric is outside its
band (an improvement never is). 2: a metric is missing or not a number.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_megatron.command import run_command
from skyrl_megatron.config.metric_table import describe
from skyrl_megatron.errors import ConfigError, LaunchError, Problem
from skyrl_megatron.trainer.tracking import METRICS_FILE

GATES: dict[str, float] = {
    "reward/avg_raw_reward": 0.05,
    "eval/all/avg_score": 0.05,
    "policy/rollout_train_logprobs_abs_diff_mean": 1.0,
    "policy/moe_load_imbalance": 0.5,
    "trainer/tokens_per_second": 0.1,
}
"""Metric → default band. An improvement is always allowed."""


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """A metric of a run and of its baseline: means over the last steps."""

    name: str
    run: float
    baseline: float
    band: float
    """Largest allowed relative change."""

    @property
    def change(self) -> float:
        """Return the relative change. It is infinite if only the baseline is 0."""
        if self.run == self.baseline:
            return 0.0
        return (self.run - self.baseline) / abs(self.baseline) if self.baseline else math.copysign(math.inf, self.run)

    @property
    def out_of_band(self) -> bool:
        """Whether the change is larger than allowed and no known improvement."""
        row = describe(self.name)
        better = row is not None and self.change != 0 and row.better == ("higher" if self.change > 0 else "lower")
        return not better and abs(self.change) > self.band


def compare(run: Path, baseline: Path, bands: Mapping[str, float], last: int) -> list[MetricComparison]:
    """Compare each metric of ``bands``, as means over the ``last`` lines that contain it.

    Raises LaunchError for a folder without metrics, and ConfigError for a metric that is missing or not a number in
    one of the runs.
    """
    lines_of = {run: _lines(run), baseline: _lines(baseline)}
    problems: list[Problem] = []
    comparisons = []
    for name, band in bands.items():
        values = []
        for folder in (run, baseline):
            newest = [line[name] for line in lines_of[folder] if name in line][-last:]
            if not newest:
                problems.append(
                    Problem(name, None, f"{folder} has no such metric; leave it out, or see docs/metrics.md")
                )
            elif any(value is None or not math.isfinite(value) for value in newest):
                problems.append(Problem(name, "not a number", f"in the last {last} steps of {folder}"))
            else:
                values.append(math.fsum(newest) / len(newest))
        if len(values) == 2:
            comparisons.append(MetricComparison(name, values[0], values[1], band))
    if problems:
        raise ConfigError(problems)
    return comparisons


def default_bands(run: Path, baseline: Path) -> dict[str, float]:
    """Return the default bands of the metrics that both runs have."""
    names = set.intersection(*({name for line in _lines(folder) for name in line} for folder in (run, baseline)))
    if not (bands := {name: band for name, band in GATES.items() if name in names}):
        raise LaunchError(f"{run} and {baseline} do not both have any of {', '.join(GATES)}: give METRIC=BAND")
    return bands


def table(comparisons: Sequence[MetricComparison]) -> list[str]:
    """Return the lines of the printed table. ✗ marks a metric outside its band."""
    lines = [f"{'':2}{'metric':<48}{'run':>12}{'baseline':>12}{'change':>10}{'band':>9}"]
    for metric in comparisons:
        mark = "✗ " if metric.out_of_band else "  "
        change = f"{100 * metric.change:+.1f} %"
        band = f"{100 * metric.band:.1f} %"
        lines.append(f"{mark}{metric.name:<48}{metric.run:>12.5g}{metric.baseline:>12.5g}{change:>10}{band:>9}")
    return lines


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step of a run. A value that is not finite is null in the file, or NaN."""
    path = folder / METRICS_FILE
    try:
        texts = path.read_text().splitlines()
    except OSError as error:
        raise LaunchError(f"{folder}: no {METRICS_FILE} ({error.strerror}); give the folder of a run") from error
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            break  # the run is writing this line
        if "warmup/step" not in line:
            lines.append(line)
    if not lines:
        raise LaunchError(f"{folder}: {METRICS_FILE} contains no step")
    return lines


LAST = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("baseline", type=Path, metavar="BASELINE", help="folder of the run to compare it with")
    parser.add_argument("bands", nargs="*", metavar="METRIC=BAND", help="metric to compare, and its allowed change")
    parser.add_argument("--last", type=int, default=LAST, help=f"number of steps to average (default {LAST})")
    args = parser.parse_args(argv)

    def work() -> int:
        if args.last < 1:
            raise ConfigError([Problem("--last", args.last, "give at least 1")])
        bands = dict(map(_band, args.bands)) or default_bands(args.run, args.baseline)
        comparisons = compare(args.run, args.baseline, bands, args.last)
        print("\n".join(table(comparisons)))
        return int(any(metric.out_of_band for metric in comparisons))

    return run_command(work)


def _band(text: str) -> tuple[str, float]:
    name, _, band = text.partition("=")
    try:
        allowed = float(band)
    except ValueError:
        allowed = -1.0
    if not 0 <= allowed:
        raise ConfigError([Problem(name, band, "give the largest allowed relative change, such as 0.05")])
    return name, allowed


if __name__ == "__main__":
    sys.exit(main())
