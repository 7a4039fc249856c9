"""An experiment: all parts of a run. Override the method that creates a part to replace it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from skyrl_megatron import hub
from skyrl_megatron import progress as start_times
from skyrl_megatron.checks import report_if_finished
from skyrl_megatron.command import redirect_stderr, terminal
from skyrl_megatron.config.hf_model import hub_models, model_folder
from skyrl_megatron.config.resolve import (
    AnyConfig,
    is_reproducible,
    private_folder,
    run_folder,
    save_config,
    typed_config,
)
from skyrl_megatron.config.roles import active_roles, role_layout
from skyrl_megatron.config.rules.placement_rules import idle_gpus
from skyrl_megatron.config.schema.evaluation import SETS, eval_sets
from skyrl_megatron.config.validate import require_available
from skyrl_megatron.data.folder_lock import FolderLock
from skyrl_megatron.data.tokenizer import load_tokenizer
from skyrl_megatron.data.vocabulary import configured_stops, require_vocabulary
from skyrl_megatron.entrypoints.crash_report import crash_reporter
from skyrl_megatron.entrypoints.joined_run import run_in_cluster
from skyrl_megatron.envs import base_text_env as registry
from skyrl_megatron.errors import ConfigError, LaunchError
from skyrl_megatron.identity import claim, run_identity
from skyrl_megatron.plugins import GENERATORS, load_plugins
from skyrl_megatron.progress import current_task, heartbeat
from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
from skyrl_megatron.trainer import FullyAsyncRayPPOTrainer, RayPPOTrainer
from skyrl_megatron.trainer.checkpoints import recorded_hub_commits, resumed_step
from skyrl_megatron.trainer.console import ConsoleSink, StartUp
from skyrl_megatron.trainer.evaluate import require_metrics
from skyrl_megatron.trainer.tracking import Tracking
from skyrl_megatron.workers.engines import InferenceEngineClient
from skyrl_megatron.workers.nodes import fetch_models
from skyrl_megatron.workers.placement import Placement, create_placement, node_gpus
from skyrl_megatron.workers.ray_setup import end_ray, initialize_ray
from skyrl_megatron.workers.runtime_env import start_server

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.data.prompts import PromptDataset


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class BasePPOExp:
    """One run of ``cfg``, which ``validate_cfg`` must have accepted. Ray must be initialized. :meth:`run` does it all.

    The attribute ``cfg`` is a SkyRLTrainConfig, also if the argument was an omegaconf ``DictConfig``.
    """

    trains = True
    """False for an evaluation, which has no trainer ranks."""

    def __init__(self, cfg: AnyConfig) -> None:
        self.cfg = typed_config(cfg)
        self.start_up = _start_up(self.cfg)
        require_available(self.cfg)
        load_plugins(self.cfg.trainer.plugins)
        self._recorded = recorded_hub_commits(self.cfg)
        self._pin(hub_models(self.cfg, active_roles(self.cfg)))
        with current_task("read tokenizer and data"):
            self.tokenizer = self.get_tokenizer()
            self._check_tokenizer()
            self.train_dataset = self.get_train_dataset()
            self.eval_dataset = self.get_eval_dataset()
            self.eval_sets = self.get_eval_sets()
            require_metrics(self.cfg, self.eval_dataset, self.eval_sets, trains=self.trains)
        held_out = sum(map(len, (self.eval_dataset or (), *self.eval_sets.values())))
        sizes = [0 if self.train_dataset is None else len(self.train_dataset), held_out]
        self.start_up.done(f"data: {sizes[0]} rows to train on, {sizes[1]} to evaluate on")
        self.colocate_pg: Placement | None = None
        self.engines: InferenceEngineClient | None = None
        self.trainer: RayPPOTrainer | None = None

    # ------------------------------------------------------------------ parts
    def get_tokenizer(self, padding_side: str = "left") -> Any:
        """Load the policy's tokenizer."""
        trainer = self.cfg.trainer
        return load_tokenizer(
            str(model_folder(self.cfg, weights=False)),
            trust_remote_code=trainer.trust_remote_code,
            padding_side=padding_side,
        )

    def _check_tokenizer(self) -> None:
        """Check what the checks before the start could not: a model of the hub, the tokenizer of a script."""
        if callable(getattr(self.tokenizer, "get_vocab", None)):
            folder, tp = model_folder(self.cfg, weights=False), role_layout(self.cfg, "policy").tp
            with warnings.catch_warnings(action="ignore"):
                require_vocabulary(self.tokenizer, folder, tp=tp, stops=configured_stops(self.cfg.generator))

    def get_train_dataset(self) -> PromptDataset | None:
        """Read the prompts to train on."""
        return self._dataset("data.train_data", self.cfg.data.train_data)

    def get_eval_dataset(self) -> PromptDataset | None:
        """Read the prompts to evaluate on; None without ``data.val_data`` or when evaluation is off."""
        wanted = self._evaluates and self.cfg.data.val_data
        return self._dataset("data.val_data", self.cfg.data.val_data) if wanted else None

    def get_eval_sets(self) -> dict[str, PromptDataset]:
        """Read the prompts of ``data.eval_sets``, by name; {} when evaluation is off."""
        sets = eval_sets(self.cfg.data.eval_sets) if self._evaluates else {}
        return {name: self._dataset(f"{SETS}.{name}.data", one.data) for name, one in sets.items()}

    @property
    def _evaluates(self) -> bool:
        trainer = self.cfg.trainer
        return self.train_dataset is None or trainer.eval_before_train or trainer.eval_interval > 0

    def get_inference_client(self) -> InferenceEngineClient:
        """Create the engines. Call ``start()`` before using them."""
        assert self.colocate_pg is not None
        local = self.cfg.generator.inference_engine.run_engines_locally
        client = InferenceEngineClient(self.cfg, self.colocate_pg["engines"] if local else None)
        client.say = _say(self.cfg)
        return client

    def get_generator(self, cfg: SkyRLTrainConfig, tokenizer: Any, inference_engine_client: Any) -> Any:
        """Create the generator of trajectories. Raises DataError for environments that are not registered."""
        for dataset in filter(None, (self.train_dataset, self.eval_dataset, *self.eval_sets.values())):
            registry.require(dataset.env_classes(cfg.environment.env_class), cfg.environment.skyrl_gym)
        generator: Any = GENERATORS.find(cfg.generator.name) or SkyRLGymGenerator
        adapters = tuple(cfg.trainer.policy.model.lora.adapters)
        several = {"adapters": adapters} if len(adapters) > 1 else {}
        made = generator(
            cfg.generator,
            cfg.environment.skyrl_gym,
            inference_engine_client,
            tokenizer,
            seed=cfg.trainer.seed if is_reproducible(cfg) else None,
            nonfinite=cfg.trainer.algorithm.nonfinite,
            **several,
        )
        if self.trains and hasattr(made, "log_folder"):  # of an AgentGenerator: calls outlive the process
            folder = made.log_folder = Path(cfg.trainer.ckpt_path) / "agents"
            if cfg.trainer.resume_mode in (None, "none"):
                shutil.rmtree(folder, ignore_errors=True)
            identity = run_identity(cfg, getattr(self.train_dataset, "fingerprint", None))
            claim("trainer.ckpt_path", folder, cfg, identity)
        return made

    def get_trainer(self, *args: Any, **kwargs: Any) -> RayPPOTrainer:
        """Create the trainer; the arguments are those of :class:`RayPPOTrainer`."""
        kind = FullyAsyncRayPPOTrainer if self.cfg.trainer.fully_async.enabled else RayPPOTrainer
        return kind(*args, **kwargs)

    def get_tracker(self) -> Tracking:
        """Create the tracker of metrics and log lines."""
        return Tracking(self.cfg, resumed=resumed_step(self.cfg) > 0)

    # ------------------------------------------------------------------ the run
    def run(self) -> None:
        """Place and start the run, train, and release all resources, also after an error. Raises LaunchError if a disk
        is full or cannot be written."""
        with heartbeat(self.start_up.say):
            try:
                with current_task("place the run"):
                    self.trainer = self.start()
                self.trainer.train()
            except OSError as error:
                if error.errno not in DISK_ERRORS:
                    raise
                where = error.filename or run_folder(self.cfg)
                raise LaunchError(
                    f"the disk of {where}: {os.strerror(error.errno)}; free disk space, or change trainer.log_path, "
                    "ckpt_path or export_path; the same command continues from the last checkpoint"
                ) from error
            finally:
                with current_task("end the engines and free their places"):
                    self.stop()

    def start(self) -> RayPPOTrainer:
        """Place the run and create its trainer."""
        save_config(self.cfg)
        tracker = self.get_tracker()
        client = self.start_engines()
        return self.get_trainer(
            cfg=self.cfg,
            tracker=tracker,
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            **({"eval_sets": self.eval_sets} if self.eval_sets else {}),
            inference_engine_client=client,
            generator=self.get_generator(self.cfg, self.tokenizer, client),
            colocate_pg=self.colocate_pg,
        )

    def start_engines(self) -> InferenceEngineClient:
        """Reserve the run's placement group, and create the engines in it."""
        self.colocate_pg = create_placement(self.cfg, training=self.trains)
        roles = [role for role in self.colocate_pg.allocations if role != "engines"] or ["policy"]
        fetch_models(self.cfg, roles, self.colocate_pg, _say(self.cfg))
        self.engines = self.get_inference_client()
        places = ", ".join(f"{who} {len(each.bundles)}" for who, each in self.colocate_pg.allocations.items())
        self.start_up.done(f"placement: {places}")
        return self.engines

    def stop(self) -> None:
        """Stop the engines and remove the placement group."""
        if self.engines is not None:
            self.engines.stop()
            self.engines = None
        if self.colocate_pg is not None:
            self.colocate_pg.remove()
            self.colocate_pg = None

    def _pin(self, asked: Iterable[hub.HubReference]) -> None:
        asked, say = list(asked), _say(self.cfg)
        if problems := hub.pin(self.cfg.trainer.hub_commits, asked, self._recorded, say):
            raise ConfigError(problems)
        for key in dict.fromkeys(each.repo.key for each in asked):
            origin = ", as in the checkpoint" if key in self._recorded else ""
            say(f"hub: {key} is commit {self.cfg.trainer.hub_commits[key]}{origin}")

    def _dataset(self, key: str, sources: Sequence[str]) -> PromptDataset:
        from skyrl_megatron.data.prompts import PromptDataset
        from skyrl_megatron.data.row_cache import run_cache
        from skyrl_megatron.rollout.templates import load_template

        self._pin(hub.data_sets(key, sources))
        dataset = PromptDataset(
            sources,
            self.tokenizer,
            self.cfg.trainer.max_prompt_length,
            template=load_template(self.cfg.generator.chat_template),
            template_kwargs=self.cfg.generator.chat_template_kwargs,
            adapters=tuple(self.cfg.trainer.policy.model.lora.adapters),
            hub_commits=self.cfg.trainer.hub_commits,
            say=_say(self.cfg),
            strict=self.cfg.data.strict_rows,
            cache=run_cache(self.cfg.data.row_cache_gb),
        )
        missing = dataset.rows_without_reward_spec(self.cfg.environment.env_class)
        registry.warn_of_missing_answers(", ".join(sources), missing, len(dataset.rows))
        return dataset


