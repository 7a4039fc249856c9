"""Lengths of the sequences that a run trains on, which batches, memory estimates and engines must allow for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_megatron.config.derive import supervised

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


def longest_sequence(cfg: SkyRLTrainConfig) -> int:
    """Return the tokens of the longest possible training sequence: the context of the last turn and its response. Of
    preferences: of the longest pair."""
    if (rows := supervised(cfg)) is not None:
        return rows.longest
    return (cfg.generator.max_input_length or 0) + cfg.generator.sampling_params.max_generate_length


def longest_pack(cfg: SkyRLTrainConfig) -> tuple[int, int]:
    """Return (number of longest sequences in a full training micro-batch, tokens of each)."""
    trainer, longest = cfg.trainer, longest_sequence(cfg)
    most = trainer.max_tokens_per_microbatch
    return (max(most // longest, 1) if most > 0 else trainer.micro_train_batch_size_per_gpu), longest
