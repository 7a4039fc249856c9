"""Packages that only some settings need: looked for without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from skyrl_megatron.config.rules.role_layout import active_roles, is_frozen
from skyrl_megatron.config.run_folder import trackers
from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import Problem, install_command

_STORES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}


def packages(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield settings whose package is not installed; what only the ranks need is looked for where they will be."""
    for key, value, package, otherwise in _needed(run):
        if package == "transformer_engine" and run.hardware.elsewhere:
            yield NotChecked(key, f"whether the ranks' machines have {package}: launch/doctor.sh says it there")
        elif importlib.util.find_spec(package) is None:
            yield Problem(key, value, f"needs the package {package}: {install_command(package)}, or {otherwise}")
    engine = run.cfg.generator.inference_engine
    if engine.run_engines_locally and engine.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        yield Problem("generator.inference_engine.backend", "vllm", "vLLM is not installed: run launch/setup.sh")


def _needed(run: PlannedRun) -> Iterator[tuple[str, object, str, str]]:
    """Yield (key, value, package, what to do instead of installing it)."""
    trainer = run.cfg.trainer
    for tracker in trackers(run.cfg):
        yield "trainer.logger", tracker, tracker, "set trainer.logger=tensorboard"
    store = _STORES.get(trainer.ckpt_path.partition("://")[0]) if "://" in trainer.ckpt_path else None
    if store is not None and run.training:
        yield "trainer.ckpt_path", trainer.ckpt_path, store, "name a folder"
    for role in active_roles(run.cfg) if run.training else ():
        megatron, key = getattr(trainer, role).megatron_config, f"trainer.{role}.megatron_config."
        if megatron.optimizer_config_kwargs.get("use_precision_aware_optimizer") and not is_frozen(role):
            name = f"{key}optimizer_config_kwargs.use_precision_aware_optimizer"
            yield name, True, "transformer_engine", "leave it out"
