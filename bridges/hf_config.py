"""Read HF configs with transformers and translate settings that several families share to Megatron's.

A setting that Megatron does not support is rejected with its key. Sources: ``transformers/modeling_rope_utils.py``,
``megatron/core/models/gpt/gpt_model.py``, ``megatron/core/transformer/transformer_config.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bridges.errors import BridgeError
from bridges.files import check_fields
from bridges.rows import ATTENTION, DELTA_NET, WINDOW, ModelShape

MOST_LAYERS, MOST_EXPERTS = 10_000, 250_000
"""Limits on layers, and on experts over all layers: ten times those of the largest models. A damaged number would
fill the memory with names."""


def read_config(hf_config: Mapping[str, Any], model_type: str) -> PreTrainedConfig:
    """Return ``config.json`` (a dict) as the config object of ``model_type``, with defaults.

    ``auto_map`` (remote code) is dropped, because models are built from Megatron and never from downloaded code.
    Raises :class:`BridgeError` for a bad value.
    """
    values = {k: v for k, v in hf_config.items() if k not in {"auto_map", "model_type", "quantization_config"}}
    layers, experts = (_largest(values, word) for word in ("layers", "experts"))
    if layers > MOST_LAYERS or layers * experts > MOST_EXPERTS:
        raise BridgeError(
            f"config.json of a {model_type} model: {layers} layers of {experts} experts is implausibly large; fetch "
            "the file again"
        )
    check_fields(hf_config, f"config.json of a {model_type} model")
    try:
        with _undocumented():
            kind = CONFIG_MAPPING[model_type]
        config: PreTrainedConfig = kind.from_dict(values)
    except Exception as error:  # transformers raises many types of errors for a bad value
        raise BridgeError(f"config.json of a {model_type} model: {error}; fetch the file again") from error
    return config


@contextmanager
def _undocumented() -> Iterator[None]:
    """Let transformers load a config class without the generated text of its ``__doc__``, for which it would load all
    of its code for models: a third of a check's time."""
    module: Any = sys.modules.get("transformers.utils.auto_docstring")
    usual = getattr(module, "auto_class_docstring", None)
    if usual is not None:
        module.auto_class_docstring = lambda cls, **_: cls
    try:
        yield
    finally:
        if usual is not None:
            module.auto_class_docstring = usual


