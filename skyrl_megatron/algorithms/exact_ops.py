"""Operations whose result for a token has the same bits in any batch, for ``trainer.exact_rollouts`` on CPU.

Engine and trainer call these functions in place of their own (``inference/vllm/exact.py``, ``runtime/``), in fp32.
Then a token's log-prob does not depend on the other tokens of a batch, on how they are packed, or on how a prompt is
cut. Three rules make it so:

- A matrix product multiplies tiles of :data:`TILE` rows. BLAS is always called with the same number of rows, and adds
  the products of one row and one column in one order. :func:`check` tests this on the machine.
- Sums are elementwise additions of halves or of pairs, in an order that only the length determines. Sums over the keys
  of a sequence add pairs, so that zeros after the last key change nothing.
- All else is elementwise, and each multiplication and addition is an operation of its own: a compiler fuses them in
  some elements of a tensor and not in others. The sigmoid is computed from ``exp``, because torch computes a sigmoid's
  last elements differently from the others.

Equal scores of experts are ordered by the index of the expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from skyrl_megatron.errors import ConfigError, Problem

TILE = 16
"""Rows of a matrix product."""
KEYS = 32
"""Keys of a block of attention."""
SCORES = 1 << 22
"""Attention scores that are in memory at once."""

_active = False


def use(exact: bool) -> None:
    """Let this process's trainer use these functions, or its own."""
    global _active
    _active = exact
    if exact:
        check()


def active() -> bool:
    """Return whether this process's trainer uses these functions."""
    return _active


def check() -> None:
    """Test on this machine what the rules assume of torch's kernels. Raises ConfigError if it is wrong."""
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 160, generator=random) for rows in (3 * TILE + 5, 96))
    expected, some = product(x, w), torch.randperm(len(x), generator=random)[: TILE + 3]
    # Halves of the weight too: with tensor parallelism a rank has some of its rows.
    halves = torch.cat([product(x, half.clone()) for half in w.chunk(2)], 1)
    equal = torch.equal(product(x[some], w), expected[some]) and torch.equal(halves, expected)
    # At every offset: kernels compute vectors of elements, and those at the end of a tensor one by one.
    for function in (torch.exp, torch.log):
        values = x.abs().flatten() + 0.1
        equal = equal and all(
            torch.equal(function(values[i : i + 77]), function(values)[i : i + 77]) for i in range(77)
        )
    if not equal:
        fix = "this machine's matrix products depend on the batch: set it to false"
        raise ConfigError([Problem("trainer.exact_rollouts", True, fix)])


