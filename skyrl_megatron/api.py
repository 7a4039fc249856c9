"""The public names of the project, in one place: what a script or a plugin may import and rely on.

    from skyrl_megatron.api import SkyRLTrainConfig, train
    train(["data.train_data=[train.parquet]", "trainer.policy.model.path=Qwen/Qwen3-0.6B"])

Names are imported when they are first used, so importing this module costs nothing. In addition to them, only this is
promised: the commands ``skyrl-megatron VERB``, ``launch/run_moe.sh`` and ``launch/run_tests.sh``; the keys of
CONFIG.md; the files of a run and of its checkpoints; and what scripts written for SkyRL import from
``skyrl_megatron.{config,utils,generators,trainer,envs}`` and ``skyrl_megatron.entrypoints.main_base``. Everything else
may be renamed or moved.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLUGINS = "skyrl_megatron.plugins"
NAMES = {
    "train": "skyrl_megatron.entrypoints.main_base:main",
    "evaluate": "skyrl_megatron.entrypoints.main_generate:main",
    "check": "skyrl_megatron.entrypoints.main_base:check_only",
    "convert": "bridges.convert:export_megatron",
    "import_hf": "bridges.convert:import_hf",
    "SkyRLTrainConfig": "skyrl_megatron.config:SkyRLTrainConfig",
    "make_config": "skyrl_megatron.config:make_config",
    "validate_cfg": "skyrl_megatron.checks:validate_cfg",
    "initialize_ray": "skyrl_megatron.workers.ray_setup:initialize_ray",
    "BasePPOExp": "skyrl_megatron.entrypoints.experiment:BasePPOExp",
    "RayPPOTrainer": "skyrl_megatron.trainer:RayPPOTrainer",
    "FullyAsyncRayPPOTrainer": "skyrl_megatron.trainer:FullyAsyncRayPPOTrainer",
    "SkyRLGymGenerator": "skyrl_megatron.rollout.gym_generator:SkyRLGymGenerator",
    "BaseTextEnv": "skyrl_megatron.envs:BaseTextEnv",
    "BaseTextEnvStepOutput": "skyrl_megatron.envs:BaseTextEnvStepOutput",
    "register_policy_loss": "skyrl_megatron.algorithms.losses:register_policy_loss",
    "register_advantage_estimator": "skyrl_megatron.algorithms.advantages:register_advantage_estimator",
    "register_environment": "skyrl_megatron.envs:register",
    "register_family": "bridges.families:register",
    "register_generator": f"{_PLUGINS}:register_generator",
    "register_sampler": f"{_PLUGINS}:register_sampler",
    "register_gate": f"{_PLUGINS}:register_gate",
    "register_engine": f"{_PLUGINS}:register_engine",
    "register_transport": f"{_PLUGINS}:register_transport",
    "register_optimizer": f"{_PLUGINS}:register_optimizer",
    "register_sandbox": f"{_PLUGINS}:register_sandbox",
    "register_metric": f"{_PLUGINS}:register_metric",
    "register_check": f"{_PLUGINS}:register_check",
    "register_rule": f"{_PLUGINS}:register_rule",
    "register_reporter": f"{_PLUGINS}:register_reporter",
    "register_option": f"{_PLUGINS}:register_option",
    "register_recorder": f"{_PLUGINS}:register_recorder",
    "register_part": f"{_PLUGINS}:register_part",
}
"""Public name → ``module:name`` of what it is."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(NAMES)}")
    module, _, attribute = NAMES[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return list(NAMES)
