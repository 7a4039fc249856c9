"""Cutting a rank's share of a mini-batch into micro-batches, the same number on every data-parallel rank.

Two ways: a fixed number of rows, or a token budget that no micro-batch exceeds. Pipeline schedules need equal counts
on all dp ranks (and whole groups of them under virtual pipelining), so ranks with less work split further or, when
they have no rows left to split, add empty micro-batches, which weigh nothing anywhere.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from skyrl_megatron import device
from skyrl_megatron.data.balance import balance
from skyrl_megatron.data.packing import pack_by_tokens, split_to_count
from skyrl_megatron.runtime.flops import ModelFlops


def aligned(lengths: np.ndarray, alignment: int) -> np.ndarray:
    """Tokens that sequences take when each is padded to a multiple of ``alignment`` (tp · 2cp rules). [B] → [B]."""
    return -(-np.asarray(lengths, dtype=np.int64) // alignment) * alignment


def split_for_dp(lengths: np.ndarray, dp: int, flops: ModelFlops) -> list[np.ndarray]:
    """Rows for each dp rank, with equal counts where they divide, balanced by the forward FLOPs of the model at hand.

    ``lengths``: [B] tokens per sequence. Returns ``dp`` index arrays, each ascending, together every row once.
    Raises ValueError when there are fewer rows than ranks.
    """
    if len(lengths) < dp:
        raise ValueError(f"{len(lengths)} sequences for {dp} data-parallel ranks: each needs at least one")
    if dp == 1:
        return [np.arange(len(lengths))]
    return [np.sort(rows) for rows in balance(flops.forward(lengths), dp, equal_counts=len(lengths) % dp == 0)]


def plan_micro_batches(
    lengths: np.ndarray,
    *,
    alignment: int,
    max_tokens: int,
    rows: int,
    multiple_of: int,
    dp_group: dist.ProcessGroup,
) -> list[np.ndarray]:
    """Rows of each micro-batch of this rank; collective over ``dp_group``, so all its ranks must call.

    ``max_tokens`` > 0: as few micro-batches as a budget of that many aligned tokens allows; else ``rows`` a
    micro-batch. The count is the largest that any dp rank needs, rounded up to ``multiple_of``.
    Raises ValueError (on every rank) naming the first sequence that is longer than the budget.
    """
    tokens = aligned(lengths, alignment)
    too_long = max_tokens > 0 and len(tokens) > 0 and int(tokens.max()) > max_tokens
    if max_tokens > 0:
        bins = [] if too_long or not len(tokens) else pack_by_tokens(tokens, max_tokens)
    else:
        bins = [np.arange(start, min(start + rows, len(tokens))) for start in range(0, len(tokens), rows)]
    facts = torch.tensor([len(bins), int(tokens.max()) if too_long else 0], device=device.device())
    dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=dp_group)
    needed, longest = (int(fact) for fact in facts)
    if longest:
        raise ValueError(
            f"a sequence of {longest} tokens exceeds trainer.max_tokens_per_microbatch={max_tokens}: "
            f"raise the budget to at least {longest}, or shorten trainer.max_prompt_length and "
            "generator.sampling_params.max_generate_length"
        )
    count = -(-max(needed, 1) // multiple_of) * multiple_of
    return split_to_count(bins, tokens, count)
