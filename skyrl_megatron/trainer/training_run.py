"""The run around the training loop: models and engines, checkpoints and exports, the log and the end of the run.

:class:`RayPPOTrainer` (``ppo.py``) derives from :class:`TrainingRun` and adds the loop and its steps. Everything here
can be overridden in a trainer as well: ``build_models``, ``init_weight_sync_state``, ``load_checkpoints``,
``save_checkpoints`` and ``save_models`` have their names in SkyRL.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.source import FolderChanges
from skyrl_megatron.algorithms.estimator_state import estimator_state
from skyrl_megatron.algorithms.kl import get_kl_controller
from skyrl_megatron.config.metric_table import describe
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.config.roles import (
    active_roles,
    engine_ranks,
    is_frozen,
    role_configs,
    shares_policy_gpus,
    weight_path,
)
from skyrl_megatron.data.loader import run_loader, warn_of_changes
from skyrl_megatron.identity import Identity, run_identity, settings_of
from skyrl_megatron.interrupts import report_end
from skyrl_megatron.progress import current_task
from skyrl_megatron.rollout.dynamic_sampling import DynamicSampler
from skyrl_megatron.rollout.gates import Gates
from skyrl_megatron.rollout.interface import GeneratorInterface
from skyrl_megatron.sources.run_state import RunState
from skyrl_megatron.sources.source import PromptRollouts
from skyrl_megatron.trainer.callbacks import TrainerCallback, notify
from skyrl_megatron.trainer.checkpoints import SETTINGS, export_due, prepare_export, run_checkpointer, settings_line
from skyrl_megatron.trainer.console import Phases, StartUp
from skyrl_megatron.trainer.evaluate import evaluate
from skyrl_megatron.trainer.event_loop import LoopThread
from skyrl_megatron.trainer.recorders import RecordedRun, Recorders
from skyrl_megatron.trainer.recovery import Recovery, RunStart
from skyrl_megatron.trainer.step_batch import LearningSignal, mini_batch_size, run_scorers
from skyrl_megatron.trainer.stopping import StopSignal, reached, remaining_work, step_limit, summary_lines
from skyrl_megatron.trainer.tracking import as_numbers
from skyrl_megatron.workers.policy_rank import policy_ranks, weight_synchronizer
from skyrl_megatron.workers.worker_group import ThroughputMeter, WorkerGroup

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.checkpoint.checkpointer import Checkpointer, RoleRanks
    from skyrl_megatron.trainer.tracking import Tracking
    from skyrl_megatron.workers.placement import Placement
    from skyrl_megatron.workers.sync_calls import SyncReport
    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

MEASURED_PHASES = (
    "generate",
    "teacher",
    "fwd_logprobs_values_reward",
    "critic_train",
    "policy_train",
    "update_ref",
    "sync_weights",
)
"""Phases at whose end the device memory of each role is measured, if all roles share the GPUs."""


class TrainingRun:
    """The parts of a run and their life. Made by :meth:`BasePPOExp.get_trainer`, all arguments by keyword.

    ``generator``: a ``GeneratorInterface``; ``train_dataset``, ``eval_dataset``: ``PromptDataset``; ``eval_sets``:
    name of ``data.eval_sets`` → ``PromptDataset``; ``tracker``: :class:`Tracking`; ``colocate_pg``:
    :class:`Placement`.
    """

    def __init__(
        self,
        cfg: SkyRLTrainConfig,
        tracker: Tracking,
        tokenizer: Any,
        train_dataset: Any,
        inference_engine_client: Any,
        generator: Any,
        colocate_pg: Placement,
        eval_dataset: Any = None,
        eval_sets: Mapping[str, Any] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.cfg, self.tracker, self.tokenizer = cfg, tracker, tokenizer
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.eval_sets = dict(eval_sets or {})
        self.inference_engine_client, self.generator = inference_engine_client, generator
        self.placement, self.callbacks = colocate_pg, list(callbacks)
        self.train_dataloader = run_loader(cfg, train_dataset)
        self.limit = step_limit(cfg, len(self.train_dataloader))
        self.remaining_work = remaining_work(cfg)
        """What is left to do of a run that took its last step before; None while steps are left."""
        self.asked_steps = self.limit.steps
        """The last step by ``max_training_steps`` and ``epochs``, which ``stop_when`` may come before."""
        self.best: float | None = None
        """Value of ``trainer.best_metric`` of the best checkpoint."""
        in_reward = cfg.trainer.algorithm.use_kl_in_reward
        self.kl_controller = get_kl_controller(cfg.trainer.algorithm) if in_reward else None
        self.estimator = estimator_state(cfg.trainer.algorithm)
        """What the advantage estimator remembers."""
        sampling = cfg.trainer.algorithm.dynamic_sampling
        self.sampler = DynamicSampler(sampling, cfg.trainer.train_batch_size, cfg.trainer.seed)
        self.gates = Gates(sampling.gates)
        self.phases, self.start_up = Phases(self._role_bytes), StartUp(tracker.say)
        steps, position = (self.remaining_work or self).limit.steps, self.train_dataloader.state_dict()
        self.run_state = RunState(steps, position, self.phases, tracker.say)
        """How far the run is: its steps, metrics and position, which sources and recovery share."""
        self.recorders = Recorders(
            RecordedRun(cfg, tokenizer, self.total_steps, generator, tracker, lambda: self.identity)
        )
        self.learning_signal = LearningSignal()
        self.sampled: list[np.ndarray] = []
        """Tokens of the sequences that were sampled for the current step."""
        self.logged_step = 0
        """The last logged step. A step is logged after its evaluation."""
        self.stop, self.loop = StopSignal(), LoopThread()
        self.roles: dict[str, WorkerGroup] = {}
        """Ranks of policy, reference, critic and teachers, once they are built."""
        self.scorers = run_scorers(cfg, self.roles, self.loop, train_dataset)
        """What scores a batch in addition to policy, reference and critic: teachers."""
        self.checkpoints: Checkpointer | None = None
        self.resume_from = (cfg.trainer.resume_mode, cfg.trainer.resume_path)
        """What :meth:`load_checkpoints` loads: as configured, or the latest once the run has saved one."""
        self.weights: WeightSynchronizer | None = None
        self.recovery = Recovery(cfg, self.run_state, self.roles, self)
        self.rollouts = self.make_rollouts()

    def make_rollouts(self) -> PromptRollouts:
        """Return the source of the rollouts, which the loop defines."""
        raise NotImplementedError

    # ------------------------------------------------------------------ start
    def start(self) -> bool:
        """Load models, engines and the checkpoint, and sync the first weights. Returns whether the loop has to run:
        false if the run is finished already, or only had to export its last step."""
        self.stop.waits = False  # no step is in progress: a signal ends the run at once
        if note := str(self.remaining_work or self.limit.note):
            self.tracker.say(note)
        if self.remaining_work is not None and self.remaining_work.nothing:
            return False
        self.build_models()
        with current_task("load the checkpoint"):
            self.load_checkpoints()
        if not self.needs_engines and self.is_last_step:
            self.recorders.on_start(self.global_step, self.roles)
            self.finish_last_step()
            return False
        if self.remaining_work is not None and not self.is_last_step:  # its last checkpoint is damaged
            started, self.remaining_work, self.total_steps = self.needs_engines, None, self.limit.steps
            if not started:
                self.start_engines()
        self.init_weight_sync_state()
        self.give_first_weights()
        self.before_training()
        self.recovery.begin()
        self.stop.waits = True
        if self.is_last_step and self.remaining_work is None:  # the initial policy fulfils stop_when
            self.recorders.on_start(self.global_step, self.roles)
            return False
        gc.collect()
        gc.freeze()  # the collector no longer scans the objects of the start in each step
        self.recorders.on_start(self.global_step, self.roles)
        return True

    def build_models(self) -> None:
        """Start the ranks of every role and the engines. All load at the same time, unless they share GPUs: then an
        engine reserves its share of the free memory first, and sleeps while the models are built."""
        logs = str(run_folder(self.cfg) / "workers")
        shared_gpus = self.cfg.trainer.placement.colocate_all
        with self.phases("build_models"):
            if shared_gpus:
                self.start_engines()
            for key, (name, cfg) in role_configs(self.cfg).items():
                self.roles[key] = WorkerGroup(cfg, name, self.placement[key])
                self.roles[key].group.look = self.recorders.on_hang
                self.roles[key].start_building(self._updates_of(name), logs)
            if not shared_gpus:
                self.start_engines()
            for role in self.roles.values():
                role.finish_building()
            # Before anything is sampled: engines then return experts by the layers that a rank reads.
            if isinstance(stages := getattr(self.inference_engine_client, "stages", None), list):
                stages[:] = self.policy.stages
            self.offload_others("policy")
            if shared_gpus:
                with current_task("allocate host memory for offloaded state"):
                    self.policy.offload()
        built = ", ".join(f"{name} on {len(role.group)}" for name, role in self.roles.items())
        layers = "".join(f", layers: {kind}" for kind in {role.ranks[0].layers for role in self.roles.values()} - {""})
        if self.needs_engines and (why := self.policy.ranks[0].unshared):
            layers += f", shared prefixes computed again: {why}"
        at_once = "" if shared_gpus or not self.needs_engines else ", loaded while the engines started"
        self.start_up.done(f"models: {built} Megatron ranks{layers}{at_once}")
        trained: dict[str, RoleRanks] = {}
        for name, role in self.roles.items():
            if not is_frozen(role.name) or (name == "ref" and self.cfg.trainer.update_ref_every_epoch):
                trained |= role.checkpointed()
        changes = {name: self.folder_changes(name) for name in trained}
        self.checkpoints = run_checkpointer(self.cfg, trained, changes, self.identity)

    def start_engines(self) -> None:
        """Wait until the engines answer, unless nothing is sampled. Engines that share GPUs with the models sleep
        afterwards. Raises EngineError, LaunchError."""
        if not self.needs_engines:
            return
        starting = self.inference_engine_client.start()
        self.loop.run(starting, "start engines", timeout_s=self.cfg.trainer.phase_timeout_s)
        self.start_up.done(f"engines: {len(self.inference_engine_client.pool.alive())} ready")
        if self.cfg.trainer.placement.colocate_all:
            self.loop.run(self.inference_engine_client.pool.sleep(self.cfg.trainer.phase_timeout_s))

    def init_weight_sync_state(self) -> None:
        """Make the weight synchronizer. The first sync connects ranks and engines."""
        engines = self.inference_engine_client
        self.weights = weight_synchronizer(self.cfg, self.policy, engines.pool, dtype=engines.dtype)
        self.loop.run(engines.watch(self.weights.sync_engine))

    def renew_weight_sync(self) -> None:
        """Give the weight synchronizer the current ranks of the policy."""
        if self.weights is not None:
            self.loop.run(self.weights.replace_ranks(policy_ranks(self.policy)))

    def give_first_weights(self) -> None:
        """Sync the weights of the run's start into the engines, and report it."""
        self.sync_weights()
        assert self.weights is not None
        path = weight_path(self.cfg, sliced=self.weights.plan is not None)
        self.start_up.done(f"weights: version {self.global_step} in every engine, {path}")

    def sync_weights(self) -> SyncReport:
        """Send the policy's weights to every engine, as version ``global_step``."""
        assert self.weights is not None
        with self.phases("sync_weights"):
            report = self.loop.run(self.weights.sync(str(self.global_step), self.policy.changed_adapters()))
        for failure in report.failures:
            self.tracker.say(f"weight sync: {failure}")
        self.metrics["timing/sync_weights_only_transfer"] = report.seconds["transfer"]
        if report.logprob_diffs:
            largest = max(diff.largest for diff in report.logprob_diffs.values())
            self.metrics["trainer/weight_sync_probe_max_abs_diff"] = largest
        self.metrics["trainer/weight_sync_gb_per_second"] = report.gigabytes_per_second
        self.rollouts.advance(self.global_step, report.total_seconds)
        return report

    def begin_training(self) -> None:
        """Take the ranks for training: engines that restart get no weights until the next sync."""
        assert self.weights is not None
        self.loop.run(self.weights.begin_training())

    def free_slots(self) -> int:
        """Return how many more sequences the engines could decode at the same time; negative if requests wait."""
        engine = self.cfg.generator.inference_engine
        slots = engine.max_num_seqs * engine.data_parallel_size
        return sum(slots - len(slot.in_flight) for slot in self.inference_engine_client.pool.alive())

    def on_loop[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the thread of the event loop, and return its result."""
        return self.loop.call(function, *arguments)

    def wait_for[T](self, work: Coroutine[Any, Any, T], *, stoppable: bool = False) -> T:
        """Run ``work`` on the event loop and return its result. ``stoppable``: a stop signal cancels it."""
        return self.loop.run(work, stop=self.stop if stoppable else None)

    def offload_others(self, name: str) -> None:
        """Offload the roles that share GPUs with ``name``, which is about to compute."""
        for other, role in self.roles.items():
            if other != name and (self.cfg.trainer.placement.colocate_all or self._shares_policy_gpus(other)):
                role.offload()

    # ------------------------------------------------------------------ checkpoints and exports
    def load_checkpoints(self) -> None:
        """Load the checkpoint that ``trainer.resume_mode`` names, or start at step 0, and report which."""
        assert self.checkpoints is not None
        loaded = self.checkpoints.load(*self.resume_from)
        if loaded is not None:
            self.global_step = loaded.step
            self.train_dataloader.load_state_dict(loaded.data)
            self.load_trainer_state(loaded.trainer_state)
            self.rollouts.load_unfinished(loaded.rollouts)
            self.run_state.epochs = self.train_dataloader.finished_epochs
            best = self.checkpoints.store.best() or {}
            if best.get("metric") == self.cfg.trainer.best_metric and best.get("step", 0) <= loaded.step:
                self.best = best.get("value")
            self.tracker.say(f"resumed from {loaded.folder} (step {loaded.step} of {self.total_steps})")
            if line := settings_line(loaded.trainer_state, self.cfg):
                self.tracker.say(line)
            self.start_up.done(f"checkpoint: step {self.global_step} loaded")
        self.run_state.position = self.train_dataloader.state_dict()
        resumed_from = self.global_step if loaded else None
        logged = self.tracker.open(total_steps=self.total_steps, resumed_from=resumed_from)
        self.recorders.on_load(resumed_from)
        self.logged_step = self.global_step
        if loaded is not None and not logged and (unlogged := loaded.trainer_state.get("unlogged")):
            self.logged_step -= 1
            self.metrics, self.phases.timings = unlogged["metrics"], unlogged["timings"]
        self.rollouts.open()

    def save_checkpoints(self) -> None:
        """Save a checkpoint of the whole run."""
        assert self.checkpoints is not None
        state = self.trainer_state()
        with self.phases("save_checkpoints"):
            rollouts, run = self.rollouts.unfinished(), self.run_state
            folder = self.checkpoints.save(
                run.step, run.position, state, rollouts=rollouts, last_step_finite=run.finite
            )
        if folder is not None:
            self.resume_from = ("latest", None)
            notify(self.callbacks, "on_save", self, folder)
        self.rollouts.checkpoint_saved(self.checkpoints.store.complete_steps)

    def trainer_state(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the trainer itself, as plain values."""
        state: dict[str, Any] = {"global_step": self.global_step, "sampler_rng": self.sampler.rng.bit_generator.state}
        state[SETTINGS] = settings_of(self.cfg)
        if (files := getattr(self.eval_dataset, "fingerprint", None)) is not None:
            state["eval_files"] = files
        state |= self.algorithm_state()
        if self.logged_step < self.global_step:
            state["unlogged"] = {"metrics": as_numbers(self.metrics), "timings": self.phases.so_far()}
        return state | self.rollouts.state()

    def load_trainer_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`trainer_state` returned, after the position in the data."""
        self.sampler.rng.bit_generator.state = state["sampler_rng"]
        if self.eval_dataset is not None:
            warn_of_changes(state.get("eval_files"), getattr(self.eval_dataset, "fingerprint", []))
        self.load_algorithm_state(state)
        self.rollouts.load_state(state)

    def algorithm_state(self) -> dict[str, Any]:
        """Return what the algorithm remembers over the steps, as plain values."""
        coefficient = {} if self.kl_controller is None else {"kl_coef": self.kl_controller.value}
        return coefficient | self.estimator.state()

    def load_algorithm_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`algorithm_state` returned."""
        if self.kl_controller is not None:
            self.kl_controller.value = state["kl_coef"]
        self.estimator.load_state(state)

    def run_start(self) -> RunStart:
        """Return where the run is now, to :meth:`rewind` to it."""
        return RunStart(self.run_state.step, self.run_state.position, self.trainer_state())

    def rewind(self, start: RunStart) -> None:
        """Go back to the last checkpoint, or to the start of the run if there is none, and give engines its weights.
        The roles have their initial weights if there is none."""
        self.train_dataloader.load_state_dict(start.position)
        self.load_trainer_state(start.trainer_state)
        self.run_state.step, self.run_state.epochs = start.step, self.train_dataloader.finished_epochs
        self.load_checkpoints()
        self.offload_others("policy")
        self.sync_weights()
        self.before_training()

    def save_models(self) -> None:
        """Export policy and critic as Hugging Face folders, ``export_path/global_step_N/{policy,critic}``."""
        with self.phases("save_hf_model"):
            for role in (self.policy, self.critic):
                if role is not None:
                    self.offload_others(role.name)
                    folder = prepare_export(self.cfg.trainer.export_path, self.global_step, role.name, self.identity)
                    role.export_hf(str(folder), self.folder_changes(role.name))

    def folder_changes(self, role: str) -> FolderChanges:
        """Return how the files of a role's model differ in exports and checkpoints."""
        return FolderChanges()

    def save_on_stop(self) -> None:
        """Save a checkpoint of the last complete step, unless it is saved already."""
        if self.global_step > 0 and self.checkpoints is not None and self.checkpoints.saved_step != self.global_step:
            self.save_checkpoints()
        report_end()
        self.tracker.say(f"stopped after step {self.global_step}; the same command continues from there")

    # ------------------------------------------------------------------ evaluation, log and end
    def before_training(self) -> None:
        """Evaluate the initial policy, with ``eval_before_train`` and at step 0."""
        if self.cfg.trainer.eval_before_train and self.global_step == 0:
            if self.eval():
                held_out = sum(map(len, (self.eval_dataset or (), *self.eval_sets.values())))
                self.start_up.done(f"evaluation: {held_out} held-out prompts")
            self.stop_if_reached()
            self.tracker.log(self.metrics | self.phases.metrics(), 0)
            self.metrics = {}

    def finish_last_step(self) -> None:
        """Evaluate, log and export the last step as far as the run that saved it did not, or was not asked to."""
        left = self.remaining_work
        if self.logged_step < self.global_step:
            self.end_step()
        elif left is not None and left.evaluation and self.eval():
            self.tracker.log(self.metrics | self.phases.metrics(), self.global_step)
            self.metrics = {}
        if left is not None and left.exports:
            self.save_models()

    def end_step(self) -> None:
        """Evaluate the policy if that is due, and log the step."""
        if self._is_due(self.cfg.trainer.eval_interval) or (self.is_last_step and self.cfg.trainer.eval_interval > 0):
            self.eval()
        self.keep_best()
        self.stop_if_reached()
        self.log_step()
        notify(self.callbacks, "on_step_end", self)

    def eval(self) -> dict[str, float]:
        """Return scores on the evaluation data, and add them to the step's metrics; {} without such data."""
        if not self.eval_sets and (self.eval_dataset is None or len(self.eval_dataset) == 0):
            return {}
        sets = (self.eval_sets,) if self.eval_sets else ()
        step, identity = self.global_step, self.identity
        work = evaluate(self.cfg, self.eval_dataset, self.generator, self.tokenizer, step, *sets, identity=identity)
        with self.phases("eval"):
            metrics = self.loop.run(work, stop=self.stop)
        self.metrics |= metrics
        notify(self.callbacks, "on_evaluate", self, metrics)
        return metrics

    def keep_best(self) -> None:
        """Save a checkpoint and mark it as the best, if the evaluation of the step is the best so far."""
        metric = self.cfg.trainer.best_metric
        value = None if metric is None else self.metrics.get(metric)
        if metric is None or value is None or not _is_better(metric, value, self.best):
            return
        self.recovery.run(self._save_this_step)
        if self.checkpoints is not None and self.checkpoints.saved_step == self.global_step:
            self.best = value
            self.checkpoints.mark_best(metric, value)

    def stop_if_reached(self) -> None:
        """End the run here, with its checkpoint and export, if the metrics of the step fulfil ``stop_when``."""
        limit = reached(self.cfg, self.global_step, self.metrics)
        if limit is None:
            return
        interval, was_last = self.cfg.trainer.hf_save_interval, self.is_last_step
        self.limit, self.total_steps = limit, limit.steps
        step = self.global_step  # at step 0 nothing was published yet
        exported = interval <= 0 or (step > 0 and export_due(step, interval, is_last=was_last))
        self.begin_training()
        self.recovery.run(self._save_this_step)
        if not exported:
            self.recovery.run(self.save_models)

    def _save_this_step(self) -> None:
        """Save a checkpoint of the step that is complete, unless it is saved already."""
        if self.checkpoints is None or self.checkpoints.saved_step != self.global_step:
            self.save_checkpoints()

    def log_step(self) -> None:
        """Log the metrics of the step, and start the next step with none."""
        timings = self.phases.metrics()
        seconds = timings["timing/step"]
        tokens = self.metrics.pop("trainer/tokens", 0.0)
        ranks = len(self.policy.group)
        own_seconds = {name: role.take_own_seconds() for name, role in self.roles.items()}
        self.metrics |= self.recorders.rank_metrics(own_seconds)
        self.metrics |= timings | {
            "trainer/epoch": float(self.train_dataloader.epoch),
            "trainer/global_step": float(self.global_step),
            "trainer/tokens_per_second": tokens / seconds,
            "trainer/tokens_per_second_per_gpu": tokens / seconds / ranks,
        }
        sampled = self.sampled
        self.metrics |= self.generation_speed(timings) | self.recovery.metrics()
        if sampled:
            self.metrics |= self.recorders.step_metrics(np.concatenate(sampled), self.metrics, self.policy.device_type)
        self.tracker.log(self.metrics, self.global_step)
        self.logged_step = self.global_step
        notify(self.callbacks, "on_log", self, self.metrics)
        self.metrics = {}
        self.recovery.run(self.recorders.on_step_end, self.global_step, self.roles)

    def discard_step(self) -> None:
        """Discard the metrics of a step that the run rewound from."""
        self.metrics, self.sampled = {}, []
        self.phases.metrics()

    def generation_speed(self, timings: Mapping[str, float]) -> dict[str, float]:
        """Return the sampling speed of an engine rank. ``timings``: of :meth:`Phases.metrics`. Rollouts that run ahead
        take the whole step."""
        engine, ahead = self.cfg.generator.inference_engine, self.cfg.trainer.fully_async.enabled
        seconds = timings["timing/step"] if ahead else timings.get("timing/generate", 0.0)
        speed, sampled, self.sampled = ThroughputMeter(), self.sampled, []
        for lengths in sampled:
            speed.add(lengths, self.policy.flops)
        ranks = engine.num_engines * engine_ranks(self.cfg)
        return speed.metrics("generate/", ranks, self.policy.peak_flops, seconds)

    def finish(self) -> None:
        """Stop sampling, complete pending writes, stop the ranks and write the report."""
        gc.unfreeze()
        try:
            self.rollouts.close()
            if isinstance(self.generator, GeneratorInterface):
                self.loop.run(self.generator.stop())
        finally:
            self._stop_roles_and_report()

    def _stop_roles_and_report(self) -> None:
        failed = sys.exception()
        try:
            if self.checkpoints is not None:
                self.checkpoints.close()
        finally:
            for role in self.roles.values():
                role.stop()
            try:
                self._write_report()
            except OSError:
                if failed is None:  # else the error that ended the run is reported, not the missing report
                    raise

    def _write_report(self) -> None:
        """Draw the curves and the report, and print what ended the run and where its files are."""
        self.tracker.finish()
        if self.is_last_step and sys.exception() is None:
            setting = self.limit.setting if self.total_steps == self.limit.steps else "no more batches"
            self.tracker.say(f"ended after step {self.global_step} of {self.asked_steps}: {setting}")
        saved_first = self.checkpoints is not None and self.checkpoints.saved_step == 0
        if self.global_step or saved_first:
            self.recorders.on_end()
            saved = None if self.checkpoints is None else self.checkpoints.saved_step
            for line in summary_lines(self.cfg, saved, self.global_step):
                self.tracker.say(line)

    # ------------------------------------------------------------------ facts
    @property
    def global_step(self) -> int:
        """Completed steps."""
        return self.run_state.step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.run_state.step = step

    @property
    def total_steps(self) -> int:
        """The last step of the run."""
        return self.run_state.total_steps

    @total_steps.setter
    def total_steps(self, steps: int) -> None:
        self.run_state.total_steps = steps

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the current step."""
        return self.run_state.metrics

    @metrics.setter
    def metrics(self, metrics: dict[str, float]) -> None:
        self.run_state.metrics = metrics

    @cached_property
    def identity(self) -> Identity:
        """What the run depends on: its checkpoints, recorded rollouts and exports carry it."""
        return run_identity(self.cfg, getattr(self.train_dataset, "fingerprint", None))

    @property
    def policy(self) -> WorkerGroup:
        """Ranks of the policy, once they are built."""
        return self.roles["policy"]

    @property
    def ref(self) -> WorkerGroup | None:
        """Ranks of the reference; None if the run has none."""
        return self.roles.get("ref")

    @property
    def critic(self) -> WorkerGroup | None:
        """Ranks of the critic; None if the run has none."""
        return self.roles.get("critic")

    @property
    def updates(self) -> int:
        """Optimizer steps of the policy in the whole run, where a decaying learning rate ends."""
        return self._updates_of("policy") or 0

    def _updates_of(self, name: str) -> int | None:
        """Return the optimizer steps of a role in the whole run; None if it is not trained."""
        if is_frozen(name):
            return None
        trainer, steps = self.cfg.trainer, self.total_steps
        if name == "policy" and "critic" in active_roles(self.cfg):
            steps = max(steps - trainer.critic_warmup_steps, 0)
        return trainer.train_batch_size // mini_batch_size(trainer, name) * trainer.update_epochs_per_batch * steps

    @property
    def needs_engines(self) -> bool:
        """Whether anything is sampled: false if a finished run only has to export."""
        return self.remaining_work is None or self.remaining_work.evaluation

    @property
    def can_rewind(self) -> bool:
        """Whether the run can go back to an earlier step in the same process."""
        return self.rollouts.can_rewind

    @property
    def is_last_step(self) -> bool:
        """Whether :attr:`global_step` is the last one."""
        return self.global_step >= self.total_steps

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.global_step % interval == 0

    def _shares_policy_gpus(self, name: str) -> bool:
        return name in self.roles and shares_policy_gpus(self.cfg, self.roles[name].name)

    def _role_bytes(self, phase: str) -> dict[str, int]:
        """Return the bytes of each role's state on its devices, if all roles share them."""
        if not self.cfg.trainer.placement.colocate_all or phase not in MEASURED_PHASES:
            return {}
        return {name.replace("/", "_"): role.device_bytes() for name, role in self.roles.items() if role.ranks}


def _is_better(metric: str, value: float, best: float | None) -> bool:
    """Return whether a value is better than the best so far, in the metric's direction; NaN never is."""
    if best is None:
        return not math.isnan(value)
    row = describe(metric)
    return value < best if row is not None and row.better == "lower" else value > best
