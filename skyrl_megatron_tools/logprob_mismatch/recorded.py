"""Read what a run saved of a step: its configuration, the dumped batch, and the checkpoints."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from skyrl_megatron.checks import load_config
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning
from skyrl_megatron.runtime.checkpoint.store import CheckpointStore
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron_observe.dump import Versions, dump_path, read_dump, refuse_other_dump


@dataclass(slots=True)
class RecordedStep:
    """The training batch of a step, and the versions that sampled it."""

    step: int
    batch: TrainingBatch
    sampled_by: Versions

    @property
    def version(self) -> int:
        """The version of the weights that a synchronous run samples this step with."""
        return self.step - 1


def run_config(run: Path) -> SkyRLTrainConfig:
    """Return the configuration of a run, changed for its policy and one eager engine.

    Raises ConfigError for a folder that is not a run, and for a configuration that cannot be replayed.
    """
    path = run / "config.yaml"
    if not path.is_file():
        fix = "has no config.yaml: give the folder of a run, log_path/project_name/run_name"
        raise ConfigError([Problem("RUN", run, fix)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkyRLMegatronWarning)  # printed when the run started
        recorded = ["--config", str(path), "generator.unaccounted_sampling=warn"]  # it has been sampled
        cfg, _ = load_config(SkyRLTrainConfig, recorded, scripted=True)
    trainer, engine = cfg.trainer, cfg.generator.inference_engine
    if len(names := list(trainer.policy.model.lora.adapters)) > 1:
        fix = "cannot be explained with several adapters: train one of them in a separate run"
        raise ConfigError([Problem("trainer.policy.model.lora.adapters", names, fix)])
    if not engine.run_engines_locally:
        fix = "cannot be explained: the layers of remote engines cannot be recorded"
        raise ConfigError([Problem("generator.inference_engine.run_engines_locally", False, fix)])
    algorithm = trainer.algorithm
    algorithm.use_kl_loss = algorithm.use_kl_in_reward = False  # no reference or teacher is needed
    algorithm.distillation.loss_coef = algorithm.distillation.reward_coef = 0.0
    algorithm.advantage_estimator = "grpo"
    engine.num_engines, engine.data_parallel_size, engine.enforce_eager = 1, 1, True
    engine.expert_parallel_size = min(engine.expert_parallel_size, engine.tensor_parallel_size)
    engine.enable_registry = engine.enable_http_endpoint = False
    return cfg


def read_step(cfg: SkyRLTrainConfig, step: int) -> RecordedStep:
    """Return the dumped batch of a step. Raises ConfigError if it is missing or has no log-probs of the engine."""
    path = dump_path(cfg, step)
    try:
        batch, versions = read_dump(path)
    except (OSError, ValueError) as error:
        there = sorted(int(file.stem.rpartition("_")[2]) for file in path.parent.glob("global_step_*.safetensors"))
        reason = str(error) if path.is_file() else f"its batch is not in {path.parent}"
        others = f"steps {', '.join(map(str, there))} are there" if there else "no step is there"
        fix = f"{reason} ({others}): run the step with trainer.dump_data_batch=true"
        raise ConfigError([Problem("--step", step, fix)]) from error
    refuse_other_dump(cfg, step)
    if batch.rollout_logprobs is None:
        fix = "was dumped without the engine's log-probs: run with generator.sampling_params.logprobs=0"
        raise ConfigError([Problem("--step", step, fix)])
    return RecordedStep(step, batch, versions)


def checkpoints(cfg: SkyRLTrainConfig) -> dict[int, str]:
    """Return the folders of all checkpoints by version."""
    store = CheckpointStore(cfg.trainer.ckpt_path)
    return {step: store.folder(step) for step in store.steps()}
