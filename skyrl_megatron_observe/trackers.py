"""Trackers of a run: TensorBoard's files, and wandb, mlflow or swanlab.

Each external tracker has its own thread, so that a slow or unreachable one delays no step. A resumed run continues the
same run of the tracker: its id is stored in ``tracker.json`` in the run's folder.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config import get_config_as_dict, get_config_as_yaml_str
from skyrl_megatron.config.resolve import run_folder, trackers
from skyrl_megatron.errors import LaunchError, SkyRLMegatronWarning, install_command
from skyrl_megatron.plugins import TRACKERS
from skyrl_megatron.trainer.tracking import MetricSink, ShownSample

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


ID_FILE = "tracker.json"
COLUMNS = ("uid", "reward", "stop", "prompt", "response")
"""Columns of a sample, in the order of :data:`ShownSample`."""
WAITING = 1000
"""Maximum number of steps and tables that wait for a tracker; with more, the tracker is given up."""
FINISH_S = 60.0
"""How long the end of a run waits for a tracker."""


@dataclass(frozen=True, slots=True)
class TrackerClient:
    """The functions of a tracker that are called, from one thread."""

    run_id: str
    log: Callable[[dict[str, float], int], Any]
    """Takes the metrics of a step."""
    samples: Callable[[Sequence[ShownSample], int], Any]
    finish: Callable[[], Any]


class ExternalTracker(MetricSink):
    """Passes metrics and samples to an external tracker, in order. A tracker that fails or is too slow causes one
    warning and gets no more."""

    takes_samples = True

    def __init__(self, name: str, client: TrackerClient) -> None:
        self.name, self._client, self._failed = name, client, False
        self._waiting: queue.Queue[Callable[[], Any] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        copied = dict(metrics)
        self._enqueue(lambda: self._client.log(copied, step))

    def samples(self, rows: Sequence[ShownSample], step: int) -> None:
        self._enqueue(lambda: self._client.samples(rows, step))

    def finish(self) -> None:
        """Wait for the queue, at most :data:`FINISH_S`, and finish the tracker's run in the calling thread, because
        swanlab sets signal handlers."""
        self._enqueue(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {FINISH_S:.0f} s after the run")
        elif not self._failed:
            self._try(self._client.finish)

    def _enqueue(self, call: Callable[[], Any] | None) -> None:
        if not self._failed:
            try:
                self._waiting.put_nowait(call)
            except queue.Full:
                self._fail(f"it is too slow, {WAITING} calls wait for it")

    def _work(self) -> None:
        while not self._failed and (call := self._waiting.get()) is not None:
            self._try(call)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            text = f"trainer.logger={self.name} failed and gets no more metrics: {why}; metrics.jsonl has all of them"
            warnings.warn(text, SkyRLMegatronWarning, stacklevel=2)


def named_trackers(cfg: SkyRLTrainConfig, resumed: bool = False) -> list[ExternalTracker]:
    """Return the trackers of ``trainer.logger``. ``resumed``: the run continues from a checkpoint, and so do the runs
    of its trackers.

    Raises LaunchError if the package of a tracker is not installed or the tracker does not start.
    """
    path = run_folder(cfg) / ID_FILE
    ids_before, ids = _recorded_ids(path) if resumed else {}, dict[str, str]()
    started = []
    for name in trackers(cfg):
        start = TRACKERS.find(name)
        assert start is not None, name  # Tracking refuses a name that nothing registers
        try:
            client = start(cfg, ids_before.get(name))
        except ImportError as error:
            raise LaunchError(
                f"trainer.logger={name}: its package is not installed ({error}): {install_command(name)}, or set "
                "trainer.logger=tensorboard"
            ) from error
        except Exception as error:
            raise LaunchError(
                f"trainer.logger={name} did not start: {error}. Fix this, or set trainer.logger=tensorboard"
            ) from error
        ids[name] = client.run_id
        started.append(ExternalTracker(name, client))
    if ids:
        path.parent.mkdir(parents=True, exist_ok=True)
        (name, of_first), *others = ids.items()
        path.write_text(json.dumps({"tracker": name, "id": of_first} | ({"others": dict(others)} if others else {})))
    return started


def _recorded_ids(path: Path) -> dict[str, str]:
    """Return tracker → its id of the run; {} if the file is missing or cannot be read."""
    try:
        recorded = json.loads(path.read_text())
        return {str(recorded["tracker"]): str(recorded["id"]), **recorded.get("others", {})}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def start_wandb(cfg: SkyRLTrainConfig, run_id: str | None) -> TrackerClient:
    """Start wandb. Its own step only counts lines, because it cannot decrease. Charts use ``trainer/global_step``,
    which repeats steps after a resume."""
    import wandb

    folder = os.environ.get("WANDB_DIR") or str(run_folder(cfg))
    running = wandb.init(
        project=cfg.trainer.project_name,
        name=cfg.trainer.run_name,
        config=get_config_as_dict(cfg),
        id=run_id or uuid.uuid4().hex[:12],
        resume="allow",
        dir=folder,
    )
    running.define_metric("trainer/global_step")
    running.define_metric("*", step_metric="trainer/global_step")

    def log(metrics: dict[str, float], step: int) -> None:
        running.log({**metrics, "trainer/global_step": step})

    def samples(rows: Sequence[ShownSample], step: int) -> None:
        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        running.log({"samples": table, "trainer/global_step": step}, commit=False)

    return TrackerClient(running.id, log, samples, running.finish)


def start_mlflow(cfg: SkyRLTrainConfig, run_id: str | None) -> TrackerClient:
    """Start mlflow, with a client and an explicit run, because the active run of the module belongs to a thread."""
    import time

    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException

    client, project = MlflowClient(), cfg.trainer.project_name
    if run_id is not None:
        try:
            client.update_run(run_id, status="RUNNING")
        except MlflowException:  # the run is in another store, or was deleted
            run_id = None
    if run_id is None:
        existing = client.get_experiment_by_name(project)
        experiment = client.create_experiment(project) if existing is None else existing.experiment_id
        run_id = client.create_run(experiment, run_name=cfg.trainer.run_name).info.run_id
        params = [Param(key, text[:500]) for key, text in _flat("", get_config_as_dict(cfg)) if text]
        for first in range(0, len(params), 100):  # the limit of a call
            client.log_batch(run_id, params=params[first : first + 100])
    client.log_text(run_id, get_config_as_yaml_str(cfg), "config.yaml")

    def log(metrics: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run_id, [Metric(name, value, now, step) for name, value in metrics.items()])

    def samples(rows: Sequence[ShownSample], step: int) -> None:
        columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        client.log_table(run_id, columns, f"samples/step_{step}.json")

    return TrackerClient(run_id, log, samples, lambda: client.set_terminated(run_id))


def start_swanlab(cfg: SkyRLTrainConfig, run_id: str | None) -> TrackerClient:
    """Start swanlab. It has no tables, so samples are texts with captions."""
    import swanlab

    folder = None if "SWANLAB_LOGDIR" in os.environ or "SWANLAB_LOG_DIR" in os.environ else run_folder(cfg) / "swanlog"
    running = swanlab.init(
        project=cfg.trainer.project_name,
        name=cfg.trainer.run_name,
        config=get_config_as_dict(cfg),
        id=run_id or uuid.uuid4().hex[:21],
        resume="allow",
        log_dir=None if folder is None else str(folder),
        settings=swanlab.Settings(interactive=False),
    )

    def samples(rows: Sequence[ShownSample], step: int) -> None:
        texts = [
            swanlab.Text(f"{prompt}{response}", caption=f"{uid} · reward {reward} · {stop}")
            for uid, reward, stop, prompt, response in rows
        ]
        running.log({"samples": texts}, step=step)

    return TrackerClient(running.id, lambda metrics, step: running.log(metrics, step=step), samples, running.finish)


def _flat(key: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for name, inner in value.items() for pair in _flat(f"{key}.{name}" if key else name, inner)]
    return [(key, str(value))]


class TensorBoard(MetricSink):
    """Writes TensorBoard event files into ``folder``, one event with all metrics per step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, after: int | None) -> None:
        from torch.utils.tensorboard.writer import FileWriter

        self.finish()
        self._writer = FileWriter(str(self._folder), flush_secs=10)
        if after is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            # TensorBoard shows later steps of earlier files until an event of this kind voids them.
            self._writer.add_event(Event(file_version="brain.Event:2"), after + 1)
            self._writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), after + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_summary(Summary(value=values), step)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def run_sinks(cfg: SkyRLTrainConfig, resumed: bool) -> list[MetricSink]:
    """Return TensorBoard, which every run writes, and the trackers of ``trainer.logger``."""
    return [TensorBoard(run_folder(cfg) / "tensorboard"), *named_trackers(cfg, resumed)]