@contextmanager
def reading(model_type: str) -> Iterator[None]:
    """Convert errors of a family's config functions to :class:`BridgeError`: the config's values are inconsistent."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BridgeError(
            f"config.json of a {model_type} model: its values are inconsistent "
            f"({type(error).__name__}: {error!s:.120}); fetch the file again"
        ) from error


def _largest(values: Mapping[str, Any], word: str) -> int:
    """Return the largest count whose key ends with ``word``, at least 1."""
    return max([1, *(v for k, v in values.items() if k.endswith(word) and isinstance(v, int))])


def refuse(model_type: str, key: str, value: object, reason: str) -> BridgeError:
    """Return the error for an option that cannot be converted exactly."""
    return BridgeError(f"{model_type}: {key}={value!r} in config.json is not supported: {reason}")


def require(config: PreTrainedConfig, key: str, allowed: tuple[object, ...], reason: str) -> None:
    """Raise :class:`BridgeError` unless ``config.key`` is one of ``allowed``; absent keys pass."""
    value = getattr(config, key, allowed[0])
    if value not in allowed:
        raise refuse(config.model_type, key, value, reason)


def check_ranges(config: PreTrainedConfig, fields: Mapping[str, Any]) -> None:
    """Raise :class:`BridgeError` for a number with which no model computes. ``fields``: of ``TransformerConfig``."""
    kind, values = config.model_type, config.to_dict()
    experts, chosen = fields.get("num_moe_experts"), fields.get("moe_router_topk", 1)
    if experts is not None and not 1 <= chosen <= experts:
        key = "moe_k" if "moe_k" in values else "num_experts_per_tok"
        raise refuse(kind, key, chosen, f"use 1 to {experts}, the number of experts of a layer")
    groups, best = fields.get("moe_router_num_groups"), fields.get("moe_router_group_topk", 1)
    if experts and groups:
        if experts % groups:
            raise refuse(kind, "n_group", groups, f"it does not divide {experts} experts")
        if not 1 <= best <= groups or best * experts // groups < chosen:
            raise refuse(kind, "topk_group", best, f"use 1 to {groups} groups that hold {chosen} experts")
    if (fields.get("window_size") or (0, 0))[0] < 0:
        raise refuse(kind, "sliding_window", values.get("sliding_window"), "use at least 1")
    rope = values.get("rope_parameters") or {}
    for section in [rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))]:
        for name in ("rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings"):
            if isinstance(number := section.get(name), int | float) and number <= 0:
                raise refuse(kind, f"rope_parameters.{name}", number, "use a number above 0")
    if (epsilon := fields.get("layernorm_epsilon", 0)) < 0:
        raise refuse(kind, "rms_norm_eps", epsilon, "use a number of at least 0")


def head_dim(config: PreTrainedConfig) -> int:
    """Return the head dimension."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def attention_dims(config: PreTrainedConfig) -> dict[str, int]:
    """Return ``V H A G D Q K`` of the legend in :mod:`bridges.rows`. Raises if KV groups do not divide the heads."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = head_dim(config)
    if heads % groups:
        raise refuse(config.model_type, "num_key_value_heads", groups, f"it does not divide {heads} attention heads")
    return {
        "V": config.vocab_size,
        "H": config.hidden_size,
        "A": heads,
        "G": groups,
        "D": size,
        "Q": heads * size,
        "K": groups * size,
    }


def dense_shape(config: PreTrainedConfig, *flags: str) -> ModelShape:
    """Return the shape of a model without experts."""
    dims = attention_dims(config) | {"F": config.intermediate_size}
    return ModelShape(dims, (False,) * config.num_hidden_layers, frozenset(flags) | tie_flag(config))


def moe_shape(
    config: PreTrainedConfig,
    *flags: str,
    experts: int,
    size: int,
    moe: tuple[bool, ...],
    mixers: tuple[str, ...] = (),
    **dims: int,
) -> ModelShape:
    """Return the shape of a model with ``experts`` experts of feed-forward size ``size`` in the layers of ``moe``."""
    dense = {"F": config.intermediate_size} if hasattr(config, "intermediate_size") else {}
    sizes = attention_dims(config) | dense | {"E": experts, "M": size} | dims
    return ModelShape(sizes, moe, frozenset(flags) | tie_flag(config), mixers=mixers)


_LAYER_TYPES = {"linear_attention": DELTA_NET, "sliding_attention": WINDOW, "full_attention": ATTENTION}


def mixers(config: PreTrainedConfig, *others: str) -> tuple[str, ...]:
    """Return the token mixer of each layer (``layer_types``): full attention or one of ``others``."""
    known = {kind: mixer for kind, mixer in _LAYER_TYPES.items() if mixer in (ATTENTION, *others)}
    for kind in config.layer_types:
        if kind not in known:
            raise refuse(config.model_type, "layer_types", kind, f"use {' and '.join(known)}")
    return tuple(known[kind] for kind in config.layer_types)


def delta_net_dims(config: PreTrainedConfig) -> dict[str, int]:
    """Return the sizes of gated delta nets: the lower-case letters of the legend in :mod:`bridges.rows`."""
    heads, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % heads:
        raise refuse(config.model_type, "linear_num_value_heads", values, f"use a multiple of the {heads} key heads")
    key, value, ratio = config.linear_key_head_dim, config.linear_value_head_dim, values // heads
    rows = ratio * value
    return {
        "n": heads,
        "m": values,
        "k": key,
        "v": value,
        "r": ratio,
        "w": rows,
        "o": heads * rows,
        "c": heads * (2 * key + rows),
        "t": config.linear_conv_kernel_dim,
        "x": 2 * key + 2 * rows,
    }


def delta_net_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return fields of ``TransformerConfig`` for gated delta nets and zero-centred norm weights."""
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(mixer == DELTA_NET) for mixer in mixers(config, DELTA_NET)],
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "layernorm_zero_centered_gamma": True,
    }


def sparse_steps(config: PreTrainedConfig) -> tuple[bool, ...]:
    """Return which layers of a Qwen MoE have experts (``decoder_sparse_step``, ``mlp_only_layers``)."""
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_hidden_layers))


def every_layer(config: PreTrainedConfig) -> tuple[bool, ...]:
    """Return that all layers have experts."""
    layers: int = config.num_hidden_layers
    return (True,) * layers


def dense_first(config: PreTrainedConfig) -> tuple[bool, ...]:
    """Return which layers have experts: those of ``mlp_layer_types``, else all from ``first_k_dense_replace``."""
    if (kinds := getattr(config, "mlp_layer_types", None)) is not None:
        moe = tuple(kind == "sparse" for kind in kinds)
        require(config, "moe_layer_freq", (1, [int(flag) for flag in moe]), f"mlp_layer_types are {kinds}")
        return moe
    require(config, "moe_layer_freq", (1,), "all layers after the dense ones must have experts")
    return tuple(layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers))


