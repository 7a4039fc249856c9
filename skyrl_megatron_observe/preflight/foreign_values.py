"""Values that only Megatron or vLLM would refuse, when ranks or engines start: their own types are built with them.

Building them takes no GPU and no weights, but importing Megatron takes three seconds and vLLM two, so neither is
imported unless a value needs it: one that is passed on, and that the rules of the configuration could not judge.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.fields import declared
from skyrl_megatron.config.roles import role_layout
from skyrl_megatron.config.rules.megatron_rules import megatron_problems
from skyrl_megatron.config.rules.passthrough_keys import ENGINE, SAMPLING, TRANSFORMER
from skyrl_megatron.config.schema.models import DEFAULT_TRANSFORMER_CONFIG_KWARGS
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.inference.sampling_params import WrongType, engine_sampling, typed_sampling

if TYPE_CHECKING:
    from skyrl_megatron.checks import NotChecked, PlannedRun
    from skyrl_megatron.runtime.model.description import HfModel

_OF_TRANSFORMER_ENGINE = ("apply_rope_fusion", "moe_permute_fusion")
"""Fields of Megatron that it refuses where Transformer Engine is missing, as on a driver without GPUs."""
_JUDGED = ENGINE.read_here - {"load_format", "quantization", "speculative_config"}
"""Engine arguments that the rules of the configuration judge in full."""


def foreign_values(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield each engine argument and sampling parameter that vLLM would refuse."""
    generator, engine = run.cfg.generator, run.cfg.generator.inference_engine
    if engine.backend != "vllm" or importlib.util.find_spec("vllm") is None:
        return
    fields = declared(ENGINE.module, ENGINE.type_name) or {}
    arguments = {
        name: value
        for name, value in engine.engine_init_kwargs.items()
        if name in (ENGINE.passed_on | ENGINE.read_here) - _JUDGED and not fields[name].wanted(value)
        if (name, value) not in (("load_format", "auto"), ("load_format", "dummy")) and value != fields[name].default
    }
    if arguments and engine.run_engines_locally:
        with _same_environment():
            from skyrl_megatron.inference.vllm.values import engine_faults

            faults = [*engine_faults(arguments)]
        for key, value, why in faults:
            yield Problem(f"generator.inference_engine.engine_init_kwargs.{key}", value, f"{why} (vLLM's type)")
    for section in ("sampling_params", "eval_sampling_params"):
        params = getattr(generator, section)
        further = {} if params is None else dict(params.additional_kwargs or {})
        if not further or further.keys() - SAMPLING.passed_on:
            continue  # nothing is passed on, or something that is refused
        try:
            typed = typed_sampling(engine_sampling(params))
        except WrongType:
            continue  # reported by its type
        with _same_environment():
            from skyrl_megatron.inference.vllm.values import sampling_faults

            faults = [*sampling_faults(typed, further)]
        for key, value, why in faults:
            yield Problem(f"generator.{section}.additional_kwargs.{key}", value, f"vLLM refuses it: {why}")


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    """Undo the changes of the block to environment variables, and hide its warnings: vLLM sets some for its own
    processes when it is imported, and the run's would inherit them."""
    before = dict(os.environ)
    try:
        with warnings.catch_warnings(action="ignore"):  # of its own types
            yield
    finally:
        for name, value in os.environ.items():
            if before.get(name) != value:
                del os.environ[name]
        os.environ.update(before)


def transformer_values(run: PlannedRun, role: str, model: HfModel) -> Iterator[Problem]:
    """Yield the field of ``transformer_config_kwargs`` that Megatron refuses for a role's model and layout."""
    kwargs, policy_kwargs = (
        getattr(run.cfg.trainer, section).megatron_config.transformer_config_kwargs for section in (role, "policy")
    )
    if not run.training or (role != "policy" and kwargs == policy_kwargs):
        return
    prefix = f"trainer.{role}.megatron_config."
    key = f"{prefix}transformer_config_kwargs"
    reported = {
        reported_problem.key
        for reported_problem in megatron_problems(run.cfg, role, prefix, run.hardware, model.config)
    }
    judged = {name for name in kwargs if f"{key}.{name}" in reported or name in _OF_TRANSFORMER_ENGINE}
    judged |= kwargs.keys() - TRANSFORMER.names  # reported by their names
    usual = DEFAULT_TRANSFORMER_CONFIG_KWARGS
    chosen = [name for name, value in kwargs.items() if name not in judged and value != usual.get(name, ...)]
    if not chosen:
        return
    with warnings.catch_warnings(action="ignore"):  # of packages that only ranks need
        from skyrl_megatron.runtime.engine_settings import transformer_kwargs

    fields = {name: value for name, value in transformer_kwargs(run.cfg, role).items() if name not in judged}
    if (problem := _refusal(run, role, model, fields, prefix)) is None:
        return
    for name in sorted(chosen, key=lambda name: name not in problem.fix):
        without = {field: value for field, value in fields.items() if field != name}
        if name in fields and _refusal(run, role, model, without, prefix) is None:
            yield Problem(f"{key}.{name}", kwargs[name], problem.fix)
            return
    yield Problem(key, {name: kwargs[name] for name in chosen}, problem.fix)


def _refusal(run: PlannedRun, role: str, model: HfModel, fields: Mapping[str, Any], prefix: str) -> Problem | None:
    """Return the first problem of building Megatron's type as a rank does."""
    import torch

    from skyrl_megatron.runtime.model.build import transformer_config

    dtype = torch.bfloat16 if run.cfg.trainer.bf16 and not run.hardware.is_cpu else torch.float32
    try:
        with warnings.catch_warnings(action="ignore"):  # a rank gives them
            transformer_config(model, role_layout(run.cfg, role), dtype=dtype, overrides=fields, prefix=prefix)
    except ConfigError as error:
        return error.problems[0]
    return None
