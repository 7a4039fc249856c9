"""A step's verdict for people, and for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from skyrl_megatron.entrypoints.gap.collect import Explained
from skyrl_megatron.entrypoints.gap.evidence import Way


def lines(explained: Explained) -> list[str]:
    """Return what the command prints."""
    known, verdict = explained.evidence, explained.verdict
    gap, place = known.ways[known.used], verdict.place
    nearest = "" if known.loaded == known.wanted else f", the nearest that is kept to {known.wanted}"
    table = {f"record − trainer, {_way(known.used)} (the run's way)": gap}
    table |= {f"record − trainer, {_way(way)}": other for way, other in known.ways.items() if way != known.used}
    table["engine now − trainer, engine experts"] = known.now
    table |= {f"record − trainer, version {name}": other for name, other in known.versions.items()}
    width = max(map(len, table))
    out = [
        f"step {explained.step} · weights of version {known.loaded}{nearest} · {len(explained.uids)} of "
        f"{explained.samples} samples, those with the largest gaps",
        "",
        f"{'log-probs, nats':{width}}      mean   largest",
        *(f"{name:{width}}{each.mean:>10.1e}{each.largest:>10.1e}" for name, each in table.items()),
    ]
    uid = explained.uids[gap.row]
    out += ["", f"largest gap: {gap.largest:.1e}, uid {uid}, response token {gap.token}"]
    if place is not None:
        token = "" if place.token is None else f", token {place.token} of uid {explained.uids[0]}"
        out += [f"first parting: {place.where}{token}: {place.size:.1e}"]
    elif verdict.cause != "none":
        out += ["first parting: none, engine and trainer agree now in every layer"]
    out += [f"cause: {verdict.cause}", *(f"  {reason}" for reason in verdict.why)]
    return out


def as_json(explained: Explained) -> dict[str, Any]:
    """Return everything that is known of a step, as plain values."""
    known, verdict = explained.evidence, explained.verdict
    apart = {
        name: {place: float(values.max()) for place, values in layers.apart.items()}
        for name, layers in (("in_the_runs_way", known.layers_used), ("with_the_engines_experts", known.layers_same))
    }
    plain = {
        "step": explained.step,
        "cause": verdict.cause,
        "why": verdict.why,
        "place": None if verdict.place is None else dataclasses.asdict(verdict.place),
        "uids": explained.uids,
        "used": known.used._asdict(),
        "ways": [way._asdict() | dataclasses.asdict(gap) for way, gap in known.ways.items()],
        "now": dataclasses.asdict(known.now),
        "versions": {name: dataclasses.asdict(gap) for name, gap in known.versions.items()},
        "largest_relative_difference_by_layer": apart,
    }
    kept = ("wanted", "loaded", "dtypes", "exact", "rounding", "sampled_by", "probe", "tensors")
    plain |= {name: getattr(known, name) for name in kept}
    for name in ("recorded_routes", "natural_routes"):
        diff = getattr(known, name)
        plain[name] = None if diff is None else dataclasses.asdict(diff)
    return plain


def _way(way: Way) -> str:
    return f"{way.routes} experts, {way.support} support" if way.support != "whole" else f"{way.routes} experts"
