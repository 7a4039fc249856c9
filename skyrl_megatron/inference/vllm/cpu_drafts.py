"""Drafted tokens on CPU. vLLM 0.32 widens temperatures, top-k and top-p of requests to their drafted tokens by a
kernel for integers, whose result is dropped (``vllm/utils/cpu_triton_utils.py``): tokens are then sampled, and their
log-probs taken, at whatever temperature the memory happened to hold."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler


def widen_temperatures_on_cpu() -> None:
    """Give each drafted token what its request asks for."""
    rejection_sampler.expand_batch_to_tokens = widened


def widened(values: Tensor, ends: Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """Return each request's value, ``replace_to`` for ``replace_from``, once for each of its tokens: [tokens].
    ``values``: [requests]; ``ends``: [requests], the number of tokens up to and with each one's.

    >>> widened(torch.tensor([0.5, 0.0]), torch.tensor([1, 3]), 3, 0, 1)
    tensor([0.5000, 1.0000, 1.0000])
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    return replaced.repeat_interleave(counts.long(), output_size=tokens)
