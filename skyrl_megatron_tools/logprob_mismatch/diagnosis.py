"""Determine the cause of a log-prob mismatch from measurements, and request further ones if they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from skyrl_megatron.types import TrainingBatch

type Routes = Sequence[np.ndarray | None]
"""Experts [n, L, K] of the first n tokens of each sample; None: unknown."""

SINGLE_TOKENS = 10.0
"""Allowed difference of a single token, as a multiple of the allowed mean."""
JUMP = 16.0
"""A layer's output differs by more than rounding if the difference is this many times the effect of rounding."""
SOFTMAX = "the softmax"
"""Place of the first difference if every layer agrees."""


class ComputeMode(NamedTuple):
    """How the trainer computes log-probs: with which experts, and over which part of the vocabulary."""

    routes: str
    """``natural`` (the trainer's own), ``recorded``, or ``engine`` (those that the engine chooses now)."""
    support: str
    """``whole``, ``recorded``, or ``engine`` (the tokens that the engine would sample from now)."""


@dataclass(frozen=True, slots=True)
class LogprobMismatch:
    """|one − other| of log-probs over the sampled tokens, nats."""

    mean: float
    largest: float
    row: int
    """Index of the replayed sample with the largest difference."""
    token: int
    """Index of its response token, from 0."""

    @classmethod
    def of(cls, one: np.ndarray, other: np.ndarray, batch: TrainingBatch) -> LogprobMismatch:
        """Compare log-probs [R] of the rows of ``batch`` where they are trained on. NaN counts as infinite."""
        mask = batch.loss_mask.numpy()
        apart = np.where(mask, np.nan_to_num(np.abs(one.astype(np.float64) - other), nan=np.inf), 0.0)
        row, token = batch.responses.row_of(position := int(apart.argmax()))
        first = int(mask[batch.responses.of(row)].argmax())
        return cls(float(apart.sum() / max(int(mask.sum()), 1)), float(apart[position]), row, token - first)

    def within(self, limit: float) -> bool:
        """Return whether rounding explains the mismatch. ``limit``: the mean effect of rounding on log-probs."""
        return self.mean <= limit and self.largest <= SINGLE_TOKENS * limit


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two computations differ."""

    where: str
    """For example ``layer 3, mlp``."""
    layer: int | None
    token: int | None
    """Index in the sample, from 0."""
    size: float
    """Relative difference of that token's hidden state: ‖one − other‖ / ‖one‖."""
    before: float
    """Largest relative difference of any token in the places before."""


@dataclass(frozen=True, slots=True)
class LayerDifferences:
    """Relative differences between two computations of one sample, by place in execution order."""

    apart: Mapping[str, np.ndarray]
    """Place (as in ``runtime/recording.py``) → [n] relative difference of each token."""
    limits: Mapping[str, float]
    """Place → relative effect of rounding."""

    @classmethod
    def of(
        cls, one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], limits: Mapping[str, float]
    ) -> LayerDifferences:
        """Compare hidden states [n, H] at the places that both have."""
        names = sorted(one.keys() & other.keys(), key=execution_order)
        return cls({name: relative(one[name], other[name]) for name in names}, limits)

    def first(self, times: float = JUMP) -> Divergence | None:
        """Return the first place that differs by more than ``times`` the effect of rounding."""
        before = 0.0
        for name, apart in self.apart.items():
            beyond = np.flatnonzero(~(apart <= times * self.limits.get(name, 0.0)))
            if beyond.size:
                token = int(beyond[0])
                return Divergence(place_name(name), layer_of(name), token, float(apart[token]), before)
            before = max(before, float(apart.max(initial=0.0)))
        return None


