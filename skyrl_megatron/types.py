"""Shape legend and the batches that travel between layers.

Legend (used in every docstring and comment of the project):

    B  sequences of a batch                 V  vocabulary (``V_padded`` when padded to the tp size)
    T  response tokens, right-aligned and padded at the left
    S  tokens of a padded sequence (prompt + response), padded at the left
    P  packed tokens: the sequences of a micro-batch laid end to end, no padding
    H  hidden size   E  experts   K  experts per token (top-k)   L  layers

The runtime works on packed ``[P]`` tensors with ``cu_seqlens``; algorithms see ``[B, T]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class TrainingBatch:
    """Sequences with everything that training needs of them, one row a sequence.

    Example: prompt ``a b`` with response ``x y z``, prompt ``c`` with response ``u``; S = 5, T = 3::

        sequences       a b x y z        response_mask   1 1 1
                        . . . c u                        . . 1

    Token ``t`` of ``[B, T]`` stands in column ``S - T + t`` of ``sequences``; the trainer's log-prob of it is computed
    at the column before.
    """

    sequences: Tensor
    """[B, S] int64: prompt and response, padded at the left."""
    attention_mask: Tensor
    """[B, S] bool: False on padding."""
    response_mask: Tensor
    """[B, T] float32 in {0, 1}: response tokens, those of the policy and those of the environment."""
    loss_mask: Tensor
    """[B, T] float32 in {0, 1}: the tokens trained on; a subset of ``response_mask``."""
    uids: list[str] = field(default_factory=list)
    """[B] the prompt that a row belongs to: the group of group-relative estimators."""
    rewards: Tensor | None = None
    """[B, T] float32: reward of each token."""
    rollout_logprobs: Tensor | None = None
    """[B, T] float32, nats: log-probs of the engine that sampled the tokens."""
    old_logprobs: Tensor | None = None
    """[B, T] float32, nats: log-probs of the trainer before the update."""
    ref_logprobs: Tensor | None = None
    """[B, T] float32, nats: log-probs of the reference policy."""
    values: Tensor | None = None
    """[B, T] float32: critic's values before the update."""
    advantages: Tensor | None = None
    """[B, T] float32."""
    returns: Tensor | None = None
    """[B, T] float32."""
    is_last_step: Tensor | None = None
    """[B] bool: last row of its trajectory (step-wise trajectories have one row per turn)."""
    rollout_routes: Tensor | None = None
    """[B, S, L, K] uint8/int16: experts chosen by the engine, for routing replay."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Facts of the whole batch, carried along unchanged."""
    adapters: list[str] = field(default_factory=list)
    """[B] which of the policy's named adapters a row belongs to; empty: to the first, or there are no names."""

    def __len__(self) -> int:
        return self.sequences.shape[0]

    @property
    def lengths(self) -> np.ndarray:
        """[B] int64: tokens of each row without padding."""
        return self.attention_mask.sum(dim=1, dtype=torch.int64).numpy(force=True)

    def select(self, rows: Sequence[int] | np.ndarray) -> TrainingBatch:
        """Return the given rows, in the given order."""
        index = torch.as_tensor(np.asarray(rows, dtype=np.int64))
        picked: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                value = value[index.to(value.device)]
            elif isinstance(value, list):
                value = [value[row] for row in index.tolist()] if value else []
            picked[item.name] = value
        return TrainingBatch(**picked)

    def to(self, device: torch.device) -> TrainingBatch:
        """Return the same batch with every tensor on ``device``."""
        moved: dict[str, Any] = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device)
        return TrainingBatch(**moved)

    def blank_row(self) -> TrainingBatch:
        """Return one row of padding with the widths of this batch: it keeps a rank in step and weighs nothing."""
        blank: dict[str, Any] = {"metadata": self.metadata}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                blank[item.name] = value.new_zeros(1, *value.shape[1:])
        return TrainingBatch(**blank, uids=[""] if self.uids else [], adapters=self.adapters[:1])
