"""A model family: its table of rows and the functions that translate its HF config, rotary embeddings included.

Sources: ``transformers/modeling_rope_utils.py``, ``megatron/core/models/common/embeddings``,
``megatron/core/transformer/multi_latent_attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from bridges.files import text_config
from bridges.hf_config import (
    attention_fields,
    base_transformer,
    check_ranges,
    model_arguments,
    read_config,
    reading,
    refuse,
)
from bridges.rows import EMBEDDING, HEAD, ModelShape, Row

# Megatron hard-codes these values of Meta's Llama 3 scaling; only the factor is an argument.
LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """Return ``rope_parameters`` of transformers 5, which also converts older config keys to it."""
    return dict(config.rope_parameters or {})


def rotary_arguments(config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (keyword arguments of ``GPTModel``, attributes of the config object) for rotary embedding outside MLA."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }
    if kind == "default":
        return arguments, {}
    if kind == "linear":
        return arguments | {"seq_len_interpolation_factor": rope["factor"]}, {}
    if kind == "llama3":
        for key, fixed in LLAMA3_FIXED.items():
            if rope.get(key, fixed) != fixed:
                raise refuse(config.model_type, f"rope_parameters.{key}", rope[key], f"Megatron fixes it to {fixed}")
        return arguments | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}, {}
    if kind == "yarn":
        return arguments | {"position_embedding_type": "yarn"}, yarn_attributes(config, rope)
    raise refuse(config.model_type, "rope_parameters.rope_type", kind, "use default, linear, llama3 or yarn")


def yarn_attributes(config: PreTrainedConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the config attributes that ``GPTModel`` reads for ``position_embedding_type="yarn"``."""
    if rope.get("attention_factor") is not None:
        value = rope["attention_factor"]
        raise refuse(config.model_type, "rope_parameters.attention_factor", value, "Megatron derives it from factor")
    both = bool(rope.get("mscale") and rope.get("mscale_all_dim"))
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": rope.get("beta_fast") or 32,
        "yarn_beta_slow": rope.get("beta_slow") or 1,
        "yarn_mscale": rope["mscale"] if both else None,
        "yarn_mscale_all_dim": rope["mscale_all_dim"] if both else None,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def mla_rotary(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the rotary fields of ``MLATransformerConfig``, whose default is YaRN with factor 40."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    base = {"rotary_base": rope["rope_theta"]}
    if kind == "default":
        # The softmax scale reads these two even without YaRN.
        return base | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if kind != "yarn":
        raise refuse(
            config.model_type, "rope_parameters.rope_type", kind, "multi-latent attention supports default or yarn"
        )
    for key, fixed in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, fixed) != fixed:
            raise refuse(config.model_type, f"rope_parameters.{key}", rope[key], f"Megatron's MLA fixes it to {fixed}")
    scale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if all_dim and not scale:
        raise refuse(config.model_type, "rope_parameters.mscale_all_dim", all_dim, "it needs mscale as well")
    return base | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": scale if all_dim else 1.0,
        "mscale_all_dim": all_dim or 0.0,
    }


@dataclass(frozen=True, slots=True)
class VaryingHeads:
    """Attention whose heads differ between layers with and without a sliding window.

    ``value_size``: size of a value head, in all layers. ``value_scale``: factor of the values. ``window_groups``,
    ``window_rotary_base``: KV groups and rotary base of layers with a window, which also have sinks.
    ``rotary_percent``: rotary share of a head, in all layers.
    """

    value_size: int
    value_scale: float
    window_groups: int
    window_rotary_base: float
    rotary_percent: float


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """Sizes of the indexer that selects the ``top_k`` keys of a query (DeepSeek-V3.2).

    It has ``heads`` heads of ``size``. Rotary pairs are adjacent entries if ``interleaved``, else halves.
    """

    heads: int
    size: int
    top_k: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class MegatronModelConfig:
    """Megatron's settings for a HF config.

    ``transformer``: fields of ``TransformerConfig`` (of ``MLATransformerConfig`` if ``multi_latent_attention``).
    ``model``: keyword arguments of ``GPTModel``. ``attributes``: attributes to set on the config object before the
    model is built: YaRN settings that ``GPTModel`` reads and ``TransformerConfig`` does not declare, and our own
    ``heads_by_layer`` (:class:`VaryingHeads`) and ``indexer`` (:class:`IndexerSizes`). ``activation``: ``silu`` or
    ``quick_gelu``. ``full_width_qk_norm``: q and k are normalised over all heads together. ``mla_norm_epsilon``:
    epsilon of the two norms inside MLA, which HF hard-codes. ``softmax_log_odds``: the router's scores are softmax
    probabilities, computed by Megatron's sigmoid routing from their log-odds.
    """

    transformer: dict[str, Any]
    model: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    activation: str = "silu"
    multi_latent_attention: bool = False
    full_width_qk_norm: bool = False
    mla_norm_epsilon: float | None = None
    softmax_log_odds: bool = False