def mla_shape(config: PreTrainedConfig) -> ModelShape:
    """Return the shape of a DeepSeek model. Flags: compressed queries, and the order of rotary rows."""
    heads, value = config.num_attention_heads, config.v_head_dim
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    require(config, "num_key_value_heads", (heads,), "multi-latent attention has equally many query and KV heads")
    order = "pairs" if getattr(config, "rope_interleave", True) else "halves"
    compressed = config.q_lora_rank is not None
    size = config.moe_intermediate_size
    dims = {
        "V": config.vocab_size,
        "H": config.hidden_size,
        "A": heads,
        "F": config.intermediate_size,
        "E": config.n_routed_experts,
        "M": size,
        "S": config.n_shared_experts * size,
        "R": config.q_lora_rank or 0,
        "C": config.kv_lora_rank,
        "P": rope,
        "B": config.kv_lora_rank + rope,
        "U": heads * (nope + rope),
        "W": heads * (nope + value),
        "O": heads * value,
    }
    flags = {order, f"q_lora_{order}", "q_lora"} if compressed else {order, f"q_{order}"}
    return ModelShape(dims, dense_first(config), frozenset(flags) | tie_flag(config), mla=True)


def tie_flag(config: PreTrainedConfig) -> frozenset[str]:
    """Return the flag ``untied`` if the output layer does not share the embedding's weight."""
    return frozenset() if config.tie_word_embeddings else frozenset({"untied"})


def base_transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return fields of ``TransformerConfig`` that every family sets."""
    require(config, "hidden_act", ("silu",), "gated layers support only silu")
    require(config, "attention_dropout", (0, 0.0), "the trainer runs without dropout")
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "rotary_interleaved": False,
    }


def attention_fields(config: PreTrainedConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> dict[str, Any]:
    """Return fields of grouped-query attention, including the sliding window."""
    dims = attention_dims(config)
    return {
        "num_query_groups": dims["G"],
        "kv_channels": dims["D"],
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        **window_fields(config),
    }


def window_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return ``window_size``: HF's window of W tokens includes the query itself, Megatron's does not.

    If some layers have no window, ``window_attn_skip_freq`` has a flag per layer (1 = window).
    """
    window = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return {}
    kinds = getattr(config, "layer_types", None)
    windowed = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * config.num_hidden_layers
    if not any(windowed):
        return {}
    fields: dict[str, Any] = {"window_size": (window - 1, 0)}
    if not all(windowed):
        fields["window_attn_skip_freq"] = [int(flag) for flag in windowed]
    return fields


def model_arguments(config: PreTrainedConfig, **rotary: Any) -> dict[str, Any]:
    """Return keyword arguments of ``GPTModel``."""
    return {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
        **rotary,
    }


def expert_fields(config: PreTrainedConfig, *, experts: int, size: int, moe: tuple[bool, ...]) -> dict[str, Any]:
    """Return fields of a model with experts; ``moe_layer_freq`` is a list if layers differ (1 = experts)."""
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_layer_freq": 1 if all(moe) else [int(flag) for flag in moe],
    }


def sigmoid_routing(config: PreTrainedConfig, scaling: str = "routed_scaling_factor") -> dict[str, Any]:
    """Return fields of DeepSeek's routing: sigmoid scores, correction bias, experts selected in the best groups.

    ``scaling``: config key of the scaling factor of routing weights, which is 1 if absent.
    """
    kind = config.model_type
    require(config, "norm_topk_prob", (True,), "Megatron always normalises sigmoid scores")
    require(config, "scoring_func", ("sigmoid", "noaux_tc"), "use a model with sigmoid routing")
    require(config, "topk_method", ("noaux_tc",), "use a model with correction-bias routing")
    if config.num_experts_per_tok == 1:
        raise refuse(kind, "num_experts_per_tok", 1, "Megatron does not normalise a single score")
    fields: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # The default updates the bias after every step; here it is a released weight that stays constant.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": getattr(config, scaling, 1.0),
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": False,
    }
    if (getattr(config, "n_group", None) or 1) > 1:
        chosen, groups = config.num_experts_per_tok, config.topk_group
        if chosen // max(groups, 1) != 2:
            ratio = f"num_experts_per_tok/topk_group={chosen}/{groups}"
            raise refuse(
                kind, "topk_group", groups, f"Megatron ranks groups by their best {ratio} experts, HF by their best 2"
            )
        fields |= {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return fields
