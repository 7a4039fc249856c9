"""Tiny seeded HF folders that every part of the system opens: transformers, the bridges, Megatron, vLLM.

Sizes fit the engine's CPU kernels (hidden a multiple of 32; MLA with its real latent of 512 + 64) and tensor
parallelism of 2. Nothing is trivial: norm weights are not one, biases and expert corrections not zero, and logits are
far from flat. Two seeds give two models that no comparison mistakes for one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
    eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
    bos_token_id=None,
)
_EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
_DELTA_NET: dict[str, Any] = dict(
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    full_attention_interval=2,
)
_VISION: dict[str, Any] = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    patch_size=4,
    out_hidden_size=_SIZES["hidden_size"],
    num_position_embeddings=16,
)
_OF_IMAGES = dict(image_token_id=508, video_token_id=509, vision_start_token_id=510, vision_end_token_id=511)
TINY: dict[str, dict[str, Any]] = {
    "llama": dict(head_dim=32),
    "qwen2": dict(),
    "qwen3": dict(head_dim=32),
    "qwen2_moe": dict(**_EXPERTS, shared_expert_intermediate_size=64, decoder_sparse_step=1),
    "qwen3_moe": dict(**_EXPERTS, head_dim=32, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2, head_dim=32, sliding_window=None),
    "olmoe": dict(num_experts=8, num_experts_per_tok=2, intermediate_size=64),
    "deepseek_v3": dict(
        num_key_value_heads=4,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=96,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        topk_method="noaux_tc",  # vLLM loads the correction biases only when the config says so
        scoring_func="sigmoid",
    ),
    "glm4_moe": dict(
        head_dim=32,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "gpt_oss": dict(head_dim=32, num_local_experts=8, num_experts_per_tok=2, sliding_window=128),
    "minimax_m2": dict(
        num_local_experts=8,
        num_experts_per_tok=2,
        head_dim=32,
        intermediate_size=64,
        rotary_dim=16,
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
    ),
    "ernie4_5_moe": dict(
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        tie_word_embeddings=True,
    ),
    "qwen3_next": dict(
        **_EXPERTS,
        **_DELTA_NET,
        head_dim=32,
        shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    ),
    "qwen3_5_moe_text": dict(
        **_EXPERTS, **_DELTA_NET, head_dim=32, shared_expert_intermediate_size=64, norm_topk_prob=True
    ),
    "hy_v3": dict(
        **_EXPERTS,
        head_dim=32,
        num_shared_experts=1,
        router_scaling_factor=2.5,
        # as the released config has them for vLLM
        expert_hidden_dim=64,
        first_k_dense_replace=1,
        route_norm=True,
        qk_norm=True,
    ),
}
TINY["glm4_moe_lite"] = TINY["deepseek_v3"] | dict(n_group=1, routed_scaling_factor=1.8, rms_norm_eps=1e-6)
"""As released except ``rms_norm_eps`` (1e-5), which vLLM's latent norms take and transformers' do not."""


def tiny_model(model_type: str, seed: int = 0, **overrides: Any):
    """The tiny model of a family in fp32 (transformers), every parameter and buffer drawn from ``seed``: the language
    model of a family in :data:`TINY`, else the model of text and images around one.

    ``overrides`` are config arguments.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    family = model_type if model_type in TINY else f"{model_type}_text"
    kind, parts = AutoModelForCausalLM, {**_SIZES, **TINY[family], **overrides}
    if family != model_type:
        kind, parts = AutoModelForImageTextToText, {"text_config": parts, "vision_config": _VISION, **_OF_IMAGES}
    config = AutoConfig.for_model(model_type, **parts)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = kind.from_config(config, attn_implementation="eager").float().eval()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            stored_less_1 = 0.0 if tensor.any() else 1.0  # as zero-centred norms are
            if "norm" in name and name.endswith("weight"):
                tensor.uniform_(0.6, 1.4).sub_(stored_less_1)
            elif name.endswith(("bias", "sinks")):
                tensor.normal_(std=0.1)
            elif tensor.dim() >= 2 and name.endswith(("weight", "_proj")):
                tensor.normal_(std=0.08)
    model.generation_config.eos_token_id = config.get_text_config().eos_token_id
    model.generation_config.pad_token_id = config.get_text_config().pad_token_id
    return model


def write_tiny_model(model_type: str, folder: Path, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Write the tiny model as a HF folder with tokenizer and chat template; returns ``folder``."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    tiny_model(model_type, seed, **overrides).to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, texts: Iterable[str] | None = None, vocab_size: int = VOCAB_SIZE) -> None:
    """Write a byte-level BPE tokenizer of at most ``vocab_size`` tokens, trained on additions, or on ``texts``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sums = (f"What is {a} + {b}? It is {a + b}." for a in range(60) for b in range(60))
    tokenizer.train_from_iterator(sums if texts is None else texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
