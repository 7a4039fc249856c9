"""Steps of a run trained again from dumped batches, without engines: from a checkpoint, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.data.packing import PROMPT_UIDS
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.runtime.checkpoint.store import CheckpointStore
from skyrl_megatron.trainer.dump import dump_path, read_dump
from skyrl_megatron.trainer.ppo import RayPPOTrainer
from skyrl_megatron.types import TrainingBatch

if TYPE_CHECKING:
    pass


STATES = "replayed_state.json"
"""In the replay's folder: whether weights, moments and random states are those of the run's checkpoint."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What is trained again."""

    begins: int
    """Step of the checkpoint that it goes on from; 0: from the model."""
    folder: str | None
    """That checkpoint."""
    first: int
    """The step that is asked for."""
    last: int
    held_against: str | None
    """The run's checkpoint of :attr:`last`, where it has one and the same numbers are expected."""

    @property
    def steps(self) -> range:
        """The steps that are trained."""
        return range(self.begins + 1, self.last + 1)


def plan_replay(cfg: SkyRLTrainConfig, first: int, last: int, *, same: bool) -> ReplayPlan:
    """Return how steps ``first`` to ``last`` of a run are trained again. ``same``: with its own settings, so that the
    same weights are expected.

    Raises ConfigError for steps that are not there, a batch that was not dumped or only in part, and a run whose
    reference follows the policy.
    """
    if not 1 <= first <= last:
        fix = "give a training step, from 1" if first < 1 else f"comes before --step {first}: give a later step"
        raise ConfigError([Problem("--step" if first < 1 else "--until", first if first < 1 else last, fix)])
    if cfg.trainer.update_ref_every_epoch:
        fix = "the reference that the steps were trained with is in no checkpoint: such runs cannot be replayed"
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
        there = sorted(int(each.stem.rpartition("_")[2]) for each in path.parent.glob("global_step_*.safetensors"))
        said = f"its batch cannot be read ({error})" if path.is_file() else f"its batch is not in {path.parent}"
        others = f"those of steps {', '.join(map(str, there))} are" if there else "none is"
        way = f"step {step} is on the way from {f'checkpoint {begins}' if begins else 'the model'}: " * (step < first)
        fix = f"{way}{said} ({others}); run with trainer.dump_data_batch=true, and checkpoints before the step"
        raise ConfigError([Problem("--step", first if step < first else step, fix)]) from error


class BatchReplay(RayPPOTrainer):
    """A trainer that takes its batches from files, and neither samples nor saves. ``plan``: by keyword, too."""

    def __init__(self, *args: Any, plan: ReplayPlan, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan = plan

    @property
    def is_last_step(self) -> bool:
        """Whether :attr:`global_step` is the last one to replay."""
        return self.global_step >= self.plan.last

    def load_checkpoints(self) -> None:
        """Load the checkpoint that the plan begins with; the data's position does not matter."""
        assert self.checkpoints is not None
        if self.plan.folder is not None:
            loaded = self.checkpoints.load("from_path", self.plan.folder)
            assert loaded is not None
            self.global_step = loaded.step
            self.load_trainer_state(loaded.trainer_state)
            self.start_up.done(f"checkpoint: step {self.global_step} loaded")
        self.tracker.open(total_steps=self.plan.last, resumed_from=self.global_step)
        self.watch.open(self.global_step)
        self.logged_step = self.global_step

    def collect_experience(self) -> TrainingBatch:
        """Return the batch of the step as it was dumped."""
        batch, _ = read_dump(dump_path(self.cfg, self.global_step + 1))
        batch.metadata[PROMPT_UIDS] = batch.uids
        return batch

    def train_steps(self) -> None:
        """Take the steps, and hold what came of them against the run's checkpoint."""
        super().train_steps()
        if self.plan.held_against is not None:
            assert self.checkpoints is not None
            own = self._hashes()
            self.checkpoints.load("from_path", self.plan.held_against)
            theirs = self._hashes()
            differ = sorted(
                {name for one, two in zip(own, theirs, strict=True) for name in one if one[name] != two[name]}
            )
            (run_folder(self.cfg) / STATES).write_text(json.dumps({"compared": sum(map(len, own)), "differ": differ}))

    def _hashes(self) -> list[dict[str, str]]:
        return [
            {f"{name}: {key}": value for key, value in rank.items()}
            for name, role in self.roles.items()
            if self._updates_of(role.name) is not None
            for rank in role.state_hashes()
        ]

    # ------------------------------------------------------------------ what a replay does not do
    def start_engines(self) -> None:
        """Start none: nothing is sampled."""

    def init_weight_sync_state(self) -> None:
        """Connect to no engine."""

    def give_first_weights(self) -> None:
        """Tell no engine where training begins."""

    def begin_training(self) -> None:
        """Take the ranks from nobody."""

    def sync_weights(self) -> Any:
        """Send the weights to nobody."""

    def before_training(self) -> None:
        """Evaluate nothing."""

    def eval(self) -> dict[str, float]:
        """Return no scores."""
        return {}

    def save_checkpoints(self) -> None:
        """Leave the run's checkpoints as they are."""

    def save_models(self) -> None:
        """Export nothing."""

    def save_on_stop(self) -> None:
        """Save nothing."""


def compared_numbers(recorded: Sequence[dict[str, Any]], replayed: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return (step, metric, recorded, replayed) of every number of the training that both runs logged; speed and
    memory are left out."""
    by_step = {line["step"]: line for line in recorded}
    found = []
    for line in replayed:
        before = by_step.get(line["step"], {})
        for name in sorted(line.keys() & before.keys()):
            if name.startswith(KINDS) and not any(part in name for part in NOT_REPEATED):
                found.append((line["step"], name, before[name], line[name]))
    return found


KINDS = ("policy/", "critic/", "loss/", "teacher/", "adapter/")
NOT_REPEATED = ("_per_second", "memory", "mfu", "seconds")
