"""The cause of a log-prob mismatch, from measured differences. Asks for more measurements where they decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

type Routes = Sequence[np.ndarray | None]
"""Experts [n, L, K] of the first n tokens of each sample; None: unknown."""

SINGLE_TOKENS = 10.0
"""How many times as far as the mean may be single tokens may be apart."""
JUMP = 16.0
"""A layer's output differs by more than rounding from this many times on what rounding does to it."""
SOFTMAX = "the softmax"
"""Where log-probs part although every layer agrees."""


class Way(NamedTuple):
    """How the trainer computes: with whose experts, and over which part of the vocabulary."""

    routes: str
    """``natural`` (its own), ``recorded``, or ``engine`` (what the engine takes now)."""
    support: str
    """``whole``, ``recorded``, or ``engine`` (what the engine would sample from now)."""


@dataclass(frozen=True, slots=True)
class Gap:
    """|one − other| of log-probs over sampled tokens, nats."""

    mean: float
    largest: float
    row: int
    """Sample of the largest, in the order of the replayed ones."""
    token: int
    """Response token of the largest, from 0."""

    @classmethod
    def of(cls, one: np.ndarray, other: np.ndarray, mask: np.ndarray) -> Gap:
        """Compare [B, T] where ``mask`` [B, T] is set; responses are right-aligned. NaN is further than anything."""
        apart = np.where(mask > 0, np.nan_to_num(np.abs(one.astype(np.float64) - other), nan=np.inf), 0.0)
        row, column = (int(each) for each in np.unravel_index(apart.argmax(), apart.shape))
        first = int(np.flatnonzero(mask[row])[0]) if mask[row].any() else 0
        mean = float(apart.sum() / max(float((mask > 0).sum()), 1.0))
        return cls(mean, float(apart[row, column]), row, column - first)

    def within(self, limit: float) -> bool:
        """Return whether rounding explains it, which moves log-probs by ``limit`` on average."""
        return self.mean <= limit and self.largest <= SINGLE_TOKENS * limit


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two computations part first."""

    where: str
    """Such as ``layer 3, mlp``."""
    layer: int | None
    token: int | None
    """In the sample, from 0."""
    size: float
    """Relative: ‖one − other‖ / ‖one‖ of that token's hidden state there."""
    before: float
    """The largest such difference of all tokens before that place."""


@dataclass(frozen=True, slots=True)
class Layers:
    """How far two computations of one sample are apart, place by place in their order."""

    apart: Mapping[str, np.ndarray]
    """Name (as in ``runtime/profiling.py``) → [n] relative difference of each token."""
    limits: Mapping[str, float]
    """Name → what rounding does there."""

    @classmethod
    def of(cls, one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], limits: Mapping[str, float]) -> Layers:
        """Compare hidden states [n, H] by name, of the names that both have."""
        names = sorted(one.keys() & other.keys(), key=in_order)
        return cls({name: relative(one[name], other[name]) for name in names}, limits)

    def first(self, times: float = JUMP) -> Divergence | None:
        """Return the first place that differs by more than ``times`` what rounding does to it."""
        before = 0.0
        for name, apart in self.apart.items():
            beyond = np.flatnonzero(~(apart <= times * self.limits.get(name, 0.0)))
            if beyond.size:
                token = int(beyond[0])
                return Divergence(told(name), layer_of(name), token, float(apart[token]), before)
            before = max(before, float(apart.max(initial=0.0)))
        return None


