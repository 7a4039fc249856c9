"""Split a batch into mini-batches, a mini-batch over replicas, and a replica's rows into packed micro-batches.

Mini-batches hold whole prompts. Data-parallel replicas get nearly equal work. Micro-batches have a fixed number of
rows or a maximum number of tokens. Pipeline schedules need the same number of micro-batches on all replicas, so
replicas with fewer of them split further or add empty micro-batches, which have weight 0.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from skyrl_megatron.types import TrainingBatch

PROMPT_UIDS = "prompt_uids"
"""Metadata key of a batch: the prompt uid of each row, also of failed rows, which have a separate uid."""

MINI_BATCH_PROMPTS = "mini_batch_prompts"
"""Metadata key of a batch: the prompts of a mini-batch of the policy."""

TOGETHER = "together"
"""Metadata key of a batch: the rows of a uid are not split over replicas or micro-batches, because their loss compares
them."""


def units(batch: TrainingBatch, rows: np.ndarray | None = None) -> list[np.ndarray]:
    """Return the rows of each part of a batch, or of some ``rows`` of it, that is not split, [rows] int64: those of a
    uid with ``TOGETHER``, else single rows.

    A row without uid is padding, and a part of its own.
    """
    chosen = np.arange(len(batch)) if rows is None else rows
    if not batch.metadata.get(TOGETHER):
        return [np.array([row]) for row in chosen]
    parts: dict[str, list[int]] = {}
    for row in chosen.tolist():
        parts.setdefault(batch.uids[row] or f"/{row}", []).append(row)
    return [np.asarray(rows) for rows in parts.values()]


def joined(parts: Sequence[np.ndarray], chosen: np.ndarray) -> np.ndarray:
    """Return the rows of the ``chosen`` [n] ones of :func:`units`, [rows] int64, ascending."""
    return np.sort(np.concatenate([parts[part] for part in chosen])) if len(chosen) else np.zeros(0, np.int64)


def mini_batches(batch: TrainingBatch, prompts: int) -> list[np.ndarray]:
    """Split ``batch`` after every ``prompts`` prompts: the rows [rows] int64 of each mini-batch. The rows of a prompt
    must be adjacent."""
    ends = []
    row = 0
    uids = batch.metadata.get(PROMPT_UIDS, batch.uids)
    for number, (_, rows) in enumerate(groupby(uids), 1):
        row += len(list(rows))
        if number % prompts == 0:
            ends.append(row)
    if not ends or ends[-1] != row:
        ends.append(row)
    return [np.arange(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def trained_rows(batch: TrainingBatch) -> np.ndarray:
    """Return [B] bool: whether any term of the loss is about a token of the row."""
    mask = batch.loss_mask if batch.observation_mask is None else batch.loss_mask | batch.observation_mask
    return batch.responses.any(mask).numpy()


def parts_with_trained_tokens(parts: list[np.ndarray], trained: np.ndarray) -> list[np.ndarray]:
    """Return the mini-batches with a trained row, by ``trained`` [B] bool; the others have no gradient, as filters
    masked all of their rows.

    Returns all mini-batches if none has one.
    """
    return [rows for rows in parts if trained[rows].any()] or parts


def rows_with_trained_tokens(rows: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Return those of ``rows`` that are ``trained`` [B] bool; the others do not affect loss or gradients. All rows if
    there is none."""
    return rows[trained[rows]] if trained[rows].any() else rows


