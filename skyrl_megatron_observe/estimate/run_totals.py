"""What a whole run comes to: steps, hours, sampled tokens, and the bytes that it writes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron.config.derive import supervised
from skyrl_megatron.config.roles import is_frozen
from skyrl_megatron.trainer.checkpoints import resumed_checkpoint
from skyrl_megatron.trainer.console import duration
from skyrl_megatron.trainer.stopping import step_limit
from skyrl_megatron_observe.estimate.lengths import StepLengths, recorded_steps
from skyrl_megatron_observe.estimate.machine_rates import Seconds
from skyrl_megatron_observe.estimate.memory_budget import gigabytes

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron_observe.estimate.memory_phases import RoleModel
    from skyrl_megatron_observe.estimate.step_time import StepEstimate

JOURNAL_TOKEN = 8.5
"""Bytes of a token of a sampled group on disk, as measured: id, log-prob and masks."""
SAMPLE_TOKEN = 25
"""Bytes of a token of a kept sample: its text and three numbers."""
LARGEST_COUNTED = 256 << 20
"""Bytes of a JSON file whose lines are counted for the number of steps."""
ADAM_BYTES = 12
"""Bytes of a parameter's master and its two moments, which a checkpoint has in fp32."""


@dataclass(frozen=True, slots=True)
class StepsSoFar:
    """What a run that is resumed measured of itself."""

    done: int
    """Completed steps."""
    steps: list[dict[str, Any]]
    """Metrics of its last steps."""

    @classmethod
    def of(cls, cfg: SkyRLTrainConfig) -> StepsSoFar:
        """Read them; without a checkpoint to resume from, there are none."""
        checkpoint = None if cfg.trainer.resume_mode in (None, "none") else resumed_checkpoint(cfg)
        return cls(0, []) if checkpoint is None else cls(checkpoint.step, recorded_steps(cfg, checkpoint.step))

    @property
    def seconds(self) -> Seconds | None:
        """The seconds of a step: the median, and the tenth and the ninetieth percentile; None without any."""
        took = [line["timing/step"] for line in self.steps]
        return Seconds(*np.percentile(took, (10, 50, 90)).tolist()) if took else None


def totals(
    cfg: SkyRLTrainConfig,
    models: Mapping[str, RoleModel],
    estimate: StepEstimate | None,
    lengths: StepLengths,
    measured: StepsSoFar,
) -> Iterator[str]:
    """Yield the lines of the run: time, tokens and disk, as likely and at most. ``estimate``: None if the GPUs are
    unknown."""
    step = measured.seconds or (None if estimate is None else estimate.step)
    steps, why = _steps(cfg)
    if step is not None:
        of = f"measured in the last {len(measured.steps)} steps" if measured.seconds else "on paper"
        yield f"a step: {_time(step.likely)}, {_time(step.low)} to {_time(step.high)}, {of}"
    left = 100 if steps is None else max(steps - measured.done, 0)
    line = f"steps: {why}; 100 of them" if steps is None else f"steps: {steps:,} ({why})"
    if steps is not None and measured.done:
        line += f", {left:,} of them left"
    if step is not None:
        line += f": {_time(left * step.likely)}, at most {_time(left * step.high)}"
        if estimate is not None:
            hours = (_hours(estimate.gpus * left * bound) for bound in (step.likely, step.high))
            line += "; {} GPU-hours, at most {}".format(*hours)
    yield line
    yield from _tokens(cfg, lengths, steps)
    yield from _disk(cfg, models, lengths, steps)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.0f}" if seconds >= 36_000 else f"{seconds / 3600:.2g}"


def _steps(cfg: SkyRLTrainConfig) -> tuple[int | None, str]:
    """Return the steps of the run, and the setting that ends it; None and the reason if only the data says."""
    most = cfg.trainer.max_training_steps
    counts = [_rows(name) for name in cfg.data.train_data]
    if not counts or None in counts:
        if most is not None:
            return most, f"trainer.max_training_steps={most}, if the data is enough"
        return None, "known once data.train_data can be read, or with trainer.max_training_steps"
    limit = step_limit(cfg, sum(filter(None, counts)) // cfg.trainer.train_batch_size)
    return limit.steps, limit.setting


def _rows(name: str) -> int | None:
    """Count the rows of a data file, None if that is not quick."""
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        return None
    if path.suffix.lower() == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            return int(parquet.read_metadata(path).num_rows)
        except (ArrowException, OSError, ValueError):  # the check of the data says what is wrong
            return None
    if path.suffix.lower() != ".jsonl" or path.stat().st_size > LARGEST_COUNTED:
        return None
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _tokens(cfg: SkyRLTrainConfig, lengths: StepLengths, steps: int | None) -> Iterator[str]:
    if supervised(cfg) is not None:
        return
    limit = cfg.generator.sampling_params.max_generate_length
    likely, most = int(lengths.responses.sum()), len(lengths.responses) * limit
    line = f"sampled: {_count(likely)} tokens a step, at most {_count(most)}"
    yield line + (f"; {_count(steps * likely)} in all, at most {_count(steps * most)}" if steps else "")


def _count(number: float) -> str:
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def checkpoint_bytes(model: RoleModel) -> int:
    """Return the bytes of a role in a checkpoint: its trained weights once, and Adam's masters and moments, wherever a
    run keeps them. Muon's state is smaller."""
    parallel, trained = model.parallel, model.table.total()
    factors = [model.factors(stage) for stage in range(parallel.pp)]
    if factors[0] is not None:  # adapters: at most one part for each rank that splits them
        trained = sum(max(parallel.tp, parallel.ep * parallel.etp) * one.parameters for one in factors if one)
    return trained * (model.kernels.width + ADAM_BYTES)


def _disk(
    cfg: SkyRLTrainConfig, models: Mapping[str, RoleModel], lengths: StepLengths, steps: int | None
) -> Iterator[str]:
    trainer = cfg.trainer
    trained = [model for role, model in models.items() if not is_frozen(role)]
    parts = []
    if trainer.ckpt_interval > 0 and trained:
        kept = trainer.max_ckpts_to_keep
        of = "all are kept" if kept < 0 else f"{kept} kept"
        parts.append(f"a checkpoint {gigabytes(sum(map(checkpoint_bytes, trained)))} ({of})")
    if trainer.hf_save_interval > 0 and trained:
        parts.append(f"an export {gigabytes(sum(model.table.total() * model.kernels.width for model in trained))}")
    response, longest = lengths.responses.mean(), cfg.generator.sampling_params.max_generate_length
    prompt = float(lengths.prompts.mean())
    if trainer.fully_async.enabled:
        kept_groups = "all" if trainer.fully_async.keep_rollouts else "the last"
        likely, most = (JOURNAL_TOKEN * len(lengths.responses) * (prompt + tokens) for tokens in (response, longest))
        parts.append(f"sampled groups {gigabytes(likely)} a step, at most {gigabytes(most)} ({kept_groups} are kept)")
    if supervised(cfg) is None and trainer.samples_per_step:
        rows = min(trainer.samples_per_run, (steps or trainer.samples_per_run) * trainer.samples_per_step)
        likely, most = (rows * SAMPLE_TOKEN * (prompt + tokens) for tokens in (response, longest))
        parts.append(f"kept samples {gigabytes(likely)}, at most {gigabytes(most)}")
    if parts:
        yield "disk: " + "; ".join(parts)
