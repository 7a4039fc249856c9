"""Which attention kernels Transformer Engine has for a model and a GPU, as its attention layer itself asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from skyrl_megatron.errors import ConfigError, Problem

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


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
    sequences: int = 2
    tokens: int = 4096
    """Of the longest sequence."""
    deterministic: bool = False
    """Backward gives the same bits every time."""

    @classmethod
    def of(cls, config: TransformerConfig, sequences: int, tokens: int) -> AttentionCase:
        """Return that of a rank of a model."""
        heads, latent = config.num_attention_heads // config.tensor_model_parallel_size, config.multi_latent_attention
        sizes = getattr(config, "qk_head_dim", 0) + getattr(config, "qk_pos_emb_head_dim", 0)
        groups = config.num_query_groups or config.num_attention_heads
        return cls(
            heads,
            heads if latent else max(groups // config.tensor_model_parallel_size, 1),
            sizes if latent else int(config.kv_channels or 0),
            getattr(config, "v_head_dim", None) if latent else None,
            config.context_parallel_size,
            sequences,
            tokens,
            config.deterministic_mode,
        )


CASES = {
    "grouped query": AttentionCase(32, 4, 128),
    "context parallel": AttentionCase(32, 4, 128, cp=2),
    "latent": AttentionCase(16, 16, 192, 128),
}
"""Those of released models: Qwen3-30B-A3B, the same with context parallelism, DeepSeek-V3's attention."""


def attention_kernels(case: AttentionCase) -> list[str]:
    """Return which of ``flash``, ``fused`` (cuDNN) and ``unfused`` can be used, the one that would be chosen first.

    Reads NVTE_FLASH_ATTN and its kin, as the layer does. Empty: the first forward pass would raise "No dot product
    attention backend". Needs Transformer Engine and a GPU.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    params = utils.AttentionParams(
        qkv_dtype=torch.bfloat16,
        qkv_layout="thd_thd_thd",
        batch_size=case.sequences,
        num_heads=case.heads,
        num_gqa_groups=case.kv_heads,
        max_seqlen_q=case.tokens,
        max_seqlen_kv=case.tokens,
        num_tokens_q=case.sequences * case.tokens,
        num_tokens_kv=case.sequences * case.tokens,
        head_dim_qk=case.head_dim,
        head_dim_v=case.value_dim or case.head_dim,
        attn_mask_type="padding_causal",
        window_size=(-1, 0),  # keys to the left and right; -1: all
        context_parallel=case.cp > 1,
        cp_size=case.cp,
        pad_between_seqs=False,
        softmax_scale=case.head_dim**-0.5,
        core_attention_bias_requires_grad=False,  # there is none
        deterministic=case.deterministic,
    )
    flash, _, fused, _, unfused, available = utils.get_attention_backend(params)
    chosen = dict(zip(("flash", "fused", "unfused"), (flash, fused, unfused), strict=True))
    usable = dict(zip(chosen, available, strict=True))
    return [name for name, taken in chosen.items() if taken] + [
        name for name, can in usable.items() if can and not chosen[name]
    ]


def require_deterministic(config: TransformerConfig, sequences: int, tokens: int, prefix: str) -> None:
    """Raise ConfigError where layers of a deterministic run have no attention kernel, or only the unfused one, which
    keeps the scores of all pairs of tokens and was not asked for. ``prefix``: of the role's ``megatron_config``."""
    if not config.deterministic_mode or config.attention_backend.name == "unfused":
        return
    case = AttentionCase.of(config, sequences, tokens)
    if attention_kernels(case)[:1] in ([], ["unfused"]):
        raise ConfigError([no_deterministic_kernel(sequences, case.heads, tokens, prefix)])


def no_deterministic_kernel(sequences: int, heads: int, tokens: int, prefix: str) -> Problem:
    """Say that Transformer Engine has no deterministic kernel for a micro-batch, and what to do."""
    size = f"{sequences} sequence(s) of {tokens} tokens with {heads} heads a rank"
    fix = (
        f"Transformer Engine has no deterministic kernel for the attention of {size}: take our own layers "
        f"({prefix}transformer_config_kwargs.transformer_impl=local), whose kernel has one for every size, or set "
        "false"
    )
    return Problem("trainer.deterministic", True, fix)