def grouped_query_model(
    config: PreTrainedConfig,
    fields: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    **options: Any,
) -> MegatronModelConfig:
    """Return the settings of a model with grouped-query attention and rotary embedding.

    ``fields``: further fields of ``TransformerConfig``, which override those of attention. ``options``: fields of
    :class:`MegatronModelConfig`. Raises :class:`BridgeError` for an option that Megatron does not support.
    """
    rotary, attributes = rotary_arguments(config)
    attention = attention_fields(config, qkv_bias=qkv_bias, qk_norm=qk_norm)
    transformer = {**base_transformer(config), **attention, **fields}
    return MegatronModelConfig(transformer, model_arguments(config, **rotary), attributes, **options)


@dataclass(frozen=True, slots=True)
class Family:
    """One HF ``model_type`` with its table of rows.

    Rows: ``layer`` (every layer), ``dense`` and ``moe`` (layers without and with experts), ``embedding`` and ``head``
    (before and after the layers). ``attention``, ``window``, ``delta_net``: layers with full attention, a sliding
    window, or a gated delta net, if their tensors differ (:attr:`ModelShape.mixers`). ``draft``: additional rows of a
    trainable multi-token-prediction layer, which otherwise has those of a layer with experts; empty if it cannot be
    trained.

    ``aliases``: other ``model_type`` values with the same tensors. ``ignored``: suffixes of HF tensors that hold no
    weights. ``carried``: prefixes of HF tensors that are copied unchanged (multi-token prediction), in addition to the
    layers counted by ``num_nextn_predict_layers`` or ``num_mtp_modules``. ``within``: ``model_type`` of models of text
    and images whose language model this is; its folders are read, and exports keep their other tensors.
    """

    model_type: str
    architecture: str
    read_shape: Callable[[PreTrainedConfig], ModelShape]
    read_megatron: Callable[[PreTrainedConfig], MegatronModelConfig]
    layer: tuple[Row, ...]
    dense: tuple[Row, ...] = ()
    moe: tuple[Row, ...] = ()
    attention: tuple[Row, ...] = ()
    window: tuple[Row, ...] = ()
    delta_net: tuple[Row, ...] = ()
    embedding: tuple[Row, ...] = EMBEDDING
    head: tuple[Row, ...] = HEAD
    aliases: tuple[str, ...] = ()
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    carried: tuple[str, ...] = ()
    draft: tuple[Row, ...] = ()
    within: tuple[str, ...] = ()

    def config(self, hf_config: Mapping[str, Any]) -> PreTrainedConfig:
        """Return the language model's ``config.json`` as transformers reads it, with defaults.

        Raises :class:`BridgeError`.
        """
        return read_config(self.own_config(hf_config), self.model_type)

    def own_config(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``config.json`` of the family: the whole, or of a model that it is :attr:`within` a part."""
        return text_config(hf_config) if hf_config.get("model_type") in self.within else dict(hf_config)

    def shape(self, hf_config: Mapping[str, Any]) -> ModelShape:
        """Return the sizes and flags for the expansion of the rows. Raises :class:`BridgeError`."""
        config = self.config(hf_config)
        with reading(self.model_type):
            return self.read_shape(config)

    def megatron_config(self, hf_config: Mapping[str, Any]) -> MegatronModelConfig:
        """Return Megatron's settings for the equivalent model.

        Raises :class:`BridgeError` with the key of an option that Megatron does not support.
        """
        config = self.config(hf_config)
        with reading(self.model_type):
            found = self.read_megatron(config)
            check_ranges(config, found.transformer)
            return found

    def layer_rows(self, moe: bool, mixer: str = "") -> tuple[Row, ...]:
        """Return the rows of a layer with or without experts; ``mixer``: the field with the mixer's rows."""
        more: tuple[Row, ...] = getattr(self, mixer) if mixer else ()
        return self.layer + more + (self.moe if moe else self.dense)
