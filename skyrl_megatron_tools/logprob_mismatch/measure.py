"""Measure the log-prob mismatch of a step until the cause is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from skyrl_megatron import device
from skyrl_megatron.config.rules.rollout_rules import returns_sampling_support
from skyrl_megatron.data.batch import PREFIX, recorded_layers, routes_of
from skyrl_megatron.types import TokenSupport, TrainingBatch
from skyrl_megatron.weight_sync.probe import EPSILON, LogprobDiff, limit_of
from skyrl_megatron_tools.logprob_mismatch.diagnosis import (
    ComputeMode,
    Evidence,
    LayerDifferences,
    LogprobMismatch,
    RouteDiff,
    Routes,
    Verdict,
    diagnose,
    relative,
)
from skyrl_megatron_tools.logprob_mismatch.recorded import RecordedStep
from skyrl_megatron_tools.logprob_mismatch.replay import Hidden, Replay, differing_tensors, rows_of

VERSIONS = 8
"""Largest number of other versions to try."""


@dataclasses.dataclass(slots=True)
class MismatchReport:
    """The cause of a step's mismatch, the measurements, and the replayed samples."""

    step: int
    evidence: Evidence
    verdict: Verdict
    samples: int
    """Number of samples of the step."""
    uids: list[str]
    """The samples that both sides replayed."""
    tokens: list[list[int]]
    """Prompt and response of each replayed sample."""
    responses: list[int]
    """Response length of each replayed sample."""


