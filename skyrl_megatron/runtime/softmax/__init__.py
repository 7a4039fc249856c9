"""Softmax over the columns of the vocabulary that one rank has: kernels, and the choice among them."""

from __future__ import annotations

import functools
import importlib.util
from typing import Protocol

from torch import Tensor

from skyrl_megatron.runtime.softmax import torch_kernel


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
    return (_triton() if logits.is_cuda else None) or torch_kernel


@functools.cache
def _triton() -> Kernel | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from skyrl_megatron.runtime.softmax import triton_kernel

    return triton_kernel
