"""FLOPs of a forward and a training pass, computed from the model configuration, by layer.

GEMMs are counted, with two operations per multiply-add: attention projections and scores, dense MLPs, the experts a
token is routed to, routers, gates of shared experts, and the head. Gated delta nets count as their recurrence, without
the extra products of the chunked form. Attention scores count only the pairs that the mask allows, about half of the
square in PaLM's formula. Element-wise work and recomputation are not counted, because MFU relates *model* FLOPs to the
peak (PaLM, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from skyrl_megatron import device
from skyrl_megatron.config.hardware import GPU_TYPES, gpu_type

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from bridges.family import MegatronModelConfig
    from skyrl_megatron.runtime.model.build import Head


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Forward FLOPs of one sequence of length s: ``linear * s`` plus, per layer, ``quadratic * (pairs attended)``."""

    linear: float
    """FLOPs per token of everything that is linear in the sequence length."""
    full_attention: float
    """FLOPs per attended (query, key) pair, summed over the layers with full causal attention."""
    window_attention: float
    """FLOPs per attended pair, summed over the sliding-window layers."""
    window: int
    """Keys that a query of a sliding-window layer sees, itself included; 0 without such layers."""

    def forward(self, lengths: np.ndarray) -> np.ndarray:
        """Return the forward FLOPs of each sequence. ``lengths``: [B] int → [B] float64."""
        s = np.asarray(lengths, dtype=np.float64)
        # query i attends to i + 1 keys
        flops: np.ndarray = self.linear * s + self.full_attention * s * (s + 1) / 2
        if self.window:
            # the first ``window`` queries see fewer keys than the window
            w = np.minimum(s, self.window)
            flops += self.window_attention * (w * (w + 1) / 2 + (s - w) * self.window)
        return flops

    def __add__(self, other: ModelFlops) -> ModelFlops:
        """Add two parts of one model, which has one window."""
        return ModelFlops(
            self.linear + other.linear,
            self.full_attention + other.full_attention,
            self.window_attention + other.window_attention,
            max(self.window, other.window),
        )

    def training(self, lengths: np.ndarray) -> float:
        """Return the FLOPs of forward and backward over all sequences, of ``lengths`` [B] int tokens: backward costs
        twice the forward."""
        # the gradients of inputs and of weights are one product each, as large as the forward's
        return 3.0 * float(self.forward(lengths).sum())


def model_flops(config: TransformerConfig, vocab_size: int, head: Head = "lm") -> ModelFlops:
    """Count the FLOPs of the whole model (all stages, all experts that a token visits) of a Megatron configuration.

    ``head``: a value head has one column in place of the vocabulary.
    """
    return sum(component_flops(config, vocab_size if head == "lm" else 1).values(), _NOTHING)


def component_flops(config: TransformerConfig, vocab_size: int) -> dict[str, ModelFlops]:
    """Count FLOPs of ``attention`` (projections, scores), ``mlp`` (dense or experts, router, gate) and ``head``."""
    attention, mlp = zip(*layer_flops(config), strict=True)
    head = ModelFlops(2.0 * config.hidden_size * vocab_size, 0.0, 0.0, 0)
    return {"attention": sum(attention, _NOTHING), "mlp": sum(mlp, _NOTHING), "head": head}


def layer_flops(config: TransformerConfig) -> list[tuple[ModelFlops, ModelFlops]]:
    """Count (attention or delta net, MLP) of each layer."""
    h = config.hidden_size
    linear, pair = _attention(config)
    # gate, up and down instead of up and down
    gated = 3 if config.gated_linear_unit else 2
    expert_rows = (config.moe_ffn_hidden_size or 0) * config.moe_router_topk
    moe = 2 * gated * h * (expert_rows + (config.moe_shared_expert_intermediate_size or 0))
    moe += 2 * h * ((config.num_moe_experts or 0) + config.moe_shared_expert_gate)
    dense = 2 * gated * h * config.ffn_hidden_size
    # Megatron counts the keys to the left of a query, without its own
    window = config.window_size[0] + 1 if config.window_size else 0
    nets = config.linear_attention_freq if config.experimental_attention_variant else None
    by_layer, wider = getattr(config, "heads_by_layer", None), 0.0
    # MiMo-V2-Flash: window layers have more KV heads than the configuration's other layers
    if by_layer:
        more = by_layer.window_groups - config.num_query_groups
        wider = 2.0 * h * more * (config.kv_channels + by_layer.value_size)
    layers = []
    for layer, is_moe in enumerate(_moe_pattern(config)):
        if nets and nets[layer]:
            attention = ModelFlops(_delta_net(config), 0.0, 0.0, 0)
        elif _is_windowed(config, layer):
            attention = ModelFlops(linear + wider, 0.0, pair, window)
        else:
            attention = ModelFlops(linear, pair, 0.0, 0)
        layers.append((attention, ModelFlops(float(moe if is_moe else dense), 0.0, 0.0, 0)))
    return layers


