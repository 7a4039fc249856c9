"""A model family: rows of data plus two readings of the HF config, and what the runtime gets from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from bridges.blocks import EMBEDDING, HEAD
from bridges.hf_config import attention_fields, base_transformer, model_arguments, read_config, reading
from bridges.rotary import rotary_arguments
from bridges.rows import ModelShape, Row


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
