"""Gated delta nets by the Triton kernels of ``flash-linear-attention`` (package ``fla-core``), on GPUs and in 16 bits.

``delta_rule.py`` has the same functions in plain PyTorch: a loop over chunks of 64 tokens with about ten kernels each,
against about twenty kernels for a whole pack. It runs on CPU, in fp32, and where the package is missing.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.errors import SkyRLMegatronWarning, set_up

LARGEST_KEY = 256
"""Largest head dimension of keys that the kernels take (fla/ops/common/chunk_delta_h.py)."""


def use_kernels(dtype: torch.dtype, key_size: int, *, on_gpu: bool) -> bool:
    """Return whether the kernels take heads of this dtype and key size. Warns if only the package is missing."""
    return on_gpu and dtype in (torch.bfloat16, torch.float16) and key_size <= LARGEST_KEY and _installed()


@cache
def _installed() -> bool:
    if find_spec("fla") is not None:
        return True
    warnings.warn(
        f"gated delta nets run without the package fla-core, several times slower: {set_up('gpu')} installs it",
        SkyRLMegatronWarning,
        stacklevel=2,
    )
    return False


@dataclass(frozen=True, slots=True)
class Starts:
    """Where the sequences of a pack start, [sequences + 1] int64, on the device and on the host."""

    on_device: Tensor
    on_host: Tensor


# cached: all layers of a pack have the same starts, and each would copy them to the device again
@lru_cache(maxsize=64)
def sequence_starts(lengths: tuple[int, ...], device: torch.device) -> Starts:
    """Return the starts of sequences of these ``lengths``."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Starts(starts.to(device), starts)


def convolve(x: Tensor, weight: Tensor, starts: Starts) -> Tensor:
    """Apply a causal depthwise convolution within each sequence, then SiLU: [P, channels] → same shape and dtype.

    ``weight``: [channels, taps]; the last tap is that of the token itself. Computes in fp32.
    """
    kernels: Any = importlib.import_module("fla.modules.causal_conv1d")
    out: Tensor = kernels.causal_conv1d(
        # the kernels take one row with boundaries, not a batch
        x.unsqueeze(0),
        weight,
        activation="silu",
        cu_seqlens=starts.on_device,
        cu_seqlens_cpu=starts.on_host,
    )[0]
    return out.squeeze(0)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Starts) -> Tensor:
    """Run the rule on each sequence. Queries and keys are normalised in the kernel.

    Shapes are those of :func:`skyrl_megatron.runtime.model.delta_rule.gated_delta_rule`. Returns the outputs
    [P, n, r, value size], in the dtype of ``q``.
    """
    kernels: Any = importlib.import_module("fla.ops.gated_delta_rule")
    out, _ = kernels.chunk_gated_delta_rule(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.flatten(1, 2).unsqueeze(0),
        g.flatten(1).unsqueeze(0),
        beta.flatten(1).unsqueeze(0),
        # as in the reference: normalising before the kernel would round to bfloat16 in between
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=starts.on_device,
        cu_seqlens_cpu=starts.on_host,
    )
    heads: Tensor = out.squeeze(0).unflatten(1, tuple(v.shape[1:3]))
    return heads
