"""Query which attention kernels Transformer Engine would use for a model on this GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from skyrl_megatron.errors import ConfigError, Problem

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The inputs of Transformer Engine's choice, for causal training on packed bf16 sequences."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Size of a value head in multi-latent attention; None: ``head_dim``."""
    cp: int = 1
    """Context-parallel degree."""
    sequences: int = 2
    tokens: int = 4096
    """Length of the longest sequence."""
    deterministic: bool = False
    """Whether the backward pass must be bitwise reproducible."""

    @classmethod
    def of(cls, config: TransformerConfig, sequences: int, tokens: int) -> AttentionCase:
        """Return the case of one rank of a model."""
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
"""Cases of released models: Qwen3-30B-A3B, the same with context parallelism, DeepSeek-V3's attention."""


def attention_kernels(case: AttentionCase) -> list[str]:
    """Return the usable kernels among ``flash``, ``fused`` (cuDNN) and ``unfused``; the selected one comes first.

    Reads the NVTE_*_ATTN variables, as Transformer Engine's layer does. If the list is empty, the first forward pass
    would raise "No dot product attention backend". Needs Transformer Engine and a GPU.
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
    selected = dict(zip(("flash", "fused", "unfused"), (flash, fused, unfused), strict=True))
    usable = dict(zip(selected, available, strict=True))
    return [name for name, is_selected in selected.items() if is_selected] + [
        name for name, is_usable in usable.items() if is_usable and not selected[name]
    ]


def require_deterministic(config: TransformerConfig, sequences: int, tokens: int, prefix: str) -> None:
    """Raise ConfigError if a deterministic run has no attention kernel, or only the unfused one without asking for it.

    The unfused kernel stores the scores of all pairs of tokens. ``prefix``: the role's ``megatron_config`` key.
    """
    # the user asked for the unfused kernel, so its memory is accepted
    if not config.deterministic_mode or config.attention_backend.name == "unfused":
        return
    case = AttentionCase.of(config, sequences, tokens)
    if attention_kernels(case)[:1] in ([], ["unfused"]):
        raise ConfigError([no_deterministic_kernel(sequences, case.heads, tokens, prefix)])


def no_deterministic_kernel(sequences: int, heads: int, tokens: int, prefix: str) -> Problem:
    """Return the problem that Transformer Engine has no deterministic attention kernel for a micro-batch."""
    size = f"{sequences} sequence(s) of {tokens} tokens with {heads} heads a rank"
    fix = (
        f"Transformer Engine has no deterministic kernel for the attention of {size}: set "
        f"{prefix}transformer_config_kwargs.transformer_impl=local, whose kernel is deterministic for every size, or "
        "set trainer.deterministic=false"
    )
    return Problem("trainer.deterministic", True, fix)