def rows_by_adapter(batch: TrainingBatch, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return adapter name → its rows [b] int64, ascending. All are of the first adapter if the batch names none.

    Raises ValueError with row and names for a name outside ``names``.
    """
    if not batch.adapters:
        return {name: np.arange(0 if number else len(batch)) for number, name in enumerate(names)}
    for row, name in enumerate(batch.adapters):
        if name not in names:
            configured = ", ".join(filter(None, names)) or "none: trainer.policy.model.lora.adapters is empty"
            raise ValueError(f"row {row} of the batch belongs to adapter {name!r}; known: {configured}")
    labels = np.asarray(batch.adapters)
    return {name: np.flatnonzero(labels == name) for name in names}


def split_for_dp(costs: np.ndarray, dp: int) -> list[np.ndarray]:
    """Assign rows to ``dp`` replicas with balanced costs, and with equal counts if B is divisible by ``dp``.

    ``costs``: [B], for example FLOPs. Returns ``dp`` ascending index arrays that together hold every row once. Raises
    ValueError if there are fewer rows than replicas.
    """
    if len(costs) < dp:
        raise ValueError(f"{len(costs)} sequences for {dp} data-parallel ranks: each needs at least one")
    if dp == 1:
        return [np.arange(len(costs))]
    return balance(costs, dp, equal_counts=len(costs) % dp == 0)


def balance(costs: np.ndarray, k: int, *, equal_counts: bool = False) -> list[np.ndarray]:
    """Form ``k`` groups with nearly equal sums: each item, largest first, joins the smallest group (LPT, Graham 1969).

    ``costs``: [n] non-negative. Returns ascending index arrays that together hold every item once. With
    ``equal_counts`` every group has ⌊n/k⌋ or ⌈n/k⌉ items. Raises ValueError if there are fewer items than groups.
    """
    costs = np.asarray(costs, dtype=np.float64)
    if len(costs) < k:
        raise ValueError(f"{len(costs)} items cannot fill {k} groups: use at most as many groups as items")
    capacity, extra = divmod(len(costs), k) if equal_counts else (len(costs), 0)
    groups: list[list[int]] = [[] for _ in range(k)]
    lightest = [(0.0, group) for group in range(k)]
    values = costs.tolist()
    for item in np.argsort(-costs, kind="stable").tolist():
        weight, group = lightest[0]
        groups[group].append(item)
        full = equal_counts and len(groups[group]) >= capacity
        if full and len(groups[group]) == capacity and extra:
            extra -= 1  # this group gets one of the extra items
            full = False
        if full:
            heapq.heappop(lightest)
        else:
            heapq.heapreplace(lightest, (weight + values[item], group))
    return [np.sort(np.asarray(group, dtype=np.int64)) for group in groups]


def aligned(lengths: np.ndarray, alignment: int) -> np.ndarray:
    """Round token counts [B] up to multiples of ``alignment``, to which sequences are padded (tp · 2cp)."""
    return -(-np.asarray(lengths, dtype=np.int64) // alignment) * alignment


def plan_micro_batches(
    lengths: np.ndarray,
    *,
    alignment: int,
    max_tokens: int,
    rows: int,
    multiple_of: int,
    dp_maximum: Callable[[Sequence[int]], list[int]],
) -> list[np.ndarray]:
    """Return the rows of each micro-batch of this replica, [rows] int64; ``lengths``: [B] int. A collective: all
    replicas must call it.

    With ``max_tokens`` > 0 the micro-batches are as few as that number of aligned tokens each allows; else each has
    ``rows`` rows. Their number is the largest that any replica needs, rounded up to ``multiple_of``. ``dp_maximum``
    returns the maximum of each number over the replicas. Raises ValueError on every replica if a sequence exceeds
    ``max_tokens``.
    """
    tokens = aligned(lengths, alignment)
    too_long = max_tokens > 0 and len(tokens) > 0 and int(tokens.max()) > max_tokens
    if max_tokens > 0:
        bins = [] if too_long else pack_by_tokens(tokens, max_tokens)
    else:
        bins = [np.arange(start, min(start + rows, len(tokens))) for start in range(0, len(tokens), rows)]
    needed, longest = dp_maximum([len(bins), int(tokens.max()) if too_long else 0])
    if longest:
        raise ValueError(
            f"a sequence of {longest} tokens exceeds trainer.max_tokens_per_microbatch={max_tokens}: "
            f"raise the budget to at least {longest}, or shorten trainer.max_prompt_length and "
            "generator.sampling_params.max_generate_length"
        )
    count = -(-max(needed, 1) // multiple_of) * multiple_of
    return split_to_count(bins, tokens, count)


def pack_by_tokens(lengths: np.ndarray, cap: int) -> list[np.ndarray]:
    """Pack sequences into few bins of at most ``cap`` tokens each by best-fit decreasing.

    ``lengths``: [n] positive tokens. Returns ascending index arrays that together hold every sequence once. The number
    of bins is at most 11/9 of the optimum plus one (Johnson 1973), and close to the optimum if bins hold many
    sequences. Raises ValueError with the first sequence longer than ``cap``.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    too_long = np.flatnonzero(lengths > cap)
    if len(too_long):
        row = int(too_long[0])
        raise ValueError(
            f"sequence {row} has {int(lengths[row])} tokens, the budget of a micro-batch is {cap}: raise the budget, "
            "or limit the length of prompts and responses"
        )
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        position = bisect_left(free, (length, -1))
        if position < len(free):
            left, target = free.pop(position)
            bins[target].append(row)
        else:
            left, target = cap, len(bins)
            bins.append([row])
        if left > length:
            insort(free, (left - length, target))
    return [np.sort(np.asarray(rows, dtype=np.int64)) for rows in bins]


def split_to_count(bins: list[np.ndarray], lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """Split the fullest bins with several sequences until there are ``count`` bins, then add empty ones.

    ``bins``: [rows] int64 each; ``lengths``: [B] int, tokens of each row.
    """
    bins = list(bins)
    while len(bins) < count:
        fullest = max(
            (i for i, rows in enumerate(bins) if len(rows) > 1),
            key=lambda i: int(lengths[bins[i]].sum()),
            default=None,
        )
        if fullest is None:
            break
        rows = bins.pop(fullest)
        bins += [rows[::2], rows[1::2]]
    return bins + [np.zeros(0, dtype=np.int64) for _ in range(count - len(bins))]