class _Exact(torch.autograd.Function):
    """The value of one function, and the gradient of another that computes the same up to rounding."""

    @staticmethod
    def forward(ctx: Any, exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.ordinary = ordinary
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(n) for x, n in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            value = ctx.ordinary(*inputs)
        found = iter(torch.autograd.grad(value, [x for x in inputs if x.requires_grad], grads[0]))
        return None, None, *(next(found) if n else None for n in needed)


def with_gradient(exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``exact(*inputs)`` with the gradient of ``ordinary(*inputs)``; both return one shape, [...]."""
    result: Tensor = _Exact.apply(exact, ordinary, *inputs)  # type: ignore[no-untyped-call]
    return result


# ------------------------------------------------------------------ sums
def fixed_sum(x: Tensor) -> Tensor:
    """Sum the last dimension, [..., n] → [...], by adding its second half to its first."""
    while (n := x.shape[-1]) > 1:
        half = (n + 1) // 2
        # Of an odd length, the last element of the first half has no partner and stays for the next round.
        first = x[..., :half]
        x = (
            first + x[..., half:]
            if n == 2 * half
            else torch.cat([first[..., :-1] + x[..., half:], first[..., -1:]], -1)
        )
    return x[..., 0]


def growing_sum(x: Tensor) -> Tensor:
    """Sum the first dimension, [n, ...] → [...], by adding neighbours. Zeros after the end change nothing."""
    while len(x) > 1:
        even = x[: len(x) // 2 * 2]
        pairs = even[0::2] + even[1::2]
        x = pairs if len(even) == len(x) else torch.cat([pairs, x[-1:]])
    return x[0]


def serial_sum(x: Tensor) -> Tensor:
    """Sum the last dimension, [..., n] → [...], from the first element to the last."""
    total = x[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i]
    return total


# ------------------------------------------------------------------ layers
def product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weightᵀ: [n, k] × [m, k] → [n, m]. Not differentiable."""
    n, transposed = len(x), weight.t()
    out = x.new_empty(-(-n // TILE) * TILE, len(weight))
    tiled = n // TILE * TILE
    # BLAS has other kernels for other strides.
    x = x.contiguous()
    for start in range(0, tiled, TILE):
        torch.mm(x[start : start + TILE], transposed, out=out[start : start + TILE])
    if tiled < n:
        # Filled up with zeros: for fewer rows BLAS may add in another order.
        last = x.new_zeros(TILE, x.shape[1])
        last[: n - tiled] = x[tiled:]
        torch.mm(last, transposed, out=out[tiled:])
    return out[:n]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, parts: int = 1) -> Tensor:
    """Compute x @ weightᵀ + bias: [..., k] → [..., m]. Not differentiable.

    ``parts``: the sum over k is that of so many products, as when as many ranks have a part of x and of the weight.
    """
    rows = x.reshape(-1, x.shape[-1]).chunk(parts, 1)
    products = [product(a, b.contiguous()) for a, b in zip(rows, weight.chunk(parts, 1), strict=True)]
    out = products[0]
    for part in products[1:]:
        out = out + part
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], len(weight))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``x / sqrt(mean(x²) + eps) · weight`` over the last dimension: [..., n] → [..., n], weight [n]."""
    mean = fixed_sum(x * x) / x.shape[-1]
    return x * (1.0 / (mean + eps).sqrt()).unsqueeze(-1) * weight


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(−x)) elementwise, [...] → [...]."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """Compute x · sigmoid(x) elementwise, [...] → [...]."""
    return x * sigmoid(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate pairs of the first entries of ``x`` [n, heads, size] by ``cos``, ``sin`` [n, 1, pairs].

    A pair is two adjacent entries if ``interleaved``, else entries of two halves. Other entries are unchanged.
    """
    width = 2 * cos.shape[-1]
    turned = x[..., :width]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    one, other = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack([one, other], -1).flatten(-2) if interleaved else torch.cat([one, other], -1)
    return joined if width == x.shape[-1] else torch.cat([joined, x[..., width:]], -1)


def log_softmax(logits: Tensor) -> Tensor:
    """Compute the log-softmax over the last dimension, [..., V]. Excluded entries are −∞."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - fixed_sum(torch.exp(shifted)).log().unsqueeze(-1)


# ------------------------------------------------------------------ experts
def expert_scores(logits: Tensor, *, softmax: bool) -> Tensor:
    """Return the softmax or the sigmoid of a router's logits, [n, E]."""
    if not softmax:
        return with_gradient(sigmoid, torch.sigmoid, logits)
    weights = torch.exp(logits - logits.amax(-1, keepdim=True).detach())
    return weights / fixed_sum(weights).unsqueeze(-1)


def best_experts(scores: Tensor, k: int) -> Tensor:
    """Return the experts with the ``k`` largest scores, [n, E] → [n, k]; of equal scores, the lower index."""
    # Not topk: it leaves open which of equal scores comes first.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def expert_weights(scores: Tensor, experts: Tensor, *, normalise: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the weights of the chosen experts, and these in ascending order, [n, k] each."""
    # By index, the order in which the outputs of the experts are added.
    experts = experts.sort(dim=-1).values
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / (serial_sum(weights) + 1e-20).unsqueeze(-1)
    return (weights * scale if scale else weights), experts


# ------------------------------------------------------------------ attention
def attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Sequence[int], keys: Sequence[int], scale: float
) -> Tensor:
    """Attend causally in each sequence: query [t, H, d], key and value [u, G, d] → [t, H, d]. Not differentiable.

    ``queries``, ``keys``: tokens of each sequence, t and u in total; the queries are its last tokens.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    alike: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    t = u = 0
    for n, m in zip(queries, keys, strict=True):
        # The number of key blocks is rounded up to a power of two, so that more sequences share a call. The keys added
        # have weight 0, which `growing_sum` does not notice.
        size = (-(-n // TILE), 1 << max(-(-m // KEYS) - 1, 0).bit_length())
        alike.setdefault(size, []).append((t, n, u, m))
        t, u = t + n, u + m
    for (tiles, blocks), members in alike.items():
        if tiles:
            together = max(1, SCORES // (query.shape[1] * TILE * KEYS * blocks))
            for start in range(0, len(members), together):
                _attend_alike(query, key, value, out, members[start : start + together], tiles, blocks, scale)
    return out


def _attend_alike(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    members: Sequence[tuple[int, int, int, int]],
    tiles: int,
    blocks: int,
    scale: float,
) -> None:
    """Attend in sequences of similar size; ``members``: first query, queries, first key, keys."""
    t, n, u, m = (x[:, None] for x in torch.tensor(members).unbind(1))
    steps, places = torch.arange(tiles * TILE), torch.arange(blocks * KEYS)
    # Past the end the last query and the last key are repeated: `real` drops such queries, `hidden` such keys.
    rows = (t + torch.minimum(steps, n - 1)).view(-1, tiles, TILE)
    columns = u + torch.minimum(places, m - 1)
    position = (m - n + steps).view(-1, tiles, TILE)
    real = (steps < n).view(-1, tiles, TILE)
    s, group, size = len(members), key.shape[1], key.shape[2]
    repeats = query.shape[1] // group
    by_block = [x[columns].view(s, blocks, KEYS, group, -1).permute(0, 3, 1, 4, 2) for x in (key, value)]
    k, v = by_block[0], by_block[1].transpose(-1, -2)
    together = max(1, SCORES // (s * query.shape[1] * TILE * KEYS * blocks))
    for first in range(0, tiles, together):
        part = slice(first, min(first + together, tiles))
        count = part.stop - part.start
        # Later blocks are hidden from every query of the part.
        seen = min(blocks, int(position[:, part].max()) // KEYS + 1)
        shape = (s, group, repeats, count, seen)
        q = query[rows[:, part]].view(s, count, TILE, group, repeats, size).permute(0, 3, 4, 1, 2, 5)
        scores = _bmm(q[:, :, :, :, None], k[:, :, None, None, :seen], shape) * scale
        key_position = places[: seen * KEYS].view(1, 1, seen, 1, KEYS)
        hidden = key_position > position[:, part, None, :, None]  # [s, tiles, blocks, TILE, KEYS]
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        peak = scores.amax(-1, keepdim=True).amax(4, keepdim=True)
        weights = torch.exp(scores - peak)
        total = growing_sum(fixed_sum(weights).movedim(4, 0))
        summed = growing_sum(_bmm(weights, v[:, :, None, None, :seen], shape).movedim(4, 0)) / total[..., None]
        attended = summed.permute(0, 3, 4, 1, 2, 5).flatten(3, 4)  # [s, tiles, TILE, H, d]
        out[rows[:, part][real[:, part]]] = attended[real[:, part]]


def _bmm(a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Multiply matrices in the last two dimensions after broadcasting the others to ``shape``."""
    a, b = (x.expand(*shape, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
    return torch.bmm(a, b).view(*shape, a.shape[-2], b.shape[-1])


def ordinary_attention(lengths: Sequence[int], scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return torch's attention for whole sequences of these lengths, with the arguments of :func:`attention`: query
    [t, H, d], key and value [t, G, d] → [t, H, d]."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pieces = []
        for q, k, v in zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True):
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            repeats = len(q) // len(k)
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
            pieces.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(0, 1))
        return torch.cat(pieces)

    return attend
