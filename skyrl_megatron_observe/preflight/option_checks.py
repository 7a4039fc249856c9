"""Check options that are passed to Megatron, vLLM and transformers, unavailable features, and optional packages."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from inspect import Parameter, signature
from typing import Any

from bridges.errors import BridgeError
from skyrl_megatron.checks import NotChecked, PlannedRun
from skyrl_megatron.config.fields import declared_fields, get_path, source_of
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.config.resolve import trackers
from skyrl_megatron.config.roles import active_roles, is_frozen
from skyrl_megatron.config.rules.passthrough_keys import SAMPLING
from skyrl_megatron.config.validate import require_available
from skyrl_megatron.errors import ConfigError, Problem, install_command, set_up
from skyrl_megatron.inference.sampling_params import RESERVED, WrongType, sampling_keys, sampling_types, typed_field
from skyrl_megatron.plugins import GENERATORS
from skyrl_megatron_parts.muon_settings import PREFIX

_TRANSFORMER = "megatron.core.transformer.transformer_config"
_PARSERS = "_TOOL_PARSERS_TO_REGISTER"
_OPTIMIZER = "megatron.core.optimizer.optimizer_config"


def foreign_options(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield every option that Megatron, transformers or vLLM does not know, with the closest known name."""
    yield from _megatron(run)
    yield from _models(run)
    yield from _engines(run)


