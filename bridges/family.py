"""A model family: rows of data, two readings of the HF config, and rotary embeddings in Megatron's words.

Sources: ``transformers/modeling_rope_utils.py``, ``megatron/core/models/common/embeddings``,
``megatron/core/transformer/multi_latent_attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from bridges.hf_config import attention_fields, base_transformer, model_arguments, read_config, reading, refuse
from bridges.rows import EMBEDDING, HEAD, ModelShape, Row

# Meta's Llama 3 scaling is written into Megatron with these values; only the factor is an argument there.
LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """Return ``rope_parameters`` of transformers 5, into which older spellings were already folded."""
    return dict(config.rope_parameters or {})


def rotary_arguments(config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return rotary embedding outside MLA: (keyword arguments of ``GPTModel``, attributes of the config object)."""
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
    """Return what ``GPTModel`` reads from the config object for ``position_embedding_type="yarn"``."""
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
    """Return the rotary fields of ``MLATransformerConfig``, whose own default is YaRN with factor 40."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    base = {"rotary_base": rope["rope_theta"]}
    if kind == "default":
        # The softmax scale reads these two even without YaRN.
        return base | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if kind != "yarn":
        raise refuse(
            config.model_type, "rope_parameters.rope_type", kind, "multi-latent attention takes default or yarn"
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
    """Attention whose layers with a sliding window have other heads than the others, of values of another size.

    ``value_size``: of a value head, which ``value_scale`` multiplies. ``window_groups``, ``window_rotary_base``: KV
    groups and rotary base of layers with a window, which also have sinks. ``rotary_percent``: of all layers.
    """

    value_size: int
    value_scale: float
    window_groups: int
    window_rotary_base: float
    rotary_percent: float


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """What chooses the ``top_k`` keys that a query sees (DeepSeek-V3.2): ``heads`` of ``size``, rotated in pairs of
    neighbours where ``interleaved``, else of halves."""

    heads: int
    size: int
    top_k: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class MegatronModelConfig:
    """What a HF config means in Megatron's words.

    ``transformer``: fields of ``TransformerConfig`` (of ``MLATransformerConfig`` if ``multi_latent_attention``).
    ``model``: keyword arguments of ``GPTModel``. ``attributes``: set on the config object before the model is built
    (``GPTModel`` reads YaRN settings that ``TransformerConfig`` does not declare; ``heads_by_layer``, a
    :class:`VaryingHeads`, and ``indexer``, an :class:`IndexerSizes`, are ours). ``activation``: name of the
    activation function, ``silu`` or ``quick_gelu``. ``full_width_qk_norm``: q and k are normalised over all heads
    together. ``mla_norm_epsilon``: epsilon of the two norms inside MLA, which HF fixes. ``softmax_log_odds``: the
    router's scores are softmax probabilities, computed by Megatron's sigmoid routing from their log-odds.
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

    ``fields``: of ``TransformerConfig``, beside those of attention; they win. ``options``: of
    :class:`MegatronModelConfig`. Raises :class:`BridgeError` naming an option that Megatron cannot express.
    """
    rotary, attributes = rotary_arguments(config)
    attention = attention_fields(config, qkv_bias=qkv_bias, qk_norm=qk_norm)
    transformer = {**base_transformer(config), **attention, **fields}
    return MegatronModelConfig(transformer, model_arguments(config, **rotary), attributes, **options)


@dataclass(frozen=True, slots=True)
class Family:
    """One HF ``model_type``. Rows of the table: ``layer``, ``dense``, ``moe``, ``embedding``, ``head``: of every
    layer, of layers without and with experts, before and after the layers; ``attention``, ``window``, ``delta_net``:
    of layers with full attention, with a sliding window and with a gated delta net, where these have other tensors
    than one another (:attr:`ModelShape.mixers`). ``aliases``: other
    ``model_type`` values with the same tensors. ``ignored``: endings of HF names that hold no weights. ``carried``:
    beginnings of HF names that conversion passes on as they are (multi-token prediction), beside those of the layers
    that ``num_nextn_predict_layers`` or ``num_mtp_modules`` counts. ``draft``: of the one layer behind the last that
    predicts the token after the next, beside those of a layer with experts; empty where it cannot be trained."""

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

    def config(self, hf_config: Mapping[str, Any]) -> PreTrainedConfig:
        """Return ``config.json`` as transformers reads it, defaults filled in. Raises :class:`BridgeError`."""
        return read_config(hf_config, self.model_type)

    def shape(self, hf_config: Mapping[str, Any]) -> ModelShape:
        """Return the sizes and flags that the rows are expanded with. Raises :class:`BridgeError`."""
        config = self.config(hf_config)
        with reading(self.model_type):
            return self.read_shape(config)

    def megatron_config(self, hf_config: Mapping[str, Any]) -> MegatronModelConfig:
        """Megatron's settings for a model that computes what the HF model computes.

        Raises :class:`BridgeError` naming the key of an option that Megatron cannot express.
        """
        config = self.config(hf_config)
        with reading(self.model_type):
            return self.read_megatron(config)

    def layer_rows(self, moe: bool, mixer: str = "") -> tuple[Row, ...]:
        """Return rows of a layer with or without experts; ``mixer``: the field with more of them."""
        more: tuple[Row, ...] = getattr(self, mixer) if mixer else ()
        return self.layer + more + (self.moe if moe else self.dense)
