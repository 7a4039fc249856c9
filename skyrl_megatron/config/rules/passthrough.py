"""Rules of the dictionaries that are handed to Megatron and vLLM: which keys, which values, which distribution.

:mod:`.passthrough_keys` has the tables. Names that the other package does not have are reported by
``skyrl_megatron_observe/preflight/option_checks.py``, with the nearest one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.fields import Bounds, Declared, OneOf, declared, get_path
from skyrl_megatron.config.roles import is_frozen
from skyrl_megatron.config.rules.passthrough_keys import (
    ENGINE,
    MASKS,
    MODEL,
    OPTIMIZER,
    SAMPLING,
    TRANSFORMER,
    WEIGHTS,
    KeyTable,
)
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.generator import SamplingParams
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig

_ENGINE = "generator.inference_engine.engine_init_kwargs."


def megatron_key_problems(cfg: SkyRLTrainConfig, role: str) -> Iterator[Problem]:
    """Yield the problems of ``transformer_config_kwargs`` and ``optimizer_config_kwargs`` of a role."""
    section = f"trainer.{role}"
    megatron = getattr(cfg.trainer, role).megatron_config
    base = f"{section}.megatron_config"
    yield from _problems(
        cfg, TRANSFORMER, megatron.transformer_config_kwargs, f"{base}.transformer_config_kwargs.", base
    )
    if not is_frozen(role):
        options = {
            name: value
            for name, value in megatron.optimizer_config_kwargs.items()
            if not (name == "optimizer" and "muon" in str(value)) and not name.endswith("_dtype")  # other rules
        }
        yield from _problems(cfg, OPTIMIZER, options, f"{base}.optimizer_config_kwargs.", section)


def engine_key_problems(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[Problem]:
    """Yield the problems of ``engine_init_kwargs`` and of both ``additional_kwargs``."""
    generator, engine = cfg.generator, cfg.generator.inference_engine
    if engine.backend != "vllm":
        return  # a plugin's own options
    if engine.run_engines_locally:
        yield from _problems(cfg, ENGINE, engine.engine_init_kwargs, _ENGINE, "")
        yield from _drafting(cfg, hardware)
        if engine.max_num_seqs > engine.max_num_batched_tokens:
            fix = f"exceeds max_num_batched_tokens={engine.max_num_batched_tokens}, which vLLM refuses: lower it"
            yield Problem("generator.inference_engine.max_num_seqs", engine.max_num_seqs, fix)
    for name in ("sampling_params", "eval_sampling_params"):
        if (params := getattr(generator, name)) is not None:
            section = f"generator.{name}"
            if params.temperature > 2:
                yield Problem(f"{section}.temperature", params.temperature, "vLLM takes 0 to 2: lower it")
            yield from _problems(
                cfg, SAMPLING, params.additional_kwargs or {}, f"{section}.additional_kwargs.", section
            )


def _problems(
    cfg: SkyRLTrainConfig, table: KeyTable, options: Mapping[str, Any], prefix: str, base: str
) -> Iterator[Problem]:
    """``prefix``: of the options' keys. ``base``: of own keys that begin with a dot."""
    fields = declared(table.module, table.type_name) or {}
    for name, value in options.items():
        field = fields.get(name)
        if name in table.refused:
            if table.refused[name] != MODEL and not _is_as_it_is(table, name, field, value):
                yield Problem(f"{prefix}{name}", value, table.refused[name])
        elif name in table.own_keys:
            key = table.own_keys[name]
            key = f"{base}{key}" if key.startswith(".") else key
            if _other(_own_value(name, get_path(cfg, key)), value):
                yield Problem(f"{prefix}{name}", value, f"has a key of its own: set {key}, and remove this one")
        elif field is not None and not _is_checked_elsewhere(table, name):
            if wanted := field.wanted(value) or _beyond(table.limits.get(name), value):
                yield Problem(f"{prefix}{name}", value, wanted)


