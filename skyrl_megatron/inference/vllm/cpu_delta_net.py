"""Gated delta nets in fp32 on CPU: vLLM 0.32 has kernels for bfloat16 alone, and asserts it at the first token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType

from skyrl_megatron.runtime.model.delta_rule import chunk_plan, gated_delta_rule, unit

_stock = gdn_attention.cpu_gdn_attention_core


def compute_delta_nets_in_fp32() -> None:
    """Let vLLM register an operation that takes fp32 too. To be called before a model is built."""
    gdn_attention.cpu_gdn_attention_core = _core


def _core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    """Fill ``core_attn_out`` [tokens, value heads, size] from queries, keys and values [tokens, channels] before the
    short convolution; ``b``, ``a`` [tokens, value heads]: learning rate and step."""
    if mixed_qkv.dtype == torch.bfloat16:
        _stock(mixed_qkv, b, a, core_attn_out, layer_name)
        return
    context: Any = get_forward_context()
    layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a run that measures memory
        return
    of = context.attn_metadata[layer.prefix]
    sequences = of.num_decodes + of.num_prefills
    bounds = of.non_spec_query_start_loc[: sequences + 1].tolist()
    lengths = tuple(end - start for start, end in pairwise(bounds))
    slots = of.non_spec_state_indices_tensor[:sequences].long()
    begins_anew = torch.zeros(sequences, dtype=torch.bool)
    if of.num_prefills:
        begins_anew[of.num_decodes :] = ~of.has_initial_state[of.num_decodes : sequences]
    tokens, heads = bounds[-1], core_attn_out.shape[1]
    before = gdn_attention._conv_buffer_view(layer)  # [slots, channels, taps − 1]
    states = gdn_attention._ssm_state_view(layer)  # [slots, value heads, key size, value size]
    before[slots[begins_anew]], states[slots[begins_anew]] = 0, 0
    mixed = _convolved(mixed_qkv[:tokens], before, slots, lengths, gdn_attention._unpacked_conv_weight(layer))
    q, k, v = (x[0] for x in layer.rearrange_mixed_qkv(F.silu(mixed)))
    shape = (q.shape[1], heads // q.shape[1])  # key heads, value heads of each
    step = F.softplus(a[:tokens].float() + layer.dt_bias.float())
    kept = -layer.A_log.float().exp() * step
    out, ends = gated_delta_rule(
        unit(q),
        unit(k),
        v.unflatten(1, shape),
        kept.unflatten(1, shape),
        b[:tokens].sigmoid().unflatten(1, shape),
        chunk_plan(lengths, q.device),
        states[slots].unflatten(1, shape),
    )
    states[slots] = ends.flatten(1, 2).to(states.dtype)
    core_attn_out[:tokens] = out.flatten(1, 2)


def _convolved(x: Tensor, before: Tensor, slots: Tensor, lengths: tuple[int, ...], weight: Tensor) -> Tensor:
    """Convolve [tokens, channels] along each sequence, behind the last tokens that its slot of ``before`` holds, which
    are replaced by the new last ones."""
    results = []
    for slot, part in zip(slots.tolist(), x.split(lengths), strict=True):
        seen = torch.cat([before[slot].to(x.dtype), part.T], dim=1)
        results.append(F.conv1d(seen[None], weight[:, None], groups=len(weight))[0].T)
        before[slot] = seen[:, -before.shape[-1] :]
    return torch.cat(results)
