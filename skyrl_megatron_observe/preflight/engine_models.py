"""Values of ``config.json`` that the trainer follows, as transformers does, and vLLM 0.32 does not.

vLLM's model files (``vllm/model_executor/models/``) replace some values by constants, and read keys that transformers
does not write. A run that samples would train one model and sample another until the first probe compares them, so
other values than vLLM's are refused. ``tests/observe/test_engine_models.py`` compares the table with the keys that
the family reads and those that vLLM's file reads, so that a new one needs a look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bridges.hf_config import window_fields

_HIDES = "vLLM 0.32 computes with {} whatever the key says, so the trainer and the engines would be two models"
_USE = "use a folder with that value"

FIXED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"rope_interleave": True, "tie_word_embeddings": False},
    "ernie4_5_moe": {"routed_scaling_factor": 1.0},
    "glm4_moe": {"tie_word_embeddings": False},
    "glm4_moe_lite": {"rope_interleave": True, "tie_word_embeddings": False},
    "gpt_oss": {"swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "minimax_m2": {"routed_scaling_factor": 1.0, "tie_word_embeddings": False},
    "olmoe": {"norm_topk_prob": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3_next": {"tie_word_embeddings": False},
}
"""Family → key → the value that vLLM computes with. A key that the configuration lacks has it."""

ANY = object()
REQUIRED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"first_k_dense_replace": ANY},
    "hy_v3": {"expert_hidden_dim": ANY, "first_k_dense_replace": ANY, "route_norm": True, "qk_norm": True},
    "mimo_v2_flash": dict.fromkeys(
        (
            *("hybrid_layer_pattern", "layernorm_epsilon", "moe_layer_freq", "partial_rotary_factor", "rope_theta"),
            *("sliding_window_size", "add_swa_attention_sink_bias", "swa_head_dim", "swa_num_attention_heads"),
            *("swa_num_key_value_heads", "swa_rope_theta", "swa_v_head_dim"),
        ),
        ANY,
    ),
    "minimax_m2": {"rotary_dim": ANY, "scoring_func": "sigmoid", "use_routing_bias": True},
}
"""Family → keys that vLLM reads from ``config.json`` and transformers does not write → the value that means what
transformers computes."""

_ONE_WINDOW = frozenset(
    {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "ernie4_5_moe", "hy_v3", "olmoe"}
)
"""Families whose layers all get ``sliding_window`` in vLLM."""
_HEADS_OF_HIDDEN = frozenset({"qwen2", "qwen2_moe", "olmoe"})
"""Families whose head size vLLM takes from ``hidden_size``."""


def overrides_of_engines(family: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``hf_overrides`` that are for engines alone: that they hold plain weights, and keys that only
    vLLM reads, whose values :func:`engine_model_faults` compares."""
    own = {name: value for name, value in overrides.items() if name in REQUIRED.get(family, ())}
    return own | {name: None for name in ("quantization_config",) if overrides.get(name, ...) is None}


