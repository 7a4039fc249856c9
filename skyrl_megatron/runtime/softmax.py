"""Softmax over a vocabulary shard: the tokens that sampling left (top-k, top-p, min-p), and the choice of a kernel.

A pass over [1024, 65536] at once goes to memory for each of its operations; in blocks only the logits do. Functions
are those of :class:`~skyrl_megatron.runtime.softmax.Kernel`.
"""

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


class Kernel(Protocol):
    """Both passes over the logits x of n tokens, [n, v] of any float type; everything else is computed in fp32.

    ``targets``: [n] int64, the target's column, −1 where it is none of these v. ``kept``: [n, v] bool, the columns
    that the softmax is taken over, the target among them; None: all. s = (x − peak) / temperature.
    """

    def statistics(
        self, logits: Tensor, targets: Tensor, kept: Tensor | None, *, temperature: float, with_entropy: bool
    ) -> Tensor:
        """Return [4, n] fp32: peak = max x; Σ exp(s) and, for the entropy, Σ exp(s)·s, both without the target; x of
        the target, 0 where it is not here. The target stands apart, so that 1 − p of a token that is nearly certain
        comes out exactly. Without a kept column the peak is ``FLOOR``."""

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
        """Write exp(s)·(a + b·s) to ``out`` [n, v], which may be ``logits``; t at the target.

        ``coefficients``: [4, n] fp32: peak, a, b (not read without entropy), t.
        """


def kernel_for(logits: Tensor) -> Kernel:
    """Return the kernel for the device of ``logits``: Triton's on a GPU, where it is installed, else torch's."""
    return (_triton() if logits.is_cuda else None) or torch_softmax


@functools.cache
def _triton() -> Kernel | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from skyrl_megatron.runtime import triton_softmax

    return triton_softmax
