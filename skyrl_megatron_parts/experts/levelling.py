"""Level the load of expert-parallel ranks within each micro-batch, from routes that are known before the pass.

The replicas that share one set of experts exchange tokens in every expert layer, and each layer ends when the busiest
EP rank does. With n[m, l, e] the tokens that EP rank e gets in layer l of micro-batch m, the time of the expert layers
is proportional to Σ_m Σ_l max_e n[m, l, e]. Which rows are in a micro-batch changes n, and neither loss nor gradient,
whose denominators are those of the whole step. So rows are regrouped under the same limits: the number of
micro-batches, their tokens, and with a fixed number of rows also that.

**Bound.** For every grouping, Σ_m max_e n[m, l, e] ≥ max_e Σ_m n[m, l, e], as the maximum of a sum is at most the sum
of the maxima. The right side is the load of the whole batch: if all sequences prefer the experts of one rank, no
grouping helps, and only moving experts does. Equality needs the batch's mix in each micro-batch, so that is the aim.

**Method.** Rows of all replicas, longest first, join the micro-batch where they lower the distance from the mix most:
the score is v·D + c·C with v the row's load minus the mix of a row of its length, D the sum of v in the micro-batch, c
and C the same of the work outside of the experts, which all replicas should share evenly too. This is the greedy
minimisation of Σ_m |D|² by its gradient. The shortest rows fill the micro-batches by tokens alone. All numbers are
whole and below 2^53, so every rank gets the same plan to the bit on any processor.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUTES = 1 << 24
"""Maximum routes (tokens × layers × experts per token) of a replica that are counted. Tokens of a larger batch are
sampled at an even stride."""
DIMENSIONS = 512
"""Maximum layers × EP ranks of a plan. A model with more is planned from layers at an even stride."""
FILLERS = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
"""Shares of the rows, the shortest, that fill micro-batches by tokens alone: the first that fits is taken."""


@dataclass(frozen=True, slots=True)
class ReplicaRows:
    """The n rows of one replica."""

    plan: list[np.ndarray]
    """Rows of each micro-batch as planned without their experts; the same number on all replicas."""
    tokens: np.ndarray
    """[n] int64, padding to the layout's alignment included."""
    work: np.ndarray
    """[n] int64: FLOPs of a row on one rank outside of the experts, in units of those of a token in one expert."""
    loads: np.ndarray
    """[n, L, E] int64: tokens that go to each of E EP ranks, in each of L layers."""


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Load of the busiest EP rank over the mean, weighted by tokens over micro-batches and layers: ≥ 1, 1 is level."""

    plain: float
    """Of the plans without experts."""
    balanced: float
    bound: float
    """The lowest that any grouping of these rows can have; moving experts may lower it."""


def planned_layers(layers: Sequence[int], ranks: int) -> list[int]:
    """Return the expert layers that a plan for ``ranks`` EP ranks looks at: all, or some at an even stride."""
    stride = max(-(-len(layers) * ranks // DIMENSIONS), 1)
    return list(layers[::stride])


def rank_loads(
    routes: Sequence[np.ndarray | None], lengths: np.ndarray, layers: Sequence[int], rank_of_expert: np.ndarray
) -> np.ndarray:
    """Return the tokens of each row that go to each EP rank: [n, L, E] int64.

    ``routes``: [n] of [t, all layers, K], as ``TrainingBatch.rollout_routes``; tokens beyond the first t count as the
    row's others, and rows without routes as the mean of all rows. ``layers``: L of the model's layers.
    ``rank_of_expert``: [L, experts] int, the EP rank of each expert, from 0 to E − 1.
    """
    ranks, topk = int(rank_of_expert.max()) + 1, next((r.shape[2] for r in routes if r is not None), 1)
    table = rank_of_expert + ranks * np.arange(len(layers))[:, None]
    routed_tokens = sum(0 if route is None else len(route) for route in routes)
    stride = max(-(-routed_tokens * len(layers) * topk // ROUTES), 1)
    offsets = np.arange(len(layers))[None, :, None]
    loads = np.zeros((len(lengths), len(layers) * ranks), np.int64)
    counted = np.zeros(len(lengths), np.int64)
    for row, route in enumerate(routes):
        if route is not None and len(route):
            seen = route[::stride, list(layers)]
            counted[row] = len(seen)
            loads[row] = np.bincount(table[offsets, seen].ravel(), minlength=loads.shape[1])
    lengths = np.asarray(lengths, np.int64)
    loads = loads * lengths[:, None] // np.maximum(counted, 1)[:, None]
    unknown, seen_tokens = counted == 0, int(lengths[counted > 0].sum())
    loads[unknown] = lengths[unknown, None] * loads.sum(0) // max(seen_tokens, 1)
    by_layer: np.ndarray = loads.reshape(len(lengths), len(layers), ranks)
    return by_layer


def balance_experts(
    replicas: Sequence[ReplicaRows], *, max_tokens: int, max_rows: int | None = None
) -> tuple[list[list[np.ndarray]], Imbalance]:
    """Return (rows of each micro-batch by replica, its imbalance) for replicas that share one set of experts.

    Every replica keeps its rows and the number of its micro-batches; none gets more than ``max_tokens`` tokens or
    ``max_rows`` rows. The plans of ``replicas`` must obey these limits; they are returned if they would be faster.
    """
    plain = [replica.plan for replica in replicas]
    dealt = _deal(replicas, max_tokens, max_rows or max(len(replica.tokens) for replica in replicas))
    before, after = (_loads(replicas, plans) for plans in (plain, dealt))
    if _time(replicas, plain, before) <= _time(replicas, dealt, after):
        dealt, after = plain, before
    mean = max(float(before.sum()) / before.shape[-1], 1.0)
    maxima = (before.max(-1).sum(), after.max(-1).sum(), before.sum(0).max(-1).sum())
    return dealt, Imbalance(*(float(maximum) / mean for maximum in maxima))


def _deal(replicas: Sequence[ReplicaRows], max_tokens: int, max_rows: int) -> list[list[np.ndarray]]:
    """Deal the rows of all replicas at once, one of each replica in every step."""
    count, steps = len(replicas[0].plan), max(len(replica.tokens) for replica in replicas)
    vectors, work = _deviations(replicas)
    order = np.full((steps, len(replicas)), len(work) - 1)  # the last row has no tokens
    starts = np.cumsum([0, *(len(replica.tokens) for replica in replicas)])
    for number, replica in enumerate(replicas):
        longest_first = np.argsort(-replica.tokens, kind="stable")
        order[: len(longest_first), number] = starts[number] + longest_first
    tokens = np.concatenate([*(replica.tokens for replica in replicas), [0]]).astype(np.float64)
    everyone = np.arange(len(replicas))
    far = np.zeros((count, vectors.shape[1]))
    done, used, rows = (np.zeros((len(replicas), count)) for _ in range(3))
    chosen = np.full((steps, len(replicas)), -1)
    for step, now in enumerate(order):
        new = vectors[now]
        score = new @ far.T + done * work[now][:, None]
        score[(used + tokens[now][:, None] > max_tokens) | (rows >= max_rows)] = np.inf
        best = score.argmin(1)
        fits = np.isfinite(score[everyone, best])
        chosen[step] = np.where(fits, best, -1)
        for index in np.flatnonzero(fits):
            far[best[index]] += new[index]
        used[everyone, best] += tokens[now] * fits
        done[everyone, best] += work[now] * fits
        rows[everyone, best] += fits
    return [
        _filled(
            replica, order[: len(replica.tokens), number] - starts[number], chosen[:, number], max_tokens, max_rows
        )
        for number, replica in enumerate(replicas)
    ]


def _deviations(replicas: Sequence[ReplicaRows]) -> tuple[np.ndarray, np.ndarray]:
    """Return (v [n + 1, L · E], c [n + 1]) of all replicas' rows and of one without tokens: whole float64.

    Times add up, so squares count by the inverse of a size: of the work, and of the load of one layer, the mean of all
    layers. A single replica waits for no other; there c, at half the size of v, only keeps micro-batches evenly full.
    """
    loads = np.concatenate([replica.loads for replica in replicas])
    tokens = np.concatenate([replica.tokens for replica in replicas])
    work = np.concatenate([replica.work for replica in replicas])
    layers, flat = loads.shape[1], loads.reshape(len(loads), -1)
    vectors = flat - tokens[:, None] * flat.sum(0) // max(int(tokens.sum()), 1)
    expert = math.sqrt(float(np.square(vectors).sum()))
    other = max(math.sqrt(float(np.square(work).sum())), 1.0)
    scale = math.sqrt(expert / layers / other) if len(replicas) > 1 else expert / 2 / other
    scaled = np.rint(work * scale)
    return np.append(vectors, np.zeros((1, vectors.shape[1])), 0).astype(np.float64), np.append(scaled, 0.0)


def _filled(
    replica: ReplicaRows, order: np.ndarray, chosen: np.ndarray, max_tokens: int, max_rows: int
) -> list[np.ndarray]:
    """Return the micro-batches of one replica: its long rows as ``chosen``, the rest wherever there is most room, or
    else least. With too little room for that, the plan without experts."""
    tokens, numbers = replica.tokens[order].tolist(), chosen[: len(order)].tolist()
    dealt = numbers.index(-1) if -1 in numbers else len(order)
    for share in FILLERS:
        head = min(len(order) - int(share * len(order)), dealt)
        bins: list[list[int]] = [[] for _ in replica.plan]
        used = [0] * len(bins)
        for row, number, length in zip(order[:head].tolist(), numbers, tokens, strict=False):
            bins[number].append(row)
            used[number] += length
        rest = list(zip(order[head:].tolist(), tokens[head:], strict=True))
        for most_room in (True, False):
            if filled := _fill(bins, used, rest, max_tokens, max_rows, most_room=most_room):
                return [np.sort(np.asarray(rows, dtype=np.int64)) for rows in filled]
    return replica.plan


def _fill(
    bins: list[list[int]],
    used: list[int],
    rest: list[tuple[int, int]],
    max_tokens: int,
    max_rows: int,
    *,
    most_room: bool,
) -> list[list[int]] | None:
    """Return ``bins`` with the (row, tokens) of ``rest`` in the bin with most room, or with the least that is enough;
    None if one does not fit."""
    bins = [list(rows) for rows in bins]
    free = sorted((max_tokens - tokens, number) for number, tokens in enumerate(used) if len(bins[number]) < max_rows)
    for row, length in rest:
        index = len(free) - 1 if most_room else bisect_left(free, (length, -1))
        if not 0 <= index < len(free) or free[index][0] < length:
            return None
        room, number = free.pop(index)
        bins[number].append(row)
        if len(bins[number]) < max_rows:
            insort(free, (room - length, number))
    return bins


def _loads(replicas: Sequence[ReplicaRows], plans: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Return the tokens of each micro-batch, over all replicas: [M, L, E] int64."""
    found = np.zeros((len(plans[0]), *replicas[0].loads.shape[1:]), np.int64)
    for replica, plan in zip(replicas, plans, strict=True):
        for number, rows in enumerate(plan):
            found[number] += replica.loads[rows].sum(0)
    return found


def _time(replicas: Sequence[ReplicaRows], plans: Sequence[Sequence[np.ndarray]], loads: np.ndarray) -> int:
    """Return the time of a pass in units of a token in one expert: layers wait for the slowest replica and EP rank."""
    work = [[int(replica.work[rows].sum()) for rows in plan] for replica, plan in zip(replicas, plans, strict=True)]
    slowest: int = sum(max(each) for each in zip(*work, strict=True))
    return slowest + int(loads.max(-1).sum())
