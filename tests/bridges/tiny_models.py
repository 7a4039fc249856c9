"""Tiny seeded models of every family, with nothing trivial in them: odd vocabulary, 6 heads with 3 KV groups, a head
size that is not hidden/heads, norm weights in [0.6, 1.4], biases, sinks and correction biases that are not zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = dict(
    vocab_size=1003,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=256,
    initializer_range=0.3,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
)
TINY: dict[str, dict[str, Any]] = {
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(head_dim=16),
    "qwen3_moe": dict(
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
}


def tiny_config(model_type: str, **overrides: Any) -> dict[str, Any]:
    """``config.json`` of the tiny model as a dict; ``overrides`` are config arguments."""
    from transformers import AutoConfig

    values = {**SIZES, **TINY[model_type], **overrides}
    return AutoConfig.for_model(model_type, architectures=None, **values).to_dict()


def tiny_model(model_type: str, seed: int = 0, **overrides: Any):
    """The tiny model in fp32, every parameter and buffer drawn from ``seed``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SIZES, **TINY[model_type], **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name and name.endswith("weight"):
                tensor.uniform_(0.6, 1.4)
            elif name.endswith(("bias", "sinks")):
                tensor.normal_(std=0.3)
    return model


def save_tiny(model_type: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Saves the tiny model with ``save_pretrained`` and returns the folder."""
    tiny_model(model_type, seed, **overrides).save_pretrained(folder)
    return folder