class MismatchMeasurement:
    """Measures the mismatch of one step. ``keep``: how many samples to replay, those with the largest mismatch."""

    def __init__(self, replay: Replay, recorded: RecordedStep, folders: Mapping[int, str], keep: int) -> None:
        self.replay, self.recorded, self.folders, self.keep = replay, recorded, folders, keep
        batch = recorded.batch
        routes = "recorded" if replay.replays and batch.rollout_routes else "natural"
        self.used = ComputeMode(routes, "recorded" if batch.rollout_support else "whole")
        self.initial: np.ndarray | None = None
        """[R] log-probs computed as in the run, with the initial weights."""

    def measure_initial(self) -> None:
        """Compute the trainer's log-probs with the initial weights, before a checkpoint is loaded."""
        self.initial, _ = self._trainer(self.recorded.batch, self.used)

    def explain(self) -> MismatchReport:
        """Load the weights, replay the samples, compare, and determine the cause."""
        replay, recorded, loaded = self.replay, self.recorded, self._load()
        every, _ = self._trainer(recorded.batch, self.used)
        self.rows = self._worst(every)
        self.batch = recorded.batch.select(self.rows)
        probe = replay.sync()
        scores, self.routes, hidden = replay.engine(self.batch, watched=0)
        missing = not self.batch.rollout_support and returns_sampling_support(replay.cfg.generator)
        self.support = replay.engine_support(self.batch) if missing else []
        replay.offload_engine()
        evidence = self._evidence(loaded, probe, scores, hidden)
        verdict = diagnose(evidence)
        if verdict.asks == "versions":
            evidence.versions = self._versions(loaded)
            verdict = diagnose(evidence)
        elif verdict.asks == "weights":
            evidence.tensors, evidence.same_tensors = self._tensors(verdict)
            verdict = diagnose(evidence)
        uids = self.batch.uids or [str(row) for row in self.rows]
        responses = [int(count) for count in self.batch.responses.sum(self.batch.response_mask).tolist()]
        return MismatchReport(recorded.step, evidence, verdict, len(every), uids, rows_of(self.batch), responses)

    # ------------------------------------------------------------------ the trainer
    def _load(self) -> int:
        wanted = self.recorded.version
        there = [*([0] if self.replay.version == 0 else []), *self.folders]
        nearest = min(there, key=lambda version: (abs(version - wanted), version))
        if nearest != self.replay.version:
            self.replay.load(nearest, self.folders[nearest])
        return nearest

    def _trainer(self, batch: TrainingBatch, way: ComputeMode, **options: Any) -> tuple[np.ndarray, list[Hidden]]:
        """Return (log-probs [R], recorded values of each row) of the trainer in a mode."""
        routes: dict[str, Routes] = {"natural": [], "recorded": batch.rollout_routes}
        support: dict[str, list[TokenSupport]] = {"whole": [], "recorded": batch.rollout_support}
        if way.routes == "engine":
            routes["engine"] = self.routes
        if way.support == "engine":
            support["engine"] = self.support
        changed = dataclasses.replace(  # a batch of its own: what is in the object store has other routes
            batch, carried=None, rollout_routes=list(routes[way.routes]), rollout_support=support[way.support]
        )
        return self.replay.trainer(changed, **options)

    def _worst(self, every: np.ndarray) -> np.ndarray:
        """Return the rows with the largest mismatch, the largest first."""
        batch = self.recorded.batch
        assert batch.rollout_logprobs is not None
        apart = np.abs(every - batch.rollout_logprobs.numpy()) * batch.loss_mask.numpy()
        largest = batch.responses.largest(torch.from_numpy(np.nan_to_num(apart, nan=np.inf))).numpy()
        order = np.argsort(-largest, kind="stable")
        return order[: self.keep]

    # ------------------------------------------------------------------ evidence
    def _evidence(self, loaded: int, probe: str | None, scores: np.ndarray, hidden: Hidden) -> Evidence:
        batch, used = self.batch, self.used
        assert batch.rollout_logprobs is not None
        record = batch.rollout_logprobs.numpy()
        experts = "engine" if any(routes is not None for routes in self.routes) else "natural"
        ways = {way: self._trainer(batch, way)[0] for way in self._ways(experts)}
        same = ComputeMode(experts, "whole")
        engine_dtype, trainer_dtype = self.replay.dtypes
        coarse = max((engine_dtype, trainer_dtype), key=EPSILON.__getitem__)
        plain, layers_now = self._trainer(batch, same, temperature=1.0, layers=True)
        bent, moved = self._trainer(batch, same, temperature=1.0, layers=True, perturbation=EPSILON[coarse])
        _, as_used = self._trainer(batch, used, layers=True)
        natural = self._trainer(batch, ComputeMode("natural", "whole"))[1]
        bits = self.replay.cfg.trainer.exact_rollouts and not device.driver_gpu_count()
        limits = {
            name: 0.0 if bits else max(float(relative(layers_now[0][name], moved[0][name]).max()), EPSILON[coarse])
            for name in layers_now[0]
            if not name.startswith(PREFIX)
        }
        layers = recorded_layers(natural[0])
        natural_routes = [routes_of(row, max(layers, default=0) + 1) for row in natural]
        moves = LogprobMismatch.of(plain, bent, self.batch)
        rounding, finest = (
            limit_of(coarse, LogprobDiff(moves.largest, moves.mean)),
            EPSILON["float32"] / EPSILON[coarse],
        )
        return Evidence(
            step=self.recorded.step,
            wanted=self.recorded.version,
            loaded=loaded,
            dtypes=(engine_dtype, trainer_dtype),
            bits=bits,
            exact=0.0 if bits else limit_of("float32", LogprobDiff(moves.largest * finest, moves.mean * finest)),
            rounding=0.0 if bits else rounding,
            finest=finest,
            used=used,
            ways={way: LogprobMismatch.of(record, logprobs, self.batch) for way, logprobs in ways.items()},
            now=LogprobMismatch.of(scores, plain, self.batch),
            layers_used=LayerDifferences.of(as_used[0], hidden, limits),
            layers_same=LayerDifferences.of(layers_now[0], hidden, limits),
            sampled_by=self._sampled_by(),
            recorded_routes=RouteDiff.of(batch.rollout_routes or [None] * len(batch), self.routes, layers),
            natural_routes=RouteDiff.of(natural_routes, self.routes, layers) if layers else None,
            probe=probe,
        )

    def _ways(self, experts: str) -> list[ComputeMode]:
        """List the modes that the trainer can compute in."""
        batch = self.batch
        routes = ["natural", *(["recorded"] if batch.rollout_routes and self.replay.routed else []), experts]
        support = ["whole", *(["recorded"] if batch.rollout_support else []), *(["engine"] if self.support else [])]
        return [ComputeMode(r, s) for r in dict.fromkeys([self.used.routes, *routes]) for s in support]

    def _sampled_by(self) -> list[str]:
        spans = self.recorded.sampled_by
        return sorted({str(span[0]) for row in self.rows if row < len(spans) for span in spans[row]})

    # ------------------------------------------------------------------ further measurements
    def _versions(self, loaded: int) -> dict[str, LogprobMismatch]:
        """Return the mismatch of the record with other versions: the initial weights and the nearest checkpoints."""
        batch, gaps = self.batch, {}
        assert batch.rollout_logprobs is not None
        record = batch.rollout_logprobs.numpy()
        if self.initial is not None:
            initial = self.recorded.batch.responses.select(self.initial, self.rows)
            gaps["0"] = LogprobMismatch.of(record, initial, self.batch)
        near = sorted(self.folders, key=lambda version: abs(version - self.recorded.version))[:VERSIONS]
        for version in near:
            if version != loaded:
                self.replay.load(version, self.folders[version])
                gaps[str(version)] = LogprobMismatch.of(record, self._trainer(batch, self.used)[0], self.batch)
        return gaps

    def _tensors(self, verdict: Verdict) -> tuple[list[str], bool]:
        """Compare the tensors of the first layer that differs: a line for each that differs, and whether none does."""
        divergence = verdict.place
        assert divergence is not None
        trainer = self.replay.policy.layer_weights(divergence.layer)
        workers = self.replay.engine_weights(divergence.layer)
        where = "outside of the layers" if divergence.layer is None else f"in layer {divergence.layer}"
        if len(workers) > 1:
            line = f"tensors {where} were not compared: the engine splits them over {len(workers)} workers"
            return [line], False
        differing = differing_tensors(trainer, workers[0], self.replay.dtype)
        same = (
            f"all {len(trainer)} tensors {where} are bitwise equal to the trainer's: the kernels compute differently"
        )
        return differing or [same], not differing
