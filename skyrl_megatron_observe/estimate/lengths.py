"""Lengths of prompts and responses of a step that has not been sampled: drawn from what is known of them.

Known is what ``trainer.expected_lengths`` says, or what the run itself measured before it is resumed. Without both the
mean is half of the limit.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron.config.derive import supervised
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.trainer.tracking import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

SPREAD = 0.7
"""Standard deviation of the logarithm of a response's tokens, before the limit cuts them off."""
RECENT = 20
"""Last steps of a run that count as what it measured."""
KEY = "trainer.expected_lengths"


@dataclass(frozen=True)
class StepLengths:
    """The sequences of a step."""

    prompts: np.ndarray
    """[B] tokens."""
    responses: np.ndarray
    """[B] tokens."""
    source: str
    """Where the lengths come from, for a line of the report."""


def log_normal(mean: float, limit: int, rows: int, spread: float = SPREAD) -> np.ndarray:
    """Return ``rows`` tokens, [rows] int64 of 1 … ``limit``, whose logarithms are normal with deviation ``spread`` and
    whose mean is ``mean``; what exceeds the limit is cut off. The same arguments give the same lengths, in a random
    order."""
    ranks = (np.arange(rows) + 0.5) / rows
    normal = np.array([NormalDist().inv_cdf(rank) for rank in ranks.tolist()])
    low, high = 0.0, np.log(limit) + 8 * spread
    for _ in range(50):  # the logarithm of the median with which the mean is right
        middle = (low + high) / 2
        if np.clip(np.exp(middle + spread * normal), 1, limit).mean() < mean:
            low = middle
        else:
            high = middle
    lengths = np.clip(np.exp(low + spread * normal), 1, limit).round().astype(np.int64)
    shuffled: np.ndarray = np.random.default_rng(0).permutation(lengths)
    return shuffled


def step_lengths(cfg: SkyRLTrainConfig, recorded: list[dict[str, Any]] | None = None) -> StepLengths:
    """Return the lengths of a step. ``recorded``: metrics of the run's earlier steps. Rows of supervised training
    count as responses. Raises ConfigError if ``trainer.expected_lengths`` is neither a number nor a file."""
    rows, taught = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt, supervised(cfg)
    limit = cfg.generator.sampling_params.max_generate_length if taught is None else taught.max_length
    prompt = max(cfg.trainer.max_prompt_length // 2, 1) if taught is None else 0
    setting = cfg.trainer.expected_lengths
    if setting is not None:
        responses, source = _from_setting(setting, limit, rows)
    elif recorded and (measured := _measured(recorded, rows)):
        mean, spread, sequence = measured
        responses, source = (
            log_normal(mean, limit, rows, spread),
            f"as this run sampled, {mean:,.0f} tokens on average",
        )
        if sequence > mean:
            prompt = round(sequence - mean)
    else:
        what = "responses" if taught is None else "sequences"
        responses = log_normal(limit / 2, limit, rows)
        source = f"{what} of {limit // 2:,} tokens on average, half of the limit: set {KEY}"
    return StepLengths(np.full(rows, prompt), responses, source)


def recorded_steps(cfg: SkyRLTrainConfig, last: int | None = None) -> list[dict[str, Any]]:
    """Return the metrics of the last :data:`RECENT` steps of the run up to step ``last``; [] if it has none."""
    lines = [line for line in read_metrics(run_folder(cfg) / METRICS_FILE) if line.get("timing/step")]
    return [line for line in lines if last is None or line["step"] <= last][-RECENT:]


def _measured(lines: list[dict[str, Any]], rows: int) -> tuple[float, float, float] | None:
    """Return mean tokens of a response, deviation of their logarithm, and mean tokens of a sequence, of steps of
    ``rows`` sequences; None if no response was measured."""

    def mean(name: str) -> float:
        return float(np.mean([line.get(name) or 0.0 for line in lines])) if lines else 0.0

    response, deviation = mean("generate/avg_num_tokens"), mean("generate/std_num_tokens")
    if not response:
        return None
    tokens = mean("trainer/tokens_per_second") * mean("timing/step")
    return response, math.sqrt(math.log1p((deviation / response) ** 2)) or SPREAD, tokens / rows


def _from_setting(setting: str, limit: int, rows: int) -> tuple[np.ndarray, str]:
    """Return responses, [rows], by the setting, and their source."""
    path = Path(os.path.expanduser(setting))
    if path.suffix == ".jsonl" and path.is_file():
        lines: list[dict[str, Any]] = read_metrics(path)[-RECENT:]
        if measured := _measured(lines, rows):
            return log_normal(measured[0], limit, rows, measured[1]), f"as the run of {setting}"
    elif path.is_file():
        numbers = [float(word) for word in path.read_text().split() if word.replace(".", "", 1).isdigit()]
        if numbers:
            drawn = np.random.default_rng(0).choice(np.clip(numbers, 1, limit), rows)
            return drawn.astype(np.int64), f"drawn from {setting}"
    elif setting.replace(".", "", 1).isdigit() and 1 <= float(setting) <= limit:
        return log_normal(float(setting), limit, rows), f"responses of {float(setting):,.0f} tokens on average"
    fix = f"give a number of tokens up to {limit}, a file with such numbers, or the metrics.jsonl of a run"
    raise ConfigError([Problem(KEY, setting, fix)])