def _megatron(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    for role in active_roles(run.cfg) if run.training else ():
        megatron = getattr(run.cfg.trainer, role).megatron_config
        key = f"trainer.{role}.megatron_config."
        latent = bool((_config_json(run, role) or {}).get("kv_lora_rank"))
        config = "MLATransformerConfig" if latent else "TransformerConfig"
        for name, module, owner in (
            ("transformer_config_kwargs", _TRANSFORMER, config),
            ("optimizer_config_kwargs", _OPTIMIZER, "OptimizerConfig"),
        ):
            options = getattr(megatron, name)
            if role == "policy" or options != getattr(run.cfg.trainer.policy.megatron_config, name):
                fields = declared_fields(module, owner)
                options = {field: value for field, value in options.items() if not field.startswith(PREFIX)}
                yield from _unknown(f"{key}{name}", options, fields, f"Megatron's {owner}")


def _models(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Check the names of changes to ``config.json``, which transformers does not check."""
    for role in active_roles(run.cfg):
        for part in ("model_config_kwargs", "megatron_config.model_config_kwargs"):
            changes = get_path(run.cfg, f"trainer.{role}.{part}")
            if not changes or (role != "policy" and changes == get_path(run.cfg, f"trainer.policy.{part}")):
                continue
            if (hf := _config_json(run, role)) is None:
                continue
            from bridges.families import get_family  # loads torch

            try:
                full = get_family(str(hf.get("model_type"))).config(hf).to_dict()
            except BridgeError:
                continue  # an unsupported model, which is reported
            yield from _unknown(
                f"trainer.{role}.{part}", changes, {*hf, *full}, f"the configuration of {hf['model_type']}"
            )


def _engines(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    generator = run.cfg.generator
    if generator.inference_engine.backend != "vllm":
        return  # a plugin's own options
    arguments = generator.inference_engine.engine_init_kwargs
    if arguments:
        key = "generator.inference_engine.engine_init_kwargs"
        fields = declared_fields("vllm.engine.arg_utils", "AsyncEngineArgs")
        yield from _unknown(key, arguments, fields, "vLLM's engine arguments")
    yield from _tool_parser(generator.inference_engine.tool_call_parser)
    for name in ("sampling_params", "eval_sampling_params"):
        sampling = getattr(generator, name)
        further = sampling.additional_kwargs if sampling is not None else None
        if further:
            key = f"generator.{name}.additional_kwargs"
            keys = None if sampling_types() is None else sampling_keys() | RESERVED
            yield from _unknown(key, further, keys, "vLLM's SamplingParams")
            yield from _of_another_type(key, further, SAMPLING.passed_on & (keys or frozenset()))


def _tool_parser(name: str | None) -> Iterator[Problem]:
    """Yield a problem if vLLM has no tool parser of this name."""
    tree = None if name is None else source_of("vllm.tool_parsers")
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and _assigns(node, _PARSERS):
            names = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            if name not in names:
                key = "generator.inference_engine.tool_call_parser"
                yield Problem(key, name, f"unknown parser: use one of {', '.join(sorted(map(str, names)))}")


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _of_another_type(key: str, options: Mapping[str, Any], known: Collection[str]) -> Iterator[Problem]:
    """Yield values of a type that vLLM's ``SamplingParams`` does not accept."""
    for name, value in options.items():
        if name in known:
            try:
                typed_field(name, value)
            except WrongType as error:
                yield Problem(f"{key}.{error.path}", error.value, error.wanted)


def _unknown(
    key: str, options: Mapping[str, Any], fields: Collection[str] | None, owner: str
) -> Iterator[Problem | NotChecked]:
    if fields is None:
        yield NotChecked(key, f"{owner} is not installed here")
        return
    for name, value in options.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            yield Problem(
                f"{key}.{name}",
                value,
                f"no field of {owner}: " + (f"did you mean {near[0]}?" if near else "remove this key"),
            )


def _config_json(run: PlannedRun, role: str) -> dict[str, Any] | None:
    path = getattr(run.cfg.trainer, role).model.path
    try:
        return read_hf_config(run.cfg, role) if path else None
    except ConfigError:
        return None  # reported by the rules


def features(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield every setting that no engine or that the run's generator does not support."""
    try:
        require_available(run.cfg)
    except ConfigError as error:
        yield from error.problems
    if gates := run.cfg.trainer.algorithm.dynamic_sampling.gates:
        from skyrl_megatron.rollout.gates import Gates

        try:
            Gates(gates)
        except ConfigError as error:
            yield from error.problems
    if penalty := run.cfg.trainer.algorithm.length_penalty:
        from skyrl_megatron.algorithms.length_penalty import LengthPenalty

        try:
            LengthPenalty.of(penalty)
        except ConfigError as error:
            yield from error.problems
    several_adapters = len(run.cfg.trainer.policy.model.lora.adapters) > 1
    if several_adapters and (generator := GENERATORS.find(run.cfg.generator.name)) is not None:
        options = signature(generator).parameters
        takes_any = any(option.kind is Parameter.VAR_KEYWORD for option in options.values())
        if "adapters" not in options and not takes_any:
            fix = (
                "this generator class has no parameter `adapters`, so its requests cannot name an adapter: add the "
                "parameter, or train one adapter"
            )
            yield Problem("generator.name", run.cfg.generator.name, fix)


EXTRAS = ("wandb", "mlflow", "swanlab")
"""Trackers that need the package of their name."""
_STORES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}


def packages(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield settings whose package is not installed. Packages of the ranks are not checked if the ranks run
    elsewhere."""
    for key, value, package, otherwise in _needed(run):
        if package == "transformer_engine" and run.hardware.elsewhere:
            yield NotChecked(key, f"whether the machines of the ranks have {package}: run skyrl-megatron doctor there")
        elif importlib.util.find_spec(package) is None:
            yield Problem(key, value, f"needs the package {package}: {install_command(package)}, or {otherwise}")
    engine = run.cfg.generator.inference_engine
    if engine.run_engines_locally and engine.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        yield Problem("generator.inference_engine.backend", "vllm", f"vLLM is not installed: run {set_up()}")


def _needed(run: PlannedRun) -> Iterator[tuple[str, object, str, str]]:
    """Yield (key, value, required package, alternative to installing it)."""
    trainer = run.cfg.trainer
    for tracker in trackers(run.cfg):
        if tracker not in EXTRAS:  # a plugin's
            continue
        yield "trainer.logger", tracker, tracker, "set trainer.logger=tensorboard"
    store = _STORES.get(trainer.ckpt_path.partition("://")[0]) if "://" in trainer.ckpt_path else None
    if store is not None and run.training:
        yield "trainer.ckpt_path", trainer.ckpt_path, store, "set it to a folder"
    for role in active_roles(run.cfg) if run.training else ():
        megatron, key = getattr(trainer, role).megatron_config, f"trainer.{role}.megatron_config."
        if megatron.optimizer_config_kwargs.get("use_precision_aware_optimizer") and not is_frozen(role):
            name = f"{key}optimizer_config_kwargs.use_precision_aware_optimizer"
            yield name, True, "transformer_engine", "remove this key"
