"""When a run ends: at its last step, when a metric fits, after a signal, or at once if nothing is left to do. And the
last lines of a run."""

from __future__ import annotations

import asyncio
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.derive import is_data_file
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.config.roles import active_roles, is_frozen
from skyrl_megatron.config.schema.evaluation import StopCondition
from skyrl_megatron.errors import CheckpointError, SkyRLMegatronWarning
from skyrl_megatron.identity import is_of_other, run_identity
from skyrl_megatron.interrupts import Interrupted, replace_handlers, restore_handlers
from skyrl_megatron.plugins import run_files
from skyrl_megatron.runtime.checkpoint.store import DATA, CheckpointStore
from skyrl_megatron.trainer.checkpoints import export_folder, is_same_run, resumed_checkpoint
from skyrl_megatron.trainer.tracking import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


class StopRequested(Interrupted):
    """The run was asked to stop and has stopped after a complete step, which it has reported."""

    reported = True


class StopSignal:
    """Handles the three stop signals within ``with``. Outside the main thread only :meth:`request` stops the run.

    ``waits``: whether a step could be lost. Then the first signal only requests a stop; otherwise it ends the run.
    """

    def __init__(self) -> None:
        self.requested = False
        self.waits = True
        self._number: int = signal.SIGINT
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        self._before = replace_handlers(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._before)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.waits:
            # A second signal, or one while no step can be lost: the run ends now.
            before = self._before.get(number)
            if callable(before) and before is not signal.default_int_handler:
                before(number, frame)  # the handler of the command, which sets a deadline
                return
            raise Interrupted(number)
        self._number = number
        self.request()

    def request(self) -> None:
        """Request a stop, from any thread."""
        self.requested = True
        if self._work is not None:
            loop, task = self._work
            loop.call_soon_threadsafe(task.cancel)

    @contextmanager
    def cancelling(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> Iterator[None]:
        """Within the block, a stop request cancels ``task`` of ``loop``."""
        self._work = loop, task
        try:
            yield
        finally:
            self._work = None

    def check(self) -> None:
        """Raise StopRequested if a stop was requested."""
        if self.requested:
            raise self.stopped()

    def stopped(self) -> StopRequested:
        """Return the exception to raise once the run has stopped; it has the number of the signal."""
        return StopRequested(self._number)


@dataclass(frozen=True, slots=True)
class StepLimit:
    """The last step of a run, and the setting that makes it the last."""

    steps: int
    setting: str
    """``key=value``."""
    note: str = ""
    """Message at the start of the run if a setting for more steps has no effect."""
    to_continue: str = "raise it"
    """What the user does to take more steps."""


def step_limit(cfg: SkyRLTrainConfig, epoch_steps: int) -> StepLimit:
    """Return the last step of a run. ``epoch_steps``: batches of the training data per epoch."""
    epochs, most = cfg.trainer.epochs, cfg.trainer.max_training_steps
    steps = epoch_steps * epochs
    if most is not None and most <= steps:
        return StepLimit(most, f"trainer.max_training_steps={most}")
    setting = f"trainer.epochs={epochs}"
    if most is None:
        return StepLimit(steps, setting)
    note = f"{setting} ends the run at step {steps}, before trainer.max_training_steps={most}: raise trainer.epochs"
    return StepLimit(steps, setting, note)


def reached(cfg: SkyRLTrainConfig, step: int, metrics: Mapping[str, Any]) -> StepLimit | None:
    """Return the limit that ``trainer.stop_when`` sets if the metrics of ``step`` fulfil it, else None."""
    if cfg.trainer.stop_when is None:
        return None
    condition = StopCondition.parse(cfg.trainer.stop_when)
    value = metrics.get(condition.metric)
    if value is None or not condition.holds(value):
        return None
    setting = f"trainer.stop_when={cfg.trainer.stop_when!r} ({condition.metric} is {value:.4f})"
    return StepLimit(step, setting, to_continue="change or remove it")


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """The outputs of a finished run that its command asks for and that do not exist yet."""

    step: int
    limit: StepLimit
    folder: str
    """The checkpoint of the last step."""
    log: bool
    """Whether the metrics of the last step have to be logged: the run was killed before it logged them."""
    evaluation: bool
    exports: tuple[str, ...]
    """Roles whose Hugging Face export is missing."""
    asked_steps: int
    """The last step by ``max_training_steps`` and ``epochs``."""

    @property
    def nothing(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.log or self.evaluation or self.exports)

    def __str__(self) -> str:
        due = [f"export {' and '.join(self.exports)}"] if self.exports else []
        due += ["evaluate"] if self.evaluation else []
        due += ["log its metrics"] if self.log else []
        left = f"left to do: {', '.join(due)}" if due else "nothing left to do"
        at = f"the checkpoint of step {self.step} of {self.asked_steps} exists"
        return f"{left}: {at}. {self.limit.setting} ends the run: {self.limit.to_continue} to continue"


def remaining_work(cfg: SkyRLTrainConfig) -> RemainingWork | None:
    """Return what is left to do for a run that has taken its last step.

    Returns None while steps are left, and where only the run itself can decide: no checkpoint, one of another run, a
    different batch size or seed, or data files of other sizes. Reads the checkpoint's manifest and data position,
    parts of the model and ``metrics.jsonl``, and checks which exports exist. Starts nothing and loads no data.
    """
    checkpoint = resumed_checkpoint(cfg)
    if checkpoint is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkyRLMegatronWarning)
        try:
            data = CheckpointStore(checkpoint.folder).read_json(checkpoint, DATA)
        except (CheckpointError, OSError, ValueError):
            return None
        lines = read_metrics(run_folder(cfg) / METRICS_FILE)
    same = (data.get("batch_size"), data.get("seed")) == (cfg.trainer.train_batch_size, cfg.trainer.seed)
    if not same or not _same_sizes(cfg, data.get("files") or ()):
        return None
    logged = [line for line in lines if line["step"] == checkpoint.step]
    stopped = [limit for line in logged if (limit := reached(cfg, checkpoint.step, line)) is not None]
    asked = step_limit(cfg, int(data["rows"]) // int(data["batch_size"]))
    limit = stopped[0] if stopped else asked
    if checkpoint.step < limit.steps or not is_same_run(cfg, checkpoint):
        return None
    evaluates = bool(cfg.data.val_data or cfg.data.eval_sets) and cfg.trainer.eval_interval > 0
    return RemainingWork(
        checkpoint.step,
        limit,
        checkpoint.folder,
        log=not logged,
        evaluation=evaluates and not any(name.startswith("eval/") for line in logged for name in line),
        exports=tuple(_missing_exports(cfg, checkpoint.step)),
        asked_steps=asked.steps,
    )


def _missing_exports(cfg: SkyRLTrainConfig, step: int) -> list[str]:
    if cfg.trainer.hf_save_interval <= 0:
        return []
    roles = [role for role in active_roles(cfg) if not is_frozen(role)]
    folders = {role: export_folder(cfg.trainer.export_path, step, role) for role in roles}
    identity, allowed = run_identity(cfg, data=()), cfg.trainer.resume_other
    return [
        role
        for role, folder in folders.items()
        if not folder.is_dir() or is_of_other(folder.parent, identity, allowed)
    ]


def _same_sizes(cfg: SkyRLTrainConfig, files: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the training files have the names and sizes in the checkpoint, those that are gone the names.
    Resuming compares their contents."""
    saved = {(file["name"], file["bytes"]) for file in files}
    paths = [Path(source).expanduser() for source in cfg.data.train_data if is_data_file(source)]
    sizes = [(path.name, path.stat().st_size) for path in paths if path.is_file()]
    return {*sizes} <= saved and {path.name for path in paths if not path.exists()} <= {name for name, _ in saved}


SCORE = "eval/all/avg_score"


def summary_lines(cfg: SkyRLTrainConfig, saved_step: int | None, step: int) -> list[str]:
    """Return lines with the scores of the first and the last evaluation, if any, and the paths of the run's files."""
    folder = run_folder(cfg)
    scores = [line[SCORE] for line in read_metrics(folder / METRICS_FILE) if line.get(SCORE) is not None]
    shown = [f"{score:.3f}" for score in scores]
    score = f"{shown[0]} before · {shown[-1]} after" if len(shown) > 1 else "".join(shown)
    paths = {name: folder / file for name, file in {"metrics": METRICS_FILE, **run_files()}.items()}
    exported = export_folder(cfg.trainer.export_path, step)
    # A Path would damage the address of an object store.
    checkpoint = f"checkpoint: {cfg.trainer.ckpt_path.rstrip('/')}/global_step_{saved_step}"
    return [
        *([f"score: {score}"] if scores else []),
        *(f"{name}: {path}" for name, path in paths.items() if path.exists()),
        *([checkpoint] if saved_step is not None else []),
        *([f"exported model: {exported}"] if exported.exists() else []),
    ]
