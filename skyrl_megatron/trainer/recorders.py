"""Recorders: what observes a run and writes records of it.

The run names none of them. A package or a plugin registers a subclass of :class:`RunRecorder` with
``register_recorder`` (docs/guides/plugins.md), and every run makes one object of each. The run calls them at fixed
points, in the order of registration: :meth:`~RunRecorder.on_load`, :meth:`~RunRecorder.on_start`, in each step
:meth:`~RunRecorder.before_step`, :meth:`~RunRecorder.on_rollouts`, :meth:`~RunRecorder.on_batch`,
:meth:`~RunRecorder.before_update`, :meth:`~RunRecorder.rank_metrics`, :meth:`~RunRecorder.step_metrics` and
:meth:`~RunRecorder.on_step_end`, and at last :meth:`~RunRecorder.on_end`.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skyrl_megatron.errors import SkyRLMegatronError, SkyRLMegatronWarning, with_origin
from skyrl_megatron.plugins import RECORDERS

if TYPE_CHECKING:
    import numpy as np

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.identity import Identity
    from skyrl_megatron.rollout.interface import GeneratorOutput
    from skyrl_megatron.trainer.tracking import Tracking
    from skyrl_megatron.types import TrainingBatch
    from skyrl_megatron.workers.worker_group import WorkerGroup

type Score = Callable[[TrainingBatch], np.ndarray]
"""Returns the trainer's log-probs before the update, [R] float32 in nats, of a batch without them."""
TRAJECTORIES = "trajectories"
"""Folder in a run's folder with trajectories that a generator recorded, which the report shows."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a recorder gets of a run when the trainer is made."""

    cfg: SkyRLTrainConfig
    tokenizer: Any
    total_steps: int
    generator: Any
    tracker: Tracking
    """Says lines, and takes the texts of samples."""
    identity: Callable[[], Identity]
    """Returns what the run depends on. Reading it takes time: hashes of models and data."""


class RunRecorder:
    """Base class of recorders: override what you need. ``step`` counts from 1.

    A SkyRLMegatronError ends the run. Any other exception costs one warning, which names the recorder, and it is
    called no more; unless :attr:`ends_run`.
    """

    ends_run: ClassVar[bool] = False
    """Whether every exception ends the run, such as that of a full disk: a run without these records is useless."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run

    def on_load(self, resumed_from: int | None) -> None:
        """Run when the checkpoint is loaded, before anything is recorded. Records of steps after ``resumed_from`` are
        of a run that was ended, and void; None: all records. Called again when the run returns to an earlier step."""

    def on_start(self, step: int, roles: Mapping[str, WorkerGroup]) -> None:
        """Run when models and engines are ready; ``step``: the completed steps."""

    def before_step(self) -> None:
        """Run before a step takes its prompts."""

    def on_rollouts(self, output: GeneratorOutput) -> None:
        """Run when the rollouts of a step are selected, before they become a batch."""

    def on_batch(self, step: int, batch: TrainingBatch, output: GeneratorOutput) -> None:
        """Run when the rollouts of a step became ``batch``, before anything is computed from it."""

    def before_update(self, step: int, batch: TrainingBatch, score: Score | None) -> None:
        """Run before the optimizer steps, with everything that they read in ``batch``. ``score``: None if the ranks
        cannot compute log-probs now."""

    def rank_metrics(self, seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return metrics that are logged with the others of the step.

        ``seconds``: role → rank's name → its time in the step's training without its waits for other ranks; a role
        that did not train, or whose ranks cannot tell, has none.
        """
        return {}

    def step_metrics(
        self, lengths: np.ndarray, metrics: Mapping[str, float], device_type: Callable[[], str | None]
    ) -> dict[str, float]:
        """Return metrics that are logged with the others of the step, ``metrics``.

        ``lengths``: tokens of the sequences that were sampled for the step, [B] int64. ``device_type``: returns the
        key of the policy's devices in ``GPU_TYPES``; "" if unknown, None for a CPU.
        """
        return {}

    def on_step_end(self, step: int, roles: Mapping[str, WorkerGroup]) -> None:
        """Run after a step was logged. It is repeated if a rank is lost meanwhile."""

    def on_hang(self) -> str:
        """Run when ranks exceed a time limit, before they are killed. Returns a text that is appended to the error."""
        return ""

    def on_end(self) -> None:
        """Run when ranks and engines have ended, unless the run neither took a step nor saved one."""


