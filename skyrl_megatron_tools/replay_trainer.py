"""A trainer that repeats steps of a run from a checkpoint and dumped batches, without engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.data.splitting import MINI_BATCH_PROMPTS, PROMPT_UIDS
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.runtime.checkpoint.store import CheckpointStore
from skyrl_megatron.trainer.ppo import RayPPOTrainer
from skyrl_megatron.trainer.step_batch import mini_batch_size
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron_observe.dump import dump_path, read_dump, refuse_other_dump

STATES = "replayed_state.json"
"""File in the replay's folder: which weights, moments and random states differ from the run's checkpoint."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The steps to repeat, and where they start."""

    begins: int
    """Step of the checkpoint to start from; 0: the initial model."""
    folder: str | None
    """Folder of that checkpoint."""
    first: int
    """The requested step."""
    last: int
    expected: str | None
    """The run's checkpoint of :attr:`last`, if it exists and the same state is expected."""

    @property
    def steps(self) -> range:
        """The steps to train."""
        return range(self.begins + 1, self.last + 1)


def plan_replay(cfg: SkyRLTrainConfig, first: int, last: int, *, same: bool) -> ReplayPlan:
    """Plan how to repeat steps ``first`` to ``last`` of a run.

    ``same``: the settings are unchanged, so the same weights are expected. Raises ConfigError for invalid steps, for a
    batch that is missing or incomplete, and for a run that updates its reference model.
    """
    if not 1 <= first <= last:
        fix = "give a training step, from 1" if first < 1 else f"is before --step {first}: give a later step"
        raise ConfigError([Problem("--step" if first < 1 else "--until", first if first < 1 else last, fix)])
    if cfg.trainer.update_ref_every_epoch:
        fix = "cannot be replayed: no checkpoint contains the reference model that the steps were trained with"
        raise ConfigError([Problem("trainer.update_ref_every_epoch", True, fix)])
    store = CheckpointStore(cfg.trainer.ckpt_path)
    saved = store.complete_steps() if Path(store.root).exists() or "://" in store.root else []
    begins = max((step for step in saved if step < first), default=0)
    for step in range(begins + 1, last + 1):
        _check_dump(cfg, step, first, begins)
    return ReplayPlan(
        begins,
        store.folder(begins) if begins else None,
        first,
        last,
        store.folder(last) if same and last in saved else None,
    )


def _check_dump(cfg: SkyRLTrainConfig, step: int, first: int, begins: int) -> None:
    path = dump_path(cfg, step)
    try:
        read_dump(path)
    except (OSError, ValueError) as error:
        there = sorted(int(file.stem.rpartition("_")[2]) for file in path.parent.glob("global_step_*.safetensors"))
        reason = f"its batch cannot be read ({error})" if path.is_file() else f"its batch is not in {path.parent}"
        others = f"steps {', '.join(map(str, there))} are there" if there else "no step is there"
        start = f"checkpoint {begins}" if begins else "the initial model"
        needed = f"the replay starts from {start} and needs step {step}: " * (step < first)
        fix = f"{needed}{reason} ({others}); run with trainer.dump_data_batch=true and a checkpoint before the step"
        raise ConfigError([Problem("--step", first if step < first else step, fix)]) from error
    refuse_other_dump(cfg, step)


class BatchReplay(RayPPOTrainer):
    """A trainer that reads its batches from files, and neither samples nor saves."""

    def __init__(self, *args: Any, plan: ReplayPlan, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan = plan

    @property
    def is_last_step(self) -> bool:
        """Whether :attr:`global_step` is the last one to replay."""
        return self.global_step >= self.plan.last

    def load_checkpoints(self) -> None:
        """Load the checkpoint that the plan starts from. The position in the dataset is not used."""
        assert self.checkpoints is not None
        if self.plan.folder is not None:
            loaded = self.checkpoints.load("from_path", self.plan.folder)
            assert loaded is not None
            self.global_step = loaded.step
            self.load_trainer_state(loaded.trainer_state)
            self.start_up.done(f"checkpoint: step {self.global_step} loaded")
        self.tracker.open(total_steps=self.plan.last, resumed_from=self.global_step)
        self.recorders.on_load(self.global_step)
        self.logged_step = self.global_step

    def collect_experience(self) -> TrainingBatch:
        """Return the dumped batch of the step."""
        batch, _ = read_dump(dump_path(self.cfg, self.global_step + 1))
        prompts = mini_batch_size(self.cfg.trainer, "policy")
        batch.metadata |= {PROMPT_UIDS: batch.uids, MINI_BATCH_PROMPTS: prompts}
        return batch

    def train_steps(self) -> None:
        """Train the steps, and compare the resulting state with the run's checkpoint."""
        super().train_steps()
        if self.plan.expected is not None:
            assert self.checkpoints is not None
            hashes = self._hashes()
            self.checkpoints.load("from_path", self.plan.expected)
            expected = self._hashes()
            differ = sorted(
                {name for one, two in zip(hashes, expected, strict=True) for name in one if one[name] != two[name]}
            )
            (run_folder(self.cfg) / STATES).write_text(
                json.dumps({"compared": sum(map(len, hashes)), "differ": differ})
            )

    def _hashes(self) -> list[dict[str, str]]:
        return [
            {f"{name}: {key}": value for key, value in rank.items()}
            for name, role in self.roles.items()
            if self._updates_of(role.name) is not None
            for rank in role.state_hashes()
        ]

    # ------------------------------------------------------------------ phases that a replay skips
    def start_engines(self) -> None:
        """Do nothing: a replay does not sample."""

    def init_weight_sync_state(self) -> None:
        """Do nothing: there is no engine."""

    def give_first_weights(self) -> None:
        """Do nothing: there is no engine."""

    def begin_training(self) -> None:
        """Do nothing: no engine shares the GPUs."""

    def sync_weights(self) -> Any:
        """Do nothing: there is no engine."""

    def before_training(self) -> None:
        """Do nothing: a replay does not evaluate."""

    def eval(self) -> dict[str, float]:
        """Return no scores: a replay does not evaluate."""
        return {}

    def save_checkpoints(self) -> None:
        """Do nothing: a replay does not save."""

    def save_models(self) -> None:
        """Do nothing: a replay does not export."""

    def save_on_stop(self) -> None:
        """Do nothing: a replay does not save."""


def compared_numbers(recorded: Sequence[dict[str, Any]], replayed: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return (step, metric, recorded, replayed) for each training metric that both runs logged, except speed and
    memory."""
    by_step = {line["step"]: line for line in recorded}
    differing = []
    for line in replayed:
        before = by_step.get(line["step"], {})
        for name in sorted(line.keys() & before.keys()):
            if name.startswith(KINDS) and not any(part in name for part in NOT_REPEATED):
                differing.append((line["step"], name, before[name], line[name]))
    return differing


KINDS = ("policy/", "critic/", "loss/", "teacher/", "adapter/")
NOT_REPEATED = ("_per_second", "memory", "mfu", "seconds")
