"""A tiny model of experts with a tokenizer of single characters: what a first run and tests train on a CPU."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

CHARACTERS = "0123456789+-*=? .,:;!()abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'\"\n"
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_embedded_model(folder: Path, seed: int = 0) -> Path:
    """Write the model into ``folder`` unless it exists there; returns ``folder``.

    The model is written to a temporary folder and renamed, so that ``folder`` is never incomplete.
    """
    recipe = {"seed": seed, "vocab_size": VOCAB_SIZE, "version": 3}
    marker = folder / "embedded_model.json"
    if marker.exists() and json.loads(marker.read_text()) == recipe:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_tokenizer(temporary)
        _write_weights(temporary, seed)
        (temporary / marker.name).write_text(json.dumps(recipe))
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per character. Numbers are spelled digit by digit, so that sums can be
    learned."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _write_weights(folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index("<|pad|>"),
        eos_token_id=SPECIAL_TOKENS.index("<|end|>"),
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).float()
        # transformers sets the embedding of the padding token to 0. If that token were sampled, its gradient would be
        # 1 / sqrt(rms_norm_eps) times that of others, and clipping would reduce the whole step to almost nothing.
        model.get_input_embeddings().weight.data[config.pad_token_id].normal_(std=config.initializer_range)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(folder)
