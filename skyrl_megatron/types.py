"""Shape legend, and the batches that the layers of the project exchange.

Legend (for every docstring and comment of the project):

    B  sequences of a batch                 V  vocabulary (``V_padded`` when padded to the tp size)
    T  response tokens, right-aligned and padded at the left
    S  tokens of a padded sequence (prompt + response), padded at the left
    P  packed tokens: the concatenated sequences of a micro-batch, without padding
    H  hidden size   E  experts   K  experts per token (top-k)   L  layers

The runtime works on packed ``[P]`` tensors with ``cu_seqlens``; algorithms see ``[B, T]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

OWN_LOGPROBS = "own_logprobs"
"""Metadata key of a batch that gets a single optimizer step: the log-probs before the update are those of the training
forward pass."""


@dataclass(frozen=True, slots=True)
class TokenSupport:
    """The sampling support of n tokens: the vocabulary entries that top-k, top-p and min-p left for each token.

    A token without entries was sampled from the whole vocabulary, or was not sampled.
    """

    ids: np.ndarray
    """[N] uint16 or int32: vocabulary entries of all tokens, concatenated."""
    counts: np.ndarray
    """[n] int32: number of entries of each token."""

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> TokenSupport:
        """Make the support from the entries of each token."""
        counts = np.fromiter(map(len, sets), np.int32, len(sets))
        ids = np.fromiter((entry for entries in sets for entry in entries), np.int32, int(counts.sum()))
        return cls(ids.astype(np.uint16) if ids.max(initial=0) < 1 << 16 else ids, counts)

    @classmethod
    def none(cls, tokens: int) -> TokenSupport:
        """Make the support of ``tokens`` tokens without entries."""
        return cls(np.zeros(0, np.uint16), np.zeros(tokens, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[TokenSupport]) -> TokenSupport:
        """Concatenate the supports of several parts."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "counts")))

    def __len__(self) -> int:
        return len(self.counts)

    def first(self, tokens: int) -> TokenSupport:
        """Return the support of the first ``tokens`` tokens."""
        return TokenSupport(self.ids[: int(self.counts[:tokens].sum())], self.counts[:tokens])

    def last(self, tokens: int) -> TokenSupport:
        """Return the support of the last ``tokens`` tokens."""
        left = len(self) - tokens
        return TokenSupport(self.ids[int(self.counts[:left].sum()) :], self.counts[left:])

    def without(self, tokens: np.ndarray) -> int | None:
        """Return the first position whose sampled token (``tokens`` [n]) is not in its support, else None."""
        places = np.repeat(np.arange(len(self)), self.counts)
        found = np.bincount(places, weights=self.ids == np.repeat(tokens, self.counts), minlength=len(self))
        missing = np.flatnonzero((found == 0) & (self.counts > 0))
        return int(missing[0]) if missing.size else None


@dataclass(slots=True)
class TrainingBatch:
    """Sequences with all data that training needs, one sequence per row.

    Example: prompt ``a b`` with response ``x y z``, prompt ``c`` with response ``u``; S = 5, T = 3::

        sequences       a b x y z        response_mask   1 1 1
                        . . . c u                        . . 1

    Token ``t`` of ``[B, T]`` is in column ``S - T + t`` of ``sequences``. The trainer computes its log-prob at the
    previous column.
    """

    sequences: Tensor
    """[B, S] int64: prompt and response, padded at the left."""
    attention_mask: Tensor
    """[B, S] bool: False on padding."""
    response_mask: Tensor
    """[B, T] float32 in {0, 1}: response tokens, of the policy and of the environment."""
    loss_mask: Tensor
    """[B, T] float32 in {0, 1}: the trained tokens, a subset of ``response_mask``."""
    uids: list[str] = field(default_factory=list)
    """[B] uid of each row's prompt; rows with the same uid are a group of group-relative estimators."""
    rewards: Tensor | None = None
    """[B, T] float32: reward of each token."""
    rollout_logprobs: Tensor | None = None
    """[B, T] float32, nats: log-probs of the engine that sampled the tokens, over ``rollout_support`` if present, else
    over the whole vocabulary."""
    old_logprobs: Tensor | None = None
    """[B, T] float32, nats: log-probs of the trainer before the update."""
    ref_logprobs: Tensor | None = None
    """[B, T] float32, nats: log-probs of the reference policy."""
    teacher_logprobs: Tensor | None = None
    """[B, T] float32, nats: log-probs of the row's teacher."""
    teacher_top_logprobs: Tensor | None = None
    """[B, T, K] float32, nats: log-probs of the teacher's likeliest tokens, in descending order."""
    teacher_top_ids: Tensor | None = None
    """[B, T, K] int64: the ids of these tokens."""
    values: Tensor | None = None
    """[B, T] float32: critic's values before the update."""
    advantages: Tensor | None = None
    """[B, T] float32."""
    returns: Tensor | None = None
    """[B, T] float32."""
    is_last_step: Tensor | None = None
    """[B] bool: last row of its trajectory (step-wise trajectories have one row per turn)."""
    truncated: Tensor | None = None
    """[B] bool: a length limit cut off the response."""
    observation_mask: Tensor | None = None
    """[B, T] float32 in {0, 1}: response tokens of the environment, which ``observation_loss_coef`` trains on."""
    reward_parts: Tensor | None = None
    """[B, R] float32: the rewards that ``gdpo`` normalises separately."""
    preferences: Tensor | None = None
    """[B, 3] float64 of preferences: 1 for a row of the better answer, -1 for one of the other; the summed log-probs
    of its trained tokens under the reference, in nats; and the margin of its pair."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Data of the whole batch, passed on unchanged."""
    adapters: list[str] = field(default_factory=list)
    """[B] name of each row's policy adapter. Empty: all rows use the first adapter, or adapters have no names."""
    rollout_support: list[TokenSupport] = field(default_factory=list)
    """[B] sampling support of each row's response tokens. Log-probs and entropies of all models are computed over it.
    Empty: over the whole vocabulary."""
    rollout_routes: list[np.ndarray | None] = field(default_factory=list)
    """[B] of [n, L, K] uint8/uint16: the experts that the engine chose for the first n tokens of a row, by model
    layer. With ``moe_routing_replay_source=trainer`` the trainer chose them before the update. None: unknown for this
    row. Empty: unknown for all rows."""

    def __len__(self) -> int:
        return self.sequences.shape[0]

    @property
    def lengths(self) -> np.ndarray:
        """[B] int64: number of tokens of each row without padding."""
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
        """Return one row of padding with the widths of this batch.

        It lets a rank without data take part in collectives, and has weight 0.
        """
        blank: dict[str, Any] = {"metadata": self.metadata}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                blank[item.name] = value.new_zeros(1, *value.shape[1:])
        support = [TokenSupport.none(0)] if self.rollout_support else []
        return TrainingBatch(
            **blank,
            uids=[""] if self.uids else [],
            adapters=self.adapters[:1],
            rollout_support=support,
            rollout_routes=[None] if self.rollout_routes else [],
        )


Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")
"""All parts, in the order in which a step needs them."""