@ray.remote(num_cpus=0)
def skyrl_entrypoint(cfg: AnyConfig) -> None:
    """Run as a Ray task, on a node of the cluster."""
    BasePPOExp(cfg).run()


def run_experiment(
    cfg: SkyRLTrainConfig, experiment: type[BasePPOExp] = BasePPOExp, *, began: float | None = None
) -> None:
    """Run an experiment, in this process with a local Ray, or in an actor of a cluster that ``RAY_ADDRESS`` names.

    ``began``: ``time.perf_counter()`` at the start of the command. If the run is finished, this is printed and nothing
    starts. Raises ConfigError for a model that no engine runs, CheckpointError if another command uses the run's
    folder.
    """
    require_available(cfg)
    if experiment.run is BasePPOExp.run and report_if_finished(cfg):
        return
    start_times.begin(began)
    start_server()
    address = os.environ.get("RAY_ADDRESS")
    with _locked_run_folder(run_folder(cfg)), redirect_stderr(run_folder(cfg) / "console.log"):
        start_up = _start_up(cfg, began)
        start_up.done("command: configuration checked, libraries loaded")
        with heartbeat(start_up.say), current_task("start Ray"):
            cluster = initialize_ray(cfg, log_to_driver=False)
        start_up.done(f"ray: {cluster}")
        if idle := idle_gpus(cfg, node_gpus()):
            start_up.say(idle)
        try:
            with crash_reporter(run_folder(cfg) / "console.log", terminal().fileno()):
                if address:
                    run_in_cluster(cfg, experiment)
                else:
                    with heartbeat(start_up.say):
                        experiment(cfg).run()
        finally:
            with heartbeat(start_up.say), current_task("end Ray"):
                end_ray()


@contextlib.contextmanager
def _locked_run_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other commands for the block. The lock of a dead process does not count."""
    private_folder(folder)
    lock = FolderLock(str(folder), "trainer.run_name")
    try:
        yield
    finally:
        lock.release()


def _start_up(cfg: SkyRLTrainConfig, began: float | None = None) -> StartUp:
    return StartUp(_say(cfg), began)


def _say(cfg: SkyRLTrainConfig) -> Callable[[str], None]:
    return ConsoleSink(run_folder(cfg) / "console.log").say
