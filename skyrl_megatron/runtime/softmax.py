"""Softmax over a vocabulary shard: the interface of the kernels, and the tokens kept by top-k, top-p or min-p."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.runtime import torch_softmax


@dataclass(frozen=True, slots=True)
class Support:
    """The vocabulary entries that each of P tokens was sampled from. A token without entries: the whole vocabulary."""

    ids: Tensor
    """[N] int64: entries of all tokens, concatenated."""
    tokens: Tensor
    """[N] int64 in [0, P): the token of each entry."""
    whole: Tensor
    """[P] bool: tokens without entries."""
    starts: np.ndarray
    """[P + 1] int64: offsets of the tokens in ``ids``; on the host, so that slicing needs no synchronisation."""

    @classmethod
    def of(cls, ids: np.ndarray, counts: np.ndarray, device: torch.device) -> Support:
        """Build a support from the concatenated entries ``ids`` and the number of entries of each token, [P]."""
        tokens = np.repeat(np.arange(len(counts)), counts)
        starts = np.concatenate([[0], np.cumsum(counts)])
        return cls(
            torch.from_numpy(ids.astype(np.int64)).to(device),
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(counts == 0).to(device),
            starts,
        )

    def kept(self, rows: slice, first: int, width: int) -> Tensor | None:
        """Return [rows, width] bool: the kept ones of ``width`` columns from ``first``; None if all rows keep all."""
        entries = slice(int(self.starts[rows.start]), int(self.starts[rows.stop]))
        if entries.start == entries.stop:
            # no kernel needs a mask then, which saves [rows, width] bytes and a pass over them
            return None
        column = self.ids[entries] - first
        column = torch.where((column >= 0) & (column < width), column, width)  # other ranks' entries, dropped below
        # one column more, into which entries of other ranks fall: filtering them would wait for the device
        marked = self.whole[rows, None].repeat(1, width + 1)
        marked[self.tokens[entries] - rows.start, column] = True
        return marked[:, :width]


class Kernel(Protocol):
    """Forward and backward pass over the logits x of n tokens, [n, v] of any float dtype; computed in fp32.

    ``targets``: [n] int64, the target's column, −1 if it is not among these v. ``kept``: [n, v] bool, the columns over
    which the softmax is taken, including the target; None: all. s = (x − peak) / temperature.
    """

    def statistics(
        self, logits: Tensor, targets: Tensor, kept: Tensor | None, *, temperature: float, with_entropy: bool
    ) -> Tensor:
        """Return [4, n] fp32: peak = max x; Σ exp(s); for the entropy Σ exp(s)·s; x of the target, 0 if not here.

        Both sums exclude the target, so that 1 − p is exact for a token with p near 1. Without a kept column the peak
        is ``FLOOR``.
        """

    def gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        kept: Tensor | None,
        coefficients: Tensor,
        out: Tensor,
        *,
        temperature: float,
        with_entropy: bool,
    ) -> None:
        """Write exp(s)·(a + b·s) to ``out`` [n, v], and t at the target. ``out`` may be ``logits``.

        ``coefficients``: [4, n] fp32: peak, a, b (not read without entropy), t.
        """


def kernel_for(logits: Tensor) -> Kernel:
    """Return the kernel for the device of ``logits`` [n, v]: Triton's on a GPU if it is installed, else torch's."""
    return (_triton() if logits.is_cuda else None) or torch_softmax


@functools.cache
def _triton() -> Kernel | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from skyrl_megatron.runtime import triton_softmax

    return triton_softmax
