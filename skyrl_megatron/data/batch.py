"""From ragged samples to the right-aligned tensors of :class:`~skyrl_megatron.types.TrainingBatch`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.types import TrainingBatch


def collate(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    uids: Sequence[str],
    rewards: Sequence[Sequence[float]] | Sequence[float],
    loss_masks: Sequence[Sequence[int]] | None = None,
    rollout_logprobs: Sequence[Sequence[float]] | None = None,
) -> TrainingBatch:
    """B samples as one batch: S is the longest prompt + response, T the longest response (at least 1).

    ``rewards``: one number a sample (put on its last response token) or one a token. ``loss_masks``: one 0 or 1 a
    response token, default all 1. Raises ValueError naming the first sample whose pieces do not fit together.
    """
    response_lengths = _lengths(responses)
    total = _lengths(prompts) + response_lengths
    width, response_width = int(total.max(initial=1)), int(max(response_lengths.max(initial=1), 1))
    tokens = [list(prompt) + list(response) for prompt, response in zip(prompts, responses, strict=True)]
    per_token = rewards
    if len(rewards) and np.isscalar(rewards[0]):
        per_token = [
            [0.0] * (len(response) - 1) + [reward] if response else []
            for response, reward in zip(responses, rewards, strict=True)
        ]
    optional = {"rewards": per_token, "loss_masks": loss_masks, "rollout_logprobs": rollout_logprobs}
    for name, values in optional.items():
        if values is not None and (wrong := np.flatnonzero(_lengths(values) != response_lengths)).size:
            row = int(wrong[0])
            got, want = len(values[row]), int(response_lengths[row])  # type: ignore[arg-type]
            raise ValueError(f"sample {row} (uid {uids[row]}): {got} {name} for {want} response tokens")
    mask = _right_aligned([[1.0] * n for n in response_lengths.tolist()], response_width, np.float32)
    return TrainingBatch(
        sequences=_right_aligned(tokens, width, np.int64),
        attention_mask=_right_aligned([[True] * n for n in total.tolist()], width, np.bool_),
        response_mask=mask,
        loss_mask=mask.clone() if loss_masks is None else _right_aligned(loss_masks, response_width, np.float32),
        uids=list(uids),
        rewards=_right_aligned(per_token, response_width, np.float32),  # type: ignore[arg-type]
        rollout_logprobs=(
            None if rollout_logprobs is None else _right_aligned(rollout_logprobs, response_width, np.float32)
        ),
    )


def _lengths(rows: Sequence[Sequence[object]]) -> np.ndarray:
    return np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))


def _right_aligned(rows: Sequence[Sequence[object]], width: int, dtype: type) -> Tensor:
    """[B, width] with each row at the right, zeros before it: one scatter for all rows."""
    lengths = _lengths(rows)
    out = np.zeros((len(rows), width), dtype=dtype)
    if lengths.sum():
        flat = np.concatenate([np.asarray(row, dtype=dtype) for row in rows if len(row)])
        row_of = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(flat)) - np.repeat(lengths.cumsum() - lengths, lengths)
        out[row_of, within + np.repeat(width - lengths, lengths)] = flat
    return torch.from_numpy(out)