def relative(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return ‖one − other‖ / ‖one‖ of each token, [n]."""
    scale = np.linalg.norm(one.astype(np.float64), axis=-1)
    apart: np.ndarray = np.linalg.norm(one.astype(np.float64) - other, axis=-1)
    return apart / np.maximum(scale, np.finfo(np.float32).tiny)


def layer_of(name: str) -> int | None:
    """Return the layer of a place; None outside of the layers."""
    head = name.partition(".")[0]
    return int(head) if head.isdigit() else None


def execution_order(name: str) -> tuple[float, int]:
    """Return a sort key for places in the order of a forward pass."""
    layer, part = layer_of(name), name.partition(".")[2]
    if layer is None:
        return (-1.0 if name == "embedding" else float("inf"), 0)
    return layer, ("attention", "mlp", "output").index(part)


def place_name(name: str) -> str:
    """Return the name of a place for messages."""
    layer, part = layer_of(name), name.partition(".")[2]
    return {"embedding": "the first layer's input", "norm": "the last norm"}.get(name, f"layer {layer}, {part}")


@dataclass(frozen=True, slots=True)
class RouteDiff:
    """Tokens × layers at which two sources of routes disagree."""

    share: float
    layer: int | None = None
    """The first such layer of :attr:`token`."""
    token: int | None = None
    """The first such token."""

    @classmethod
    def of(cls, one: Routes, other: Routes, layers: Sequence[int]) -> RouteDiff:
        """Compare sets of experts, [n, L, K] per sample, at the tokens that both have."""
        count, wrong, first = 0, 0, None
        for a, b in zip(one, other, strict=True):
            if a is None or b is None:
                continue
            n = min(len(a), len(b))
            differs = (np.sort(a[:n, layers], -1) != np.sort(b[:n, layers], -1)).any(-1)
            count, wrong = count + differs.size, wrong + int(differs.sum())
            if first is None and differs.any():
                token, layer_index = np.argwhere(differs)[0]
                first = (layers[int(layer_index)], int(token))
        return cls(wrong / max(count, 1), *(first or (None, None)))


@dataclass(slots=True)
class Evidence:
    """All measurements of a step's mismatch. "Now" means: recomputed with version :attr:`loaded`."""

    step: int
    wanted: int
    """The version that the step should have been sampled with."""
    loaded: int
    """The version that trainer and engine have now: the wanted one, or the nearest checkpoint."""
    dtypes: tuple[str, str]
    """The engine's and the trainer's weight dtypes."""
    exact: float
    """Mean effect of fp32 rounding on log-probs, nats."""
    rounding: float
    """Mean effect of rounding to the coarser of the two dtypes, nats."""
    finest: float
    """fp32 epsilon divided by that of the coarser dtype."""
    used: ComputeMode
    """How the run's trainer computed."""
    ways: dict[ComputeMode, LogprobMismatch]
    """Each way in which the trainer can compute → its mismatch with the recorded log-probs."""
    now: LogprobMismatch
    """Engine now − trainer with the engine's experts, over the whole vocabulary at temperature 1."""
    layers_used: LayerDifferences
    """Engine now − trainer as in the run, for the sample with the largest mismatch."""
    layers_same: LayerDifferences
    """Engine now − trainer with the engine's experts, for the same sample."""
    sampled_by: list[str] = field(default_factory=list)
    """Versions in the record."""
    recorded_routes: RouteDiff | None = None
    """The recorded experts compared with those that the engine chooses now."""
    natural_routes: RouteDiff | None = None
    """The trainer's own experts compared with those that the engine chooses now."""
    probe: str | None = None
    """The message of the weight sync's probe, if it failed."""
    versions: dict[str, LogprobMismatch] = field(default_factory=dict)
    """Other versions → the trainer's mismatch with the recorded log-probs; empty until they are measured."""
    tensors: list[str] = field(default_factory=list)
    """Tensors of the first differing layer that differ in the engine; empty until they are compared."""
    same_tensors: bool = False
    """Whether :attr:`tensors` was compared and none differs."""
    bits: bool = False
    """Whether engine and trainer should agree bit for bit (``trainer.exact_rollouts``). The limits are then 0."""


Cause = Literal[
    "none",
    "routes",
    "sampling support",
    "precision",
    "stale version",
    "wrong weight",
    "other operations",
    "several",
    "unknown",
]

VANISHES = 4.0
"""A mismatch has vanished when it is this many times smaller, if one side computes in less than fp32."""


@dataclass(slots=True)
class Verdict:
    """The cause of a mismatch, and the reasons for it."""

    cause: Cause
    why: list[str] = field(default_factory=list)
    place: Divergence | None = None
    """The first place where engine and trainer differ."""
    asks: Literal["versions", "weights"] | None = None
    """A further measurement that would tell more."""


def diagnose(evidence: Evidence) -> Verdict:
    """Determine the cause.

    - Routes or sampling support: with other routes or another support, the mismatch vanishes.
    - Wrong weight: with the same experts on both sides, a layer's output differs although its input agrees.
    - Other operations: the same, and the tensors of the layer are equal (``trainer.exact_rollouts``).
    - Stale version: trainer and engine agree now, but not with the record.
    - Precision: no layer jumps, and the differences are within the effect of rounding to the coarser dtype.
    """
    gap = evidence.ways[evidence.used]
    if gap.within(evidence.exact) and evidence.now.within(evidence.exact):
        return Verdict("none", [f"recorded log-probs, trainer and engine agree to rounding ({_format_mismatch(gap)})"])
    if not gap.within(evidence.exact) and (vanishing := _vanishing_mode(evidence, gap)) is not None:
        return vanishing
    if jump := evidence.layers_same.first():
        return _wrong_weight(evidence, gap, jump)
    if not gap.within(evidence.rounding) and evidence.now.within(evidence.rounding):
        return _stale(evidence, gap)
    if evidence.now.within(evidence.rounding):
        return _precision(evidence, gap)
    if evidence.bits:
        why = [f"every layer agrees bit for bit; log-probs now differ by {_format_mismatch(evidence.now)}"]
        return Verdict(
            "other operations", why, Divergence(SOFTMAX, None, evidence.now.token, evidence.now.largest, 0.0)
        )
    return Verdict(
        "unknown",
        [f"engine and trainer now differ by {_format_mismatch(evidence.now)}, and no layer jumps", *_probe(evidence)],
        evidence.layers_same.first(1.0),
    )


def _vanishing_mode(evidence: Evidence, gap: LogprobMismatch) -> Verdict | None:
    """Find the mode with the fewest changes in which the mismatch vanishes."""
    used = evidence.used
    vanishing = [
        mode
        for mode, other in evidence.ways.items()
        if other.within(evidence.exact) or (other.within(evidence.rounding) and other.mean * VANISHES <= gap.mean)
    ]
    if not vanishing:
        return None
    mode = min(
        vanishing, key=lambda mode: ((mode.routes != used.routes) + (mode.support != used.support), mode.routes)
    )
    why = [f"as in the run ({_mode_name(used)}), the mismatch is {_format_mismatch(gap)}"]
    why += [f"{_mode_name(mode)}: {_format_mismatch(evidence.ways[mode])}"]
    cause: Cause = "routes" if mode.support == used.support else "sampling support"
    if mode.routes != used.routes and mode.support != used.support:
        cause = "several"
    divergence = evidence.layers_used.first() if mode.routes != used.routes else None
    if cause == "sampling support":
        divergence = divergence or Divergence(SOFTMAX, None, None, gap.largest, 0.0)
        why += ["every layer agrees: the trainer normalizes over other tokens than those that were sampled from"]
    for name, diff in (("the recorded", evidence.recorded_routes), ("the trainer's own", evidence.natural_routes)):
        if mode.routes != used.routes and diff is not None:
            first = "" if diff.token is None else f", first at token {diff.token}, layer {diff.layer}"
            why.append(f"{name} experts differ from the engine's at {diff.share:.2%} of tokens × layers{first}")
    return Verdict(cause, why, divergence)


def _wrong_weight(evidence: Evidence, gap: LogprobMismatch, jump: Divergence) -> Verdict:
    why = [
        f"with the same experts on both sides, {jump.where} differs by {jump.size:.1e} at token {jump.token}, while "
        f"everything before it agrees within {jump.before:.1e}",
        f"engine and trainer now differ by {_format_mismatch(evidence.now)}; the record by {_format_mismatch(gap)}",
        *_probe(evidence),
        *evidence.tensors,
    ]
    cause: Cause = "other operations" if evidence.bits and evidence.same_tensors else "wrong weight"
    return Verdict(cause, why, jump, None if evidence.tensors else "weights")


def _stale(evidence: Evidence, gap: LogprobMismatch) -> Verdict:
    why = [
        f"engine and trainer now agree on version {evidence.loaded} ({_format_mismatch(evidence.now)}), but the "
        f"record differs by {_format_mismatch(gap)}",
        f"the record contains version {', '.join(evidence.sampled_by) or 'none'}; step {evidence.step} must be "
        f"sampled with version {evidence.wanted}",
    ]
    if not evidence.versions:
        return Verdict("stale version", why, asks="versions")
    name, best = min(evidence.versions.items(), key=lambda item: item[1].mean)
    if best.within(evidence.rounding):
        return Verdict("stale version", [*why, f"the record matches version {name}: {_format_mismatch(best)}"])
    why += [f"the nearest of the saved versions ({', '.join(evidence.versions)}) is {name}: {_format_mismatch(best)}"]
    return Verdict("stale version" if evidence.loaded != evidence.wanted else "unknown", why)


def _precision(evidence: Evidence, gap: LogprobMismatch) -> Verdict:
    engine, trainer = evidence.dtypes
    why = [
        f"the engine computes in {engine}, the trainer in {trainer}",
        f"record {_format_mismatch(gap)}, engine now {_format_mismatch(evidence.now)}; rounding alone causes "
        f"{evidence.rounding:.1e} on average",
        "differences grow gradually from layer to layer",
    ]
    return Verdict("precision", why, evidence.layers_same.first(JUMP * evidence.finest))


def _probe(evidence: Evidence) -> list[str]:
    return [f"the weight sync rejected the engine: {evidence.probe}"] if evidence.probe else []


def _mode_name(mode: ComputeMode) -> str:
    of = {"natural": "the trainer's own", "recorded": "the recorded", "engine": "the engine's"}
    over = {"whole": "the whole vocabulary", "recorded": "the recorded support", "engine": "the engine's support"}
    return f"{of[mode.routes]} experts, over {over[mode.support]}"


def _format_mismatch(gap: LogprobMismatch) -> str:
    return f"{gap.mean:.1e} on average, {gap.largest:.1e} at most"
