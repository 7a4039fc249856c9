"""The cause of a gap, from what is known of it. Pure: it asks for more where that decides (:attr:`Verdict.asks`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from skyrl_megatron.entrypoints.gap.evidence import JUMP, SOFTMAX, Divergence, Evidence, Gap, Way

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
