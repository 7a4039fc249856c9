"""Which attention kernels Transformer Engine has for a model and a GPU, as its attention layer itself asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """What the choice depends on: packed bf16 sequences, trained, causal."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Of multi-latent attention, where values are narrower; None: ``head_dim``."""
    cp: int = 1
    """Context-parallel degree."""


CASES = {
    "grouped query": AttentionCase(32, 4, 128),
    "context parallel": AttentionCase(32, 4, 128, cp=2),
    "latent": AttentionCase(16, 16, 192, 128),
}
"""Those of released models: Qwen3-30B-A3B, the same with context parallelism, DeepSeek-V3's attention."""


def attention_kernels(case: AttentionCase, *, tokens: int = 4096) -> list[str]:
    """Return which of ``flash``, ``fused`` (cuDNN) and ``unfused`` can be used, the one that would be chosen first.

    Reads NVTE_FLASH_ATTN and its kin, as the layer does. Empty: the first forward pass would raise "No dot product
    attention backend". Needs Transformer Engine and a GPU.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    params = utils.AttentionParams(
        qkv_dtype=torch.bfloat16,
        qkv_layout="thd_thd_thd",
        batch_size=2,
        num_heads=case.heads,
        num_gqa_groups=case.kv_heads,
        max_seqlen_q=tokens,
        max_seqlen_kv=tokens,
        num_tokens_q=2 * tokens,
        num_tokens_kv=2 * tokens,
        head_dim_qk=case.head_dim,
        head_dim_v=case.value_dim or case.head_dim,
        attn_mask_type="padding_causal",
        window_size=(-1, 0),  # keys to the left and right; -1: all
        context_parallel=case.cp > 1,
        cp_size=case.cp,
        pad_between_seqs=False,
        softmax_scale=case.head_dim**-0.5,
    )
    flash, _, fused, _, unfused, available = utils.get_attention_backend(params)
    chosen = dict(zip(("flash", "fused", "unfused"), (flash, fused, unfused), strict=True))
    usable = dict(zip(chosen, available, strict=True))
    return [name for name, taken in chosen.items() if taken] + [
        name for name, can in usable.items() if can and not chosen[name]
    ]