def engine_model_faults(family: str, config: Any, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield what vLLM would compute otherwise, or cannot read, with the fix.

    ``config``: the configuration as transformers reads it. ``written``: the keys of ``config.json`` that engines get.
    """
    values = config.to_dict()
    for key, fixed in FIXED.get(family, {}).items():
        value = values.get(key, fixed)
        if value is not None and value != fixed:
            yield f"config.json has {key}={value!r}: {_HIDES.format(f'{key}={fixed!r}')}; {_USE}"
    for check in (_layers, _windows, _heads):
        yield from check(family, config, written)
    meant = {
        key: _written_as(key, config) if value is ANY else value for key, value in REQUIRED.get(family, {}).items()
    }
    if missing := [key for key in meant if key not in written]:
        pairs = ", ".join(f"{key!r}: {meant[key]!r}" for key in missing if meant[key] is not None)
        fix = f"add {pairs} to it" if pairs else ""
        if unknown := [key for key in missing if meant[key] is None]:
            fix += f"{' and ' if fix else ''}take {', '.join(unknown)} from the released folder"
        yield f"config.json lacks {', '.join(missing)}, which vLLM reads and transformers does not write: {fix}"
    for key, needed in meant.items():
        if key in written and needed is not None and written[key] != needed:
            yield f"config.json has {key}={written[key]!r}, but the trainer computes {key}={needed!r}: {_USE}"


def _layers(family: str, config: Any, written: Mapping[str, Any]) -> Iterator[str]:
    """Experts by layer, and gpt-oss's windows by layer."""
    if family == "gpt_oss":
        alternating = ["sliding_attention" if not layer % 2 else "full_attention" for layer in range(_count(config))]
        if list(config.layer_types) != alternating:
            yield f"config.json has other layer_types than every second layer: {_HIDES.format('those')}; {_USE}"
    kinds = getattr(config, "mlp_layer_types", None)
    dense = written.get("first_k_dense_replace", getattr(config, "first_k_dense_replace", None))
    if kinds is not None and isinstance(dense, int) and family != "mimo_v2_flash":
        if list(kinds) != ["dense"] * dense + ["sparse"] * (_count(config) - dense):
            yield (
                f"mlp_layer_types of config.json has other dense layers than first_k_dense_replace={dense}, which is "
                "what vLLM reads: make them agree"
            )


def _windows(family: str, config: Any, written: Mapping[str, Any]) -> Iterator[str]:
    window = getattr(config, "sliding_window", None)
    if family not in _ONE_WINDOW or not window:
        return
    fields = window_fields(config)
    if "window_size" not in fields or "window_attn_skip_freq" in fields:
        yield (
            f"config.json has layers without a window and sliding_window={window}: "
            f"{_HIDES.format('a window in every layer')}; use a folder whose layers are alike"
        )


def _heads(family: str, config: Any, written: Mapping[str, Any]) -> Iterator[str]:
    size = getattr(config, "head_dim", None)
    usual = config.hidden_size // config.num_attention_heads if family in _HEADS_OF_HIDDEN else size
    if size is not None and size != usual:
        yield f"config.json has head_dim={size}: {_HIDES.format(f'head_dim={usual}')}; {_USE}"
    if family == "glm4_moe" and not written.get("head_dim"):
        yield f"config.json lacks head_dim, which vLLM reads: add 'head_dim': {_head_size(config)} to it"


def _count(config: Any) -> int:
    return int(config.num_hidden_layers)


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _dense_layers(config: Any) -> int | None:
    kinds: Sequence[str] | None = getattr(config, "mlp_layer_types", None)
    return None if kinds is None else sum(kind == "dense" for kind in kinds)


_MEANING: dict[str, Callable[[Any], Any]] = {
    "add_swa_attention_sink_bias": lambda config: True,
    "expert_hidden_dim": lambda config: config.moe_intermediate_size,
    "first_k_dense_replace": _dense_layers,
    "hybrid_layer_pattern": lambda config: [int(kind == "sliding_attention") for kind in config.layer_types],
    "layernorm_epsilon": lambda config: config.rms_norm_eps,
    "moe_layer_freq": lambda config: [int(kind == "sparse") for kind in config.mlp_layer_types],
    "partial_rotary_factor": lambda config: config.rope_parameters["full_attention"].get(
        "partial_rotary_factor", 0.334
    ),
    "rope_theta": lambda config: config.rope_parameters["full_attention"]["rope_theta"],
    "rotary_dim": lambda config: round(
        _head_size(config) * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    ),
    "sliding_window_size": lambda config: getattr(config, "sliding_window_size", None),
    "swa_head_dim": _head_size,
    "swa_num_attention_heads": lambda config: config.num_attention_heads,
    "swa_num_key_value_heads": lambda config: 2 * config.num_key_value_heads,  # fixed in transformers
    "swa_rope_theta": lambda config: config.rope_parameters["sliding_attention"]["rope_theta"],
    "swa_v_head_dim": lambda config: config.v_head_dim,
}


def _written_as(key: str, config: Any) -> Any:
    """Return the value of a key that transformers writes under another name; None if there is no single one."""
    return _MEANING[key](config) if key in _MEANING else None