def relative(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return ‖one − other‖ / ‖one‖ of each token, [n]."""
    scale = np.linalg.norm(one.astype(np.float64), axis=-1)
    apart: np.ndarray = np.linalg.norm(one.astype(np.float64) - other, axis=-1)
    return apart / np.maximum(scale, np.finfo(np.float32).tiny)


def layer_of(name: str) -> int | None:
    """Return the layer of a recorded place."""
    head = name.partition(".")[0]
    return int(head) if head.isdigit() else None


def in_order(name: str) -> tuple[float, int]:
    """Sort places as a pass comes to them."""
    layer, part = layer_of(name), name.partition(".")[2]
    if layer is None:
        return (-1.0 if name == "embedding" else float("inf"), 0)
    return layer, ("attention", "mlp", "output").index(part)


def told(name: str) -> str:
    """Say which place a recorded one is."""
    layer, part = layer_of(name), name.partition(".")[2]
    return {"embedding": "the first layer's input", "norm": "the last norm"}.get(name, f"layer {layer}, {part}")


@dataclass(frozen=True, slots=True)
class RouteDiff:
    """Tokens × layers that two witnesses send to other experts."""

    share: float
    layer: int | None = None
    """The first of the first token."""
    token: int | None = None

    @classmethod
    def of(cls, one: Routes, other: Routes, layers: Sequence[int]) -> RouteDiff:
        """Compare sets of experts, [n, L, K] a sample, at the tokens that both know."""
        count, wrong, first = 0, 0, None
        for a, b in zip(one, other, strict=True):
            if a is None or b is None:
                continue
            n = min(len(a), len(b))
            differs = (np.sort(a[:n, layers], -1) != np.sort(b[:n, layers], -1)).any(-1)
            count, wrong = count + differs.size, wrong + int(differs.sum())
            if first is None and differs.any():
                token, place = np.argwhere(differs)[0]
                first = (layers[int(place)], int(token))
        return cls(wrong / max(count, 1), *(first or (None, None)))


@dataclass(slots=True)
class Evidence:
    """All that is known of a step's gap."""

    step: int
    wanted: int
    """The version that the step should have been sampled with."""
    loaded: int
    """The version that trainer and engine have now: the wanted one, or the nearest that is kept."""
    dtypes: tuple[str, str]
    """Of the engine's and of the trainer's weights."""
    exact: float
    """How far fp32 rounding takes log-probs on average, nats."""
    rounding: float
    """How far rounding to the coarser of the two types does."""
    finest: float
    """fp32 rounding over that of the coarser type."""
    used: Way
    """How the run's trainer computed."""
    ways: dict[Way, Gap]
    """The trainer's ways → how far they are from the recorded log-probs."""
    now: Gap
    """Engine now against trainer with the engine's experts, over the whole vocabulary at temperature 1."""
    layers_used: Layers
    """Engine now against trainer in the run's way, of the sample with the largest gap …"""
    layers_same: Layers
    """… and with the engine's experts."""
    sampled_by: list[str] = field(default_factory=list)
    """Versions that the record names."""
    recorded_routes: RouteDiff | None = None
    """The recorded experts against those that the engine takes now."""
    natural_routes: RouteDiff | None = None
    """The trainer's own against what the engine takes now."""
    probe: str | None = None
    """What the weight sync said, if it refused."""
    versions: dict[str, Gap] = field(default_factory=dict)
    """Other versions' weights in the trainer → how far from the recorded log-probs, once they were looked at."""
    tensors: list[str] = field(default_factory=list)
    """Tensors of the first diverging layer that the engine holds otherwise, once they were compared."""


Cause = Literal[
    "none", "routes", "sampling support", "precision", "stale version", "wrong weight", "several", "unknown"
]

VANISHES = 4.0
"""A gap is gone when it is so many times smaller, where one of the two sides rounds to less than fp32."""


@dataclass(slots=True)
class Verdict:
    """What is to blame, and why that is known."""

    cause: Cause
    why: list[str] = field(default_factory=list)
    place: Divergence | None = None
    """Where engine and trainer part first."""
    asks: Literal["versions", "weights"] | None = None
    """What would tell more, where it was not looked at."""


def diagnose(known: Evidence) -> Verdict:
    """Name the cause.

    Routes and support are told by what makes the gap vanish; a stale version by trainer and engine that agree with one
    another on the weights at hand and not with the record; a wrong weight by a layer whose output jumps although its
    input agrees, with the same experts on both sides; precision by differences that never jump and stay within what
    rounding to the coarser type does to this model.
    """
    gap = known.ways[known.used]
    if gap.within(known.exact) and known.now.within(known.exact):
        return Verdict("none", [f"recorded log-probs, trainer and engine agree to rounding ({_told(gap)})"])
    if not gap.within(known.exact) and (found := _another_way(known, gap)) is not None:
        return found
    if jump := known.layers_same.first():
        return _wrong_weight(known, gap, jump)
    if not gap.within(known.rounding) and known.now.within(known.rounding):
        return _stale(known, gap)
    if known.now.within(known.rounding):
        return _precision(known, gap)
    return Verdict(
        "unknown",
        [f"engine and trainer differ now by {_told(known.now)}, and no layer jumps", *_probe(known)],
        known.layers_same.first(1.0),
    )


def _another_way(known: Evidence, gap: Gap) -> Verdict | None:
    """Look for a way to compute that makes the gap vanish, the one with fewest changes."""
    used = known.used
    vanishing = [
        way
        for way, other in known.ways.items()
        if other.within(known.exact) or (other.within(known.rounding) and other.mean * VANISHES <= gap.mean)
    ]
    if not vanishing:
        return None
    way = min(vanishing, key=lambda way: ((way.routes != used.routes) + (way.support != used.support), way.routes))
    why = [f"in the run's way ({_way(used)}) the gap is {_told(gap)}"]
    why += [f"{_way(way)}: {_told(known.ways[way])}"]
    cause: Cause = "routes" if way.support == used.support else "sampling support"
    if way.routes != used.routes and way.support != used.support:
        cause = "several"
    place = known.layers_used.first() if way.routes != used.routes else None
    if cause == "sampling support":
        place = place or Divergence(SOFTMAX, None, None, gap.largest, 0.0)
        why += ["every layer agrees: log-probs are taken over another part of the vocabulary than was sampled from"]
    for name, diff in (("recorded", known.recorded_routes), ("the trainer's own", known.natural_routes)):
        if way.routes != used.routes and diff is not None:
            first = "" if diff.token is None else f", first at token {diff.token}, layer {diff.layer}"
            why.append(f"{name} experts differ from the engine's at {diff.share:.2%} of tokens × layers{first}")
    return Verdict(cause, why, place)


def _wrong_weight(known: Evidence, gap: Gap, jump: Divergence) -> Verdict:
    why = [
        f"with the same experts on both sides {jump.where} jumps to {jump.size:.1e} at token {jump.token}, while all "
        f"before it agrees within {jump.before:.1e}",
        f"engine and trainer differ now by {_told(known.now)}; the record by {_told(gap)}",
        *_probe(known),
        *known.tensors,
    ]
    return Verdict("wrong weight", why, jump, None if known.tensors else "weights")


def _stale(known: Evidence, gap: Gap) -> Verdict:
    why = [
        f"engine and trainer agree on version {known.loaded} now ({_told(known.now)}), the record is {_told(gap)} off",
        f"the record names version {', '.join(known.sampled_by) or 'none'}, step {known.step} is to be sampled with "
        f"{known.wanted}",
    ]
    if not known.versions:
        return Verdict("stale version", why, asks="versions")
    name, best = min(known.versions.items(), key=lambda item: item[1].mean)
    if best.within(known.rounding):
        return Verdict("stale version", [*why, f"the record is that of version {name}: {_told(best)}"])
    why += [f"nearest of the versions that are kept ({', '.join(known.versions)}): {name}, {_told(best)}"]
    return Verdict("stale version" if known.loaded != known.wanted else "unknown", why)


def _precision(known: Evidence, gap: Gap) -> Verdict:
    engine, trainer = known.dtypes
    why = [
        f"the engine computes in {engine}, the trainer in {trainer}",
        f"record {_told(gap)}, engine now {_told(known.now)}: rounding alone does {known.rounding:.1e} on average",
        "differences grow from layer to layer and never jump",
    ]
    return Verdict("precision", why, known.layers_same.first(JUMP * known.finest))


def _probe(known: Evidence) -> list[str]:
    return [f"the weight sync refused the engine: {known.probe}"] if known.probe else []


def _way(way: Way) -> str:
    of = {"natural": "the trainer's own", "recorded": "the recorded", "engine": "the engine's"}
    over = {"whole": "the whole vocabulary", "recorded": "the recorded support", "engine": "the engine's support"}
    return f"{of[way.routes]} experts, over {over[way.support]}"


def _told(gap: Gap) -> str:
    return f"{gap.mean:.1e} on average, {gap.largest:.1e} at most"
