"""Values of engine arguments and sampling parameters that vLLM refuses, by its own types, without an engine.

Importing vLLM takes seconds, so this module is imported only for settings that are passed on to it. It needs no GPU
and no weights, and reads no model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, get_args

import vllm.config
from pydantic import TypeAdapter, ValidationError
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from skyrl_megatron.config.fields import declared
from skyrl_megatron.config.rules.passthrough_keys import ENGINE

_CONFIGS = {"attention_backend": ("AttentionConfig", "backend"), "block_size": ("CacheConfig", "block_size")}
_CONFIGS |= {"max_num_scheduled_tokens": ("SchedulerConfig", "max_num_scheduled_tokens")}
"""Arguments that do not name the field that they set → class and field."""
_NAMES = {
    "load_format": ("vllm.model_executor.model_loader", "LoadFormats"),
    "quantization": ("vllm.model_executor.layers.quantization", "QuantizationMethods"),
}
"""Arguments of any text in vLLM's types → where their names are."""
_BY_VALUE = ("ModelConfig", "VllmConfig", "ParallelConfig", "SpeculativeConfig")
"""Classes that look at models, devices or the network when they are made: their fields are validated one by one."""


def engine_faults(options: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, value, what is wrong) for each engine argument that vLLM would refuse."""
    arguments = declared(ENGINE.module, ENGINE.type_name) or {}
    for name, value in options.items():
        owner = arguments[name].owner
        cls, field = _CONFIGS.get(name) or (owner[1:] if owner else ("", ""))
        if name == "speculative_config" and isinstance(value, Mapping):
            for inner, inner_value in value.items():
                key, part = f"{name}.{inner}", inner.replace("-", "_")
                if part == "attention_backend" and inner_value != "auto":  # by its name, as in AttentionConfig
                    yield from _made(
                        partial(vllm.config.AttentionConfig, backend=inner_value), key, inner_value, "backend"
                    )
                elif part != "attention_backend":
                    yield from _field_faults("SpeculativeConfig", part, key, inner_value)
        elif name in _NAMES:
            module, kind = _NAMES[name]
            names = get_args(getattr(importlib.import_module(module), kind))
            if value is not None and str(value).lower() not in names:
                yield name, value, f"must be one of {', '.join(sorted(names))}"
        elif cls in _BY_VALUE:
            yield from _field_faults(cls, field, name, value)
        elif cls:
            yield from _made(partial(getattr(vllm.config, cls), **{field: value}), name, value, field)


def sampling_faults(sampling: Mapping[str, Any], names: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, what is wrong) if vLLM would refuse a request with these typed parameters because of one of
    ``names``, which are keys with their values."""
    error = _refusal(sampling)
    if error is None or _refusal({key: value for key, value in sampling.items() if key not in names}) is not None:
        return
    without = {name: {key: value for key, value in sampling.items() if key != name} for name in names}
    alone = [name for name in names if _refusal(without[name]) is None]
    named = [name for name in names if name in str(error)]
    reason = next(iter([*alone, *named, *names]))
    yield reason, names[reason], str(error)


def _refusal(sampling: Mapping[str, Any]) -> Exception | None:
    nested = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
    try:
        keys = {name: nested[name](**each) if name in nested and each else each for name, each in sampling.items()}
        SamplingParams(**keys)
    except Exception as error:  # vLLM has its own kinds
        return error
    return None


def _field_faults(cls: str, field: str, key: str, value: Any) -> Iterator[tuple[str, Any, str]]:
    fields = getattr(vllm.config, cls).__pydantic_fields__
    if field not in fields:
        yield key, value, f"vLLM's {cls} has no such field: it has {', '.join(sorted(fields))}"
        return
    kind: Any = Annotated[fields[field].annotation, fields[field]]
    yield from _made(lambda: TypeAdapter(kind).validate_python(value), key, value)


def _made(make: Callable[[], Any], key: str, value: Any, field: str | None = None) -> Iterator[tuple[str, Any, str]]:
    """Yield the faults of ``key`` when ``make`` is called, in a class of whose fields it is ``field``."""
    try:
        make()
    except ValidationError as error:
        for fault in error.errors():
            inside = [str(part) for part in fault["loc"]]
            if field is not None and inside[:1] != [field]:
                continue  # a field that is missing here, or a rule of several fields
            where = inside if field is None and isinstance(value, Mapping) else []
            inner = value
            for part in where:
                inner = inner.get(part) if isinstance(inner, Mapping) else inner
            yield ".".join([key, *where]), inner, fault["msg"].removeprefix("Value error, ")
    except Exception as error:  # its validators raise anything
        if field is None:
            yield key, value, f"vLLM refuses it: {type(error).__name__}: {error}"
        # else a rule of several fields, which the engine checks when all are known