class Recorders:
    """All registered recorders of a run."""

    def __init__(self, run: RecordedRun) -> None:
        self._recorders: list[RunRecorder] = []
        for make in RECORDERS.all():
            try:
                self._recorders.append(make(run))
            except SkyRLMegatronError:
                raise
            except Exception as error:
                if getattr(make, "ends_run", False):
                    raise
                _report(make, "its start", error)

    def __iter__(self) -> Iterator[RunRecorder]:
        return iter(list(self._recorders))

    def on_load(self, resumed_from: int | None) -> None:
        self._call("on_load", resumed_from)

    def on_start(self, step: int, roles: Mapping[str, WorkerGroup]) -> None:
        self._call("on_start", step, roles)

    def before_step(self) -> None:
        self._call("before_step")

    def on_rollouts(self, output: GeneratorOutput) -> None:
        self._call("on_rollouts", output)

    def on_batch(self, step: int, batch: TrainingBatch, output: GeneratorOutput) -> None:
        self._call("on_batch", step, batch, output)

    def before_update(self, step: int, batch: TrainingBatch, score: Score | None) -> None:
        self._call("before_update", step, batch, score)

    def rank_metrics(self, seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the metrics of all recorders."""
        return self._metrics("rank_metrics", seconds)

    def step_metrics(
        self, lengths: np.ndarray, metrics: Mapping[str, float], device_type: Callable[[], str | None]
    ) -> dict[str, float]:
        """Return the metrics of all recorders; ``lengths``: [B] int64."""
        return self._metrics("step_metrics", lengths, metrics, device_type)

    def on_step_end(self, step: int, roles: Mapping[str, WorkerGroup]) -> None:
        self._call("on_step_end", step, roles)

    def on_hang(self) -> str:
        """Return the texts of all recorders."""
        return "".join(self._call("on_hang"))

    def on_end(self) -> None:
        self._call("on_end")

    def _metrics(self, event: str, *arguments: Any) -> dict[str, float]:
        return {name: value for metrics in self._call(event, *arguments) for name, value in metrics.items()}

    def _call(self, event: str, *arguments: Any) -> list[Any]:
        """Call a method of each recorder, in order, and return what those returned that did not fail."""
        answers = []
        for recorder in self:
            try:
                answers.append(getattr(recorder, event)(*arguments))
            except SkyRLMegatronError:  # of the run itself, such as a rank that was lost while it was asked
                raise
            except Exception as error:
                if recorder.ends_run:
                    raise
                self._recorders.remove(recorder)
                _report(type(recorder), event, error)
        return answers


def _report(recorder: Callable[..., Any], event: str, error: Exception) -> None:
    name = f"{recorder.__module__}.{getattr(recorder, '__qualname__', recorder)}"
    text = f"the recorder {name} failed in {event} and records no more of this run: {with_origin(error)}"
    warnings.warn(text, SkyRLMegatronWarning, stacklevel=3)


def sample_interval(cfg: SkyRLTrainConfig, total_steps: int) -> int:
    """Return the interval of steps with samples, so that the run keeps ``samples_per_run``; 0: no samples."""
    rows, most = cfg.trainer.samples_per_step, cfg.trainer.samples_per_run
    return 0 if rows == 0 else max(1, -(-total_steps * rows // max(most, rows)))


def remove_later_steps(folder: Path, resumed_from: int | None) -> None:
    """Remove the files ``step_N.*`` of ``folder`` of steps after ``resumed_from``; None: the whole folder."""
    if resumed_from is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.glob("step_*.json*"):
        if int(path.stem[5:]) > resumed_from:
            path.unlink()
