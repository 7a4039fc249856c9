"""Softmax over a part of the vocabulary: the tokens that top-k, top-p or min-p left to the engine that sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Support:
    """The vocabulary entries that each of P tokens was drawn from; a token without any: from all."""

    ids: Tensor
    """[N] int64: those of all tokens, one token after the other."""
    tokens: Tensor
    """[N] int64 in [0, P): whose each is."""
    whole: Tensor
    """[P] bool: tokens without any."""
    starts: np.ndarray
    """[P + 1] int64: where in ``ids`` each token's begin; on the host, so that slicing needs no synchronisation."""

    @classmethod
    def of(cls, ids: np.ndarray, counts: np.ndarray, device: torch.device) -> Support:
        """Make it of each token's number of entries [P] and the entries, one token after the other."""
        tokens = np.repeat(np.arange(len(counts)), counts)
        starts = np.concatenate([[0], np.cumsum(counts)])
        return cls(
            torch.from_numpy(ids.astype(np.int64)).to(device),
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(counts == 0).to(device),
            starts,
        )

    def kept(self, rows: slice, first: int, width: int) -> Tensor | None:
        """Return [rows, width] bool of the columns from entry ``first`` on; None where no row leaves any out."""
        own = slice(int(self.starts[rows.start]), int(self.starts[rows.stop]))
        if own.start == own.stop:
            return None
        column = self.ids[own] - first
        column = torch.where((column >= 0) & (column < width), column, width)  # another rank's: cut off below
        marked = self.whole[rows, None].repeat(1, width + 1)
        marked[self.tokens[own] - rows.start, column] = True
        return marked[:, :width]
