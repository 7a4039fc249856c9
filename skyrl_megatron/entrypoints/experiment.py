"""An experiment: everything that a run is made of, each part replaceable by overriding the method that makes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from skyrl_megatron.config.rules.unavailable import require_available
from skyrl_megatron.config.run_folder import run_folder, save_config
from skyrl_megatron.entrypoints.command import noise_into
from skyrl_megatron.entrypoints.joined_run import run_in_cluster
from skyrl_megatron.envs import registry
from skyrl_megatron.plugins import GENERATORS, load_plugins
from skyrl_megatron.rollout.generator import SkyRLGymGenerator
from skyrl_megatron.trainer import RayPPOTrainer
from skyrl_megatron.trainer.console import ConsoleSink
from skyrl_megatron.trainer.phases import StartUp
from skyrl_megatron.trainer.tracking import Tracking
from skyrl_megatron.workers.inference_engine_client import InferenceEngineClient
from skyrl_megatron.workers.placement import Placement, create_placement
from skyrl_megatron.workers.ray_setup import initialize_ray

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.data.prompts import PromptDataset


class BasePPOExp:
    """One run of ``cfg``, which must be valid; Ray must be up. :meth:`run` does everything."""

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        self.cfg, self.start_up = cfg, _start_up(cfg)
        load_plugins(cfg.trainer.plugins)
        self.tokenizer = self.get_tokenizer()
        self.train_dataset = self.get_train_dataset()
        self.eval_dataset = self.get_eval_dataset()
        sizes = [0 if dataset is None else len(dataset) for dataset in (self.train_dataset, self.eval_dataset)]
        self.start_up.done(f"data: {sizes[0]} prompts to train on, {sizes[1]} to evaluate on")
        self.colocate_pg: Placement | None = None
        self.engines: InferenceEngineClient | None = None
        self.trainer: RayPPOTrainer | None = None

    # ------------------------------------------------------------------ parts
    def get_tokenizer(self, padding_side: str = "left") -> Any:
        """Load the policy's tokenizer."""
        from transformers import AutoTokenizer

        trainer = self.cfg.trainer
        tokenizer = AutoTokenizer.from_pretrained(
            trainer.policy.model.path,
            use_fast=not trainer.disable_fast_tokenizer,
            trust_remote_code=trainer.trust_remote_code,
        )
        tokenizer.padding_side = padding_side
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def get_train_dataset(self) -> PromptDataset | None:
        """Read the prompts to train on."""
        return self._dataset(self.cfg.data.train_data)

    def get_eval_dataset(self) -> PromptDataset | None:
        """Read the prompts to evaluate on; None without ``data.val_data`` or when evaluation is off."""
        trainer = self.cfg.trainer
        wanted = self.train_dataset is None or trainer.eval_before_train or trainer.eval_interval > 0
        return self._dataset(self.cfg.data.val_data) if wanted and self.cfg.data.val_data else None

    def get_inference_client(self) -> InferenceEngineClient:
        """Make the engines; ``start()`` them before they are used."""
        assert self.colocate_pg is not None
        local = self.cfg.generator.inference_engine.run_engines_locally
        return InferenceEngineClient(self.cfg, self.colocate_pg["engines"] if local else None)

    def get_generator(self, cfg: SkyRLTrainConfig, tokenizer: Any, inference_engine_client: Any) -> Any:
        """Make what turns prompts into trajectories. Raises DataError for environments that are not registered."""
        for dataset in filter(None, (self.train_dataset, self.eval_dataset)):
            registry.require(dataset.env_classes(cfg.environment.env_class))
        generator = GENERATORS.find(cfg.generator.name) or SkyRLGymGenerator
        return generator(
            cfg.generator,
            cfg.environment.skyrl_gym,
            inference_engine_client,
            tokenizer,
            seed=cfg.trainer.seed if cfg.trainer.deterministic else None,
            nonfinite=cfg.trainer.algorithm.nonfinite,
        )

    def get_trainer(self, *args: Any, **kwargs: Any) -> RayPPOTrainer:
        """Make what drives the run; the arguments are those of :class:`RayPPOTrainer`."""
        return RayPPOTrainer(*args, **kwargs)

    def get_tracker(self) -> Tracking:
        """Make what logs numbers and lines."""
        return Tracking(self.cfg)

    # ------------------------------------------------------------------ the run
    def run(self) -> None:
        """Place, start, train, and give everything back, whatever happens."""
        try:
            self.trainer = self.start()
            self.trainer.train()
        finally:
            self.stop()

    def start(self) -> RayPPOTrainer:
        """Place the run and make its trainer."""
        save_config(self.cfg)
        tracker = self.get_tracker()
        client = self.start_engines()
        return self.get_trainer(
            cfg=self.cfg,
            tracker=tracker,
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=client,
            generator=self.get_generator(self.cfg, self.tokenizer, client),
            colocate_pg=self.colocate_pg,
        )

    def start_engines(self) -> InferenceEngineClient:
        """Reserve the places of the run and put the engines on theirs."""
        self.colocate_pg = create_placement(self.cfg)
        self.engines = self.get_inference_client()
        places = ", ".join(f"{who} {len(each.bundles)}" for who, each in self.colocate_pg.allocations.items())
        self.start_up.done(f"placement: {places}")
        return self.engines

    def stop(self) -> None:
        """End the engines and free their places."""
        if self.engines is not None:
            self.engines.stop()
            self.engines = None
        if self.colocate_pg is not None:
            self.colocate_pg.remove()
            self.colocate_pg = None

    def _dataset(self, sources: Sequence[str]) -> PromptDataset:
        from skyrl_megatron.data.prompts import PromptDataset
        from skyrl_megatron.rollout.templates import load_template

        return PromptDataset(
            sources,
            self.tokenizer,
            self.cfg.trainer.max_prompt_length,
            template=load_template(self.cfg.generator.chat_template),
            template_kwargs=self.cfg.generator.chat_template_kwargs,
        )


@ray.remote(num_cpus=0)
def skyrl_entrypoint(cfg: SkyRLTrainConfig) -> None:
    """Run as a Ray task, on a node of the cluster."""
    BasePPOExp(cfg).run()


def run_experiment(
    cfg: SkyRLTrainConfig, experiment: type[BasePPOExp] = BasePPOExp, *, began: float | None = None
) -> None:
    """Run it: in this process where Ray is ours, in an actor where a cluster was joined; Ray ends with it.

    ``began``: ``time.perf_counter()`` at the start of the command. Raises ConfigError for features that are not
    available yet.
    """
    require_available(cfg)
    address = os.environ.get("RAY_ADDRESS")
    with noise_into(run_folder(cfg) / "console.log"):
        start_up = _start_up(cfg, began)
        start_up.done("command: configuration checked, libraries loaded")
        initialize_ray(cfg, log_to_driver=False)
        start_up.done(f"ray: joined {address}" if address else "ray: local, loopback, token")
        try:
            if address:
                run_in_cluster(cfg, experiment)
            else:
                experiment(cfg).run()
        finally:
            ray.shutdown()


def _start_up(cfg: SkyRLTrainConfig, began: float | None = None) -> StartUp:
    return StartUp(ConsoleSink(run_folder(cfg) / "console.log").say, began)
