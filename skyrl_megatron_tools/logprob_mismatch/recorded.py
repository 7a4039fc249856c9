"""What a run left of a step: its configuration, the batch, and the weights that were there."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning
from skyrl_megatron.preflight import load_config
from skyrl_megatron.runtime.checkpoint.store import CheckpointStore
from skyrl_megatron.trainer.dump import Versions, dump_path, read_dump
from skyrl_megatron.types import TrainingBatch

if TYPE_CHECKING:
    pass


@dataclass(slots=True)
class RecordedStep:
    """A step's samples, as they went into training."""

    step: int
    batch: TrainingBatch
    sampled_by: Versions

    @property
    def version(self) -> int:
        """The weights that a synchronous run samples a step with."""
        return self.step - 1


def run_config(run: Path) -> SkyRLTrainConfig:
    """Return the configuration of a run, for its policy and one engine that runs eagerly and says what it takes.

    Raises ConfigError for a folder that is none of a run, and for a configuration that cannot be run here.
    """
    path = run / "config.yaml"
    if not path.is_file():
        fix = "no folder of a run: it has no config.yaml; give log_path/project_name/run_name"
        raise ConfigError([Problem("RUN", run, fix)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkyRLMegatronWarning)  # said when the run started
        cfg, _ = load_config(SkyRLTrainConfig, ["--config", str(path)], scripted=True)
    trainer, engine = cfg.trainer, cfg.generator.inference_engine
    if len(names := list(trainer.policy.model.lora.adapters)) > 1:
        fix = "a run of several adapters cannot be explained yet: look at one of them in a run of its own"
        raise ConfigError([Problem("trainer.policy.model.lora.adapters", names, fix)])
    if not engine.run_engines_locally:
        fix = "the run's engines are started elsewhere, and their layers cannot be watched"
        raise ConfigError([Problem("generator.inference_engine.run_engines_locally", False, fix)])
    algorithm = trainer.algorithm
    algorithm.use_kl_loss = algorithm.use_kl_in_reward = False  # nobody but the policy and an engine is needed
    algorithm.distillation.loss_coef = algorithm.distillation.reward_coef = 0.0
    algorithm.advantage_estimator = "grpo"
    engine.num_engines, engine.data_parallel_size, engine.enforce_eager = 1, 1, True
    engine.expert_parallel_size = min(engine.expert_parallel_size, engine.tensor_parallel_size)
    engine.enable_registry = engine.enable_http_endpoint = False
    return cfg


def read_step(cfg: SkyRLTrainConfig, step: int) -> RecordedStep:
    """Return what was dumped of a step. Raises ConfigError when nothing was."""
    path = dump_path(cfg, step)
    try:
        batch, versions = read_dump(path)
    except (OSError, ValueError) as error:
        there = sorted(int(each.stem.rpartition("_")[2]) for each in path.parent.glob("global_step_*.safetensors"))
        said = str(error) if path.is_file() else f"its batch is not in {path.parent}"
        others = f"steps {', '.join(map(str, there))} are" if there else "none is"
        fix = f"{said} ({others}): run the step with trainer.dump_data_batch=true"
        raise ConfigError([Problem("--step", step, fix)]) from error
    if batch.rollout_logprobs is None:
        fix = "was recorded without log-probs of the engine: set generator.sampling_params.logprobs=0"
        raise ConfigError([Problem("--step", step, fix)])
    return RecordedStep(step, batch, versions)


def checkpoints(cfg: SkyRLTrainConfig) -> dict[int, str]:
    """Return the folder of every checkpoint that is kept, by its version."""
    store = CheckpointStore(cfg.trainer.ckpt_path)
    return {step: store.folder(step) for step in store.steps()}