def _is_checked_elsewhere(table: KeyTable, name: str) -> bool:
    """Return whether another rule checks the value of a key."""
    return table is SAMPLING or name.startswith("muon_") or name in ("recompute_granularity", "attention_backend")


def _beyond(limits: Bounds | OneOf | None, value: Any) -> str | None:
    """Return what the value, or each in a list, must be; None if it is, or is null."""
    entries = value if isinstance(value, list | tuple) else [value]
    if limits is None or value is None or all(limits.allows(entry) for entry in entries):
        return None
    return f"must be {limits}"


def _is_as_it_is(table: KeyTable, name: str, field: Declared | None, value: Any) -> bool:
    """Return whether a refused key has the value that runs have anyway: by default the other package's, or, where that
    is no literal, one that means "off"."""
    if name in table.as_it_is:
        return any(not _other(harmless, value) for harmless in table.as_it_is[name])
    if field is None or field.default is dataclasses.MISSING:
        return value is None or value is False or value in (0, "", "none", [], {})
    return not _other(field.default, value)


def _own_value(name: str, value: Any) -> Any:
    """Return what the key of this package that sets a field means for the field."""
    match name:
        case "adam_beta1" | "adam_beta2" if len(value) == 2:  # else a problem of that key
            return value[name == "adam_beta2"]
        case "fp16":
            return False
        case "enable_expert_parallel" | "sequence_parallel":
            return value > 1
        case "enable_lora":
            return value > 0
        case "disable_log_stats":
            return not value
    return value


def _other(one: Any, two: Any) -> bool:
    return isinstance(one, bool) is not isinstance(two, bool) or one != two


def _drafting(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[Problem]:
    """Yield what vLLM refuses together with speculative decoding: at the start, or at each request."""
    engine = cfg.generator.inference_engine
    drafting = engine.engine_init_kwargs.get("speculative_config")
    if not drafting or not isinstance(drafting, Mapping):
        return
    key = f"{_ENGINE}speculative_config"
    if hardware.is_cpu and "ngram" in (drafting.get("method"), drafting.get("model")):
        fix = "vLLM's n-gram drafts need numba, which does not support the NumPy of the CPU environment: remove it"
        yield Problem(key, drafting, fix)
    for name in ("sampling_params", "eval_sampling_params"):
        params = getattr(cfg.generator, name)
        if params is None:
            continue
        for setting, value in (("min_p", params.min_p), ("additional_kwargs.logit_bias", _more(params, "logit_bias"))):
            if value:
                fix = f"vLLM does not support it with {key}: remove one of the two keys"
                yield Problem(f"generator.{name}.{setting}", value, fix)


# ------------------------------------------------------------------ the sampling distribution
def _more(params: SamplingParams, name: str) -> Any:
    return (params.additional_kwargs or {}).get(name)


def masks(params: SamplingParams) -> list[str]:
    """Return the settings that exclude tokens from sampling, as ``name=value``. The support holds what they leave."""
    named = (
        ("top_p", params.top_p, params.top_p < 1),
        ("top_k", params.top_k, params.top_k > 0),
        ("min_p", params.min_p, params.min_p > 0),
    )
    further = ((name, _more(params, name)) for name in MASKS)
    return [f"{name}={value}" for name, value, changes in named if changes] + [
        f"additional_kwargs.{name}={value}" for name, value in further if value
    ]


def weights(params: SamplingParams) -> list[str]:
    """Return the settings that change the probabilities of tokens otherwise, as ``name=value``."""
    named = [f"repetition_penalty={params.repetition_penalty}"] if params.repetition_penalty != 1 else []
    return named + [f"additional_kwargs.{name}={value}" for name in WEIGHTS if (value := _more(params, name))]


def distribution_changes(params: SamplingParams) -> list[str]:
    """Return all settings with which tokens are not sampled from softmax(logits / temperature)."""
    return [*masks(params), *weights(params)]
