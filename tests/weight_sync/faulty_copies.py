"""Mistakes in a sync by the reshard plan: in the plan, and, as a worker extension, in a worker's copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from skyrl_megatron.weight_sync import point_to_point as parcel_receiver
from skyrl_megatron.weight_sync import vllm_reshard as vllm_targets
from tests.weight_sync.reshard_extension import RouteExtension

GATE = (64, 128)
"""Rows and columns of an expert's gate in the tiny model; nothing else has as many."""
_planted = [""]
_copy_all = parcel_receiver.copy_all
_prepack = vllm_targets.prepack


def with_fault(plan: Any, fault: str) -> Any:
    """A plan with a mistake, or as it is."""
    if not fault.startswith("in the plan"):
        return plan
    (worker,) = plan.workers
    copies = worker.copies.copy()
    gates = [n for n, copy in enumerate(copies) if tuple(copy[2:4]) == GATE]
    one, two = gates[0], gates[2]  # gates and ups have one shape: the gates of two experts
    if fault.endswith("offset by a row"):
        copies[one, 5] += GATE[1]
    if fault.endswith("swapped"):
        copies[[one, two], 4:] = copies[[two, one], 4:]
    if fault.endswith("skipped"):
        copies[one, 2] -= 1
    if fault.endswith("another layout"):
        copies[one, 4] += 10_000
    return replace(plan, workers=[replace(worker, copies=copies)])


class FaultyCopies(RouteExtension):
    """Copies that go wrong in the worker, where a mistake was planted."""

    def plant(self, fault: str) -> None:
        """Make this mistake from now on; none if it is in the plan."""
        _planted[0] = fault
        parcel_receiver.copy_all = copy_wrongly
        vllm_targets.prepack = pack_wrongly


def pack_wrongly(expert: Any, into: Any, isa: str) -> None:
    """Pack an expert, with the planted mistake."""
    fault = _planted[0]
    if fault.startswith("in the packing") and fault.endswith("offset by a row"):
        expert = expert.roll(1, 1)
    if not fault.startswith("in the packing") or not fault.endswith("skipped"):
        _prepack(expert, into, isa)


def copy_wrongly(targets: list[Any], pieces: list[Any]) -> None:
    """Make the copies of a bucket, with the planted mistake."""
    fault, targets, pieces = _planted[0], list(targets), list(pieces)
    gates = [n for n, piece in enumerate(pieces) if tuple(piece.shape) == GATE]
    if fault.startswith("in the worker") and len(gates) > 2:
        one, two = gates[0], gates[2]
        if fault.endswith("offset by a row"):
            pieces[one] = pieces[one].roll(1, 0)
        if fault.endswith("swapped"):
            targets[one], targets[two] = targets[two], targets[one]
        if fault.endswith("skipped"):
            targets[one].zero_()
            del targets[one], pieces[one]
        if fault.endswith("stale"):
            for piece in pieces:
                piece.fill_(0.5)
    _copy_all(targets, pieces)