def expert_flops(config: TransformerConfig) -> tuple[float, int]:
    """Return (forward FLOPs of one token in one expert, number of layers with experts)."""
    gated = 3 if config.gated_linear_unit else 2
    return float(2 * gated * config.hidden_size * (config.moe_ffn_hidden_size or 0)), sum(_moe_pattern(config))


_NOTHING = ModelFlops(0.0, 0.0, 0.0, 0)
_DEFAULTS: dict[str, Any] = dict.fromkeys(
    (
        "gated_linear_unit",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "num_moe_experts",
        "window_size",
        "window_attn_skip_freq",
        "linear_attention_freq",
        "experimental_attention_variant",
        "q_lora_rank",
    )
) | {"moe_router_topk": 2, "moe_shared_expert_gate": False, "attention_output_gate": False, "moe_layer_freq": 1}
"""Megatron's defaults of the fields that the counts read and that a family may leave out."""


def described_config(megatron: MegatronModelConfig) -> TransformerConfig:
    """Return what the counts read of a ``TransformerConfig``, without importing Megatron: for ``--check``."""
    fields = _DEFAULTS | megatron.transformer | megatron.attributes
    fields.setdefault("ffn_hidden_size", 4 * fields["hidden_size"])
    fields["multi_latent_attention"] = megatron.multi_latent_attention
    return cast("TransformerConfig", SimpleNamespace(**fields))


def _is_windowed(config: TransformerConfig, layer: int) -> bool:
    """Return whether a layer, counted from 0, has a sliding window (``is_layer_window_attention`` of
    megatron/core/transformer/utils.py)."""
    skips = config.window_attn_skip_freq
    if not config.window_size:
        return False
    if isinstance(skips, int):
        return (layer + 1) % skips != 0
    return skips is None or bool(skips[layer])


def _attention(config: TransformerConfig) -> tuple[float, float]:
    """Return (FLOPs per token of a layer's projections, FLOPs per attended pair of a layer)."""
    h, heads = config.hidden_size, config.num_attention_heads
    if getattr(config, "multi_latent_attention", False):
        qk = config.qk_head_dim + config.qk_pos_emb_head_dim
        rank = config.q_lora_rank
        query = h * rank + rank * heads * qk if rank else h * heads * qk
        kv = h * (config.kv_lora_rank + config.qk_pos_emb_head_dim)
        kv += config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim)
        out = heads * config.v_head_dim * h
        linear, pair = 2.0 * (query + kv + out), 2.0 * heads * (qk + config.v_head_dim)
        if sizes := getattr(config, "indexer", None):  # pairs count as if all keys were selected
            linear += 2.0 * (rank * sizes.heads * sizes.size + h * (sizes.size + sizes.heads))
            pair += 2.0 * sizes.heads * (sizes.size + 1)
        return linear, pair
    width = config.kv_channels
    by_layer = getattr(config, "heads_by_layer", None)
    value = by_layer.value_size if by_layer else width
    qkv = h * (width * heads * (1 + config.attention_output_gate) + (width + value) * config.num_query_groups)
    return 2.0 * (qkv + heads * value * h), 2.0 * heads * (width + value)


def _delta_net(config: TransformerConfig) -> float:
    """Return FLOPs per token of a gated delta net: projections, convolution and recurrence.

    The recurrence has three products with the state: it reads the value of the key, updates it, and reads the output
    of the query.
    """
    h, keys, values = config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * keys * key + values * value
    projections = h * (channels + 2 * values * value + 2 * values)
    return float(2 * (projections + channels * config.linear_conv_kernel_dim + 3 * values * key * value))


def _moe_pattern(config: TransformerConfig) -> list[bool]:
    """Return for each layer whether its MLP is a mixture of experts."""
    if not config.num_moe_experts:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(flag) for flag in frequency]


def device_type() -> str | None:
    """Return the key of this device in ``GPU_TYPES``, ``""`` if it is not there; None for a CPU."""
    return gpu_type(torch.cuda.get_device_name()) or "" if device.has_cuda() else None


def peak_flops(given: float | None = None) -> float | None:
    """Return the dense bf16 peak of this device in FLOP/s: ``given``, else the published number; None if unknown."""
    if given is not None:
        return given
    kind = device_type()
    return GPU_TYPES[kind].flops if kind else None
