"""The gated delta rule over packed sequences in chunked form. It is a linear attention with decay and correction.

The state S [key size, value size] of a head is zero at the start of each sequence. At each token ``S ← exp(g)·S``,
``S ← S + k (β (v − Sᵀk))ᵀ``, and the output is ``Sᵀq / √(key size)`` (arXiv:2412.06464, section 3). The corrections of
a chunk of tokens are one triangular system, so only the loop over chunks is sequential (section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
_EPSILON = 1e-6  # transformers' and FLA's


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Chunks of a pack, by step: the first chunk of every sequence (longest sequence first), then the second, …"""

    tokens: Tensor
    """[chunks · CHUNK] int64: the token of each slot; arbitrary in padding slots."""
    real: Tensor
    """[chunks, CHUNK] bool: whether a slot has a token."""
    slots: Tensor
    """[P] int64: the slot of each token."""
    order: Tensor
    """[sequences] int64: the sequences, longest first."""
    active: tuple[int, ...]
    """Number of sequences, in this order, with a chunk in each step."""
    positions: Tensor
    """[P] int64: position of each token in its sequence."""


@lru_cache(maxsize=64)
def chunk_plan(lengths: tuple[int, ...], device: torch.device) -> ChunkPlan:
    """Split a pack of sequences of these ``lengths`` into chunks."""
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    # sequences that still have a chunk are then the first ``count`` rows of the state in every step
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    pieces: list[tuple[int, int]] = []
    active = []
    for step in range(-(-max(lengths) // CHUNK)):
        here = [i for i in order if lengths[i] > step * CHUNK]
        pieces += [(starts[i] + step * CHUNK, min(CHUNK, lengths[i] - step * CHUNK)) for i in here]
        active.append(len(here))
    begins, counts = (torch.tensor(column)[:, None] for column in zip(*pieces, strict=True))
    within = torch.arange(CHUNK)
    real = within < counts
    tokens = (begins + torch.minimum(within, counts - 1)).flatten()
    slots = torch.empty(sum(lengths), dtype=torch.int64)
    kept = real.flatten().nonzero().squeeze(1)
    slots[tokens[kept]] = kept
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ChunkPlan(
        tokens.to(device),
        real.to(device),
        slots.to(device),
        torch.tensor(order, device=device),
        tuple(active),
        positions.to(device),
    )


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: ChunkPlan, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the rule on each sequence.

    ``q``, ``k``: [P, n, key size]; ``v``: [P, n, r, value size], where r value heads share a key head; ``g``:
    [P, n, r], logarithm of the decay, ≤ 0; ``beta``: [P, n, r]. ``start``: [sequences, n, r, key size, value size],
    the initial states, zeros if None. Returns the outputs [P, n, r, value size] and the final states. Computes in
    fp32, or in fp64 for fp64 inputs.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    # scaled queries, as attention is
    q, k, v = (_chunks(x.to(dtype), plan) for x in (q * q.shape[-1] ** -0.5, k, v))  # [C, n, …, CHUNK, size]
    q, k = q.unsqueeze(2), k.unsqueeze(2)  # [C, n, 1, CHUNK, key size]
    real = plan.real[:, None, None]
    g, beta = (_chunks(x.to(dtype).unsqueeze(-1), plan).squeeze(-1).where(real, 0.0) for x in (g, beta))
    beta = beta.unsqueeze(-1)
    total = g.cumsum(-1)  # [C, n, r, CHUNK]
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    # The future is masked before the exponential, which would overflow there.
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(future, -torch.inf).exp()
    since_start, until_end = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    system = k @ k.mT * decay * beta
    wanted = torch.cat([v * beta, k * beta * since_start], -1)
    # a triangular system instead of a loop over tokens: the rule's corrections depend on all earlier ones
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside, q, k, kept = q @ k.mT * decay, q * since_start, k * until_end, since_start[..., -1:, :]

    results: list[Tensor] = []
    ended: list[Tensor] = []
    zeros = (plan.active[0], *v.shape[1:3], k.shape[-1], v.shape[-1])
    state = v.new_zeros(zeros) if start is None else start.to(dtype)[plan.order]
    first = 0
    for count in plan.active:
        ended.append(state[count:])
        here, state = slice(first, first + count), state[:count]
        corrections = values[here] - reads[here] @ state
        results.append(q[here] @ state + inside[here] @ corrections)
        state = state * kept[here] + k[here].mT @ corrections
        first += count
    out = torch.cat(results).movedim(-2, 1).flatten(0, 1)  # [C · CHUNK, n, r, value size]
    states = torch.cat([state, *reversed(ended)])
    return out.index_select(0, plan.slots), states[plan.order.argsort()]


def l2_normalize(x: Tensor) -> Tensor:
    """Normalise the last dimension of [..., size] to L2 norm 1, in fp32."""
    x = x.float()
    normalized: Tensor = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)
    return normalized


def _chunks(x: Tensor, plan: ChunkPlan) -> Tensor:
    """Gather [P, …, size] into chunks [C, …, CHUNK, size]."""
    cut: Tensor = x.index_select(0, plan.tokens).unflatten(0, (-1, CHUNK)).movedim(1, -2)
    return cut


def short_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Apply a causal depthwise convolution within each sequence: [P, channels] → same shape and dtype.

    ``weight``: [channels, taps]; the last tap is that of the token itself. Computes in fp32 or wider.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    values, weight = x.to(dtype), weight.to(dtype)
    out = values * weight[:, -1]
    for back in range(1, weight.shape[1]):
        # the start of a sequence must not see the end of the one before it in the pack
        before = F.pad(values[:-back], (0, 0, back, 0)) if back < len(values) else torch.zeros_like(values)
        out = out + before.masked_fill((positions < back)[:, None], 0.0) * weight[:, -1 - back]
    return out.to(x.dtype)
