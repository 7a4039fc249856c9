"""Proof that two folders hold the same model: every tensor compared bit by bit, whatever kind of folder it is in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from bridges.errors import BridgeError
from bridges.plan import Plan
from bridges.source import Source, open_source
from bridges.workers import Progress

SHOWN = 10  # differences spelled out
LOGITS_GROUP = "bridges.logits"
"""Entry points of packages that can run both models: a module with ``--hf``, ``--megatron`` and ``--layout``, run by
``python -m``, that prints one JSON object as its last line."""


@dataclass
class Comparison:
    """The result of :func:`compare`. ``differences``: one line each, in the order of the names; ``ignored``: tensors
    of one side only that hold no weights of their own."""

    tensors: int = 0
    bytes: int = 0
    differences: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether every tensor is on both sides and bit-equal."""
        return not self.differences

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {"equal": self.equal, **vars(self)}


def compare(a: Path, b: Path, template: Path | None = None, stream: TextIO | None = None) -> Comparison:
    """Compare two folders, HF or Megatron each, by HF names. Raises :class:`BridgeError` if one cannot be read."""
    left, right = open_source(a, template), open_source(b, template)
    plan = Plan.of(left.config)
    shapes, other = left.shapes(), right.shapes()
    result = Comparison()
    for name in sorted(shapes.keys() ^ other.keys()):
        where, side = (a, left) if name in shapes else (b, right)
        if plan.is_ignored(name) or _repeats(plan, side, name):
            result.ignored.append(name)
        else:
            result.differences.append(f"{name} is only in {where}")
    both = [name for name in shapes if name in other]
    total = sum(_nbytes(left, name, shapes[name]) for name in both)
    progress = Progress(total, "verify", stream)
    for name in both:
        result.tensors += 1
        result.bytes += _nbytes(left, name, shapes[name])
        kinds = [(tuple(side[name]), source.dtype(name)) for side, source in ((shapes, left), (other, right))]
        if kinds[0] != kinds[1]:
            said = " and ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in kinds)
            result.differences.append(f"{name}: {said}")
        else:
            pieces = _pieces(plan, left, name), _pieces(plan, right, name)
            result.differences += _first_difference(name, *pieces, stacked=name in plan.stacked)
        progress.add(_nbytes(left, name, shapes[name]))
    progress.finish()
    result.seconds = progress.seconds
    return result


def _repeats(plan: Plan, source: Source, name: str) -> bool:
    """Return whether a tensor is declared to repeat another one, and does."""
    return name in plan.copies and same_bytes(source.read(name), source.read(plan.copies[name]))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether both are equal in dtype, shape and every bit (NaN payloads and the sign of zero included)."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_raw(a), _raw(b))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _nbytes(source: Source, name: str, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * source.dtype(name).itemsize


def _pieces(plan: Plan, source: Source, name: str) -> Iterator[Tensor]:
    """Yield the tensor, or its slices where all experts share it, so that one slice is held at a time."""
    if name in plan.stacked:
        yield from (source.read(name, expert) for expert in range(plan.hf[name][0]))
    else:
        yield source.read(name)


def _first_difference(name: str, left: Iterator[Tensor], right: Iterator[Tensor], stacked: bool) -> list[str]:
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        if not same_bytes(a, b):
            wrong = (_raw(a) != _raw(b)).reshape(-1, a.element_size()).any(dim=1)
            first = int(wrong.nonzero()[0])
            place = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)]
            place = [number, *place] if stacked else place
            values = f"{a.reshape(-1)[first].item()!r} and {b.reshape(-1)[first].item()!r}"
            return [f"{name}: {int(wrong.sum())} of {wrong.numel()} values differ, first at {place}: {values}"]
    return []


def compare_logits(hf: Path, megatron: Path, layout: str, seconds: float = 1800.0) -> dict[str, Any]:
    """Run the HF model in transformers and the checkpoint in Megatron, at ``layout`` (``tp=2,ep=2``), on one input.

    The run is a program of its own, found among the entry points of :data:`LOGITS_GROUP`: it needs process groups, and
    this package has none. Raises :class:`BridgeError` when none is installed, or it fails or takes too long.
    """
    program = next(iter(metadata.entry_points(group=LOGITS_GROUP)), None)
    if program is None:
        raise BridgeError(
            f"--logits needs an installed package with an entry point of the group {LOGITS_GROUP}; install "
            "skyrl-megatron (launch/setup.sh), or compare the tensors without --logits"
        )
    command = [sys.executable, "-m", program.module, "--hf", str(hf), "--megatron", str(megatron)]
    command += ["--layout", layout] if layout else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise BridgeError(f"comparing logits took longer than {seconds:g} s; use a smaller --layout") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise BridgeError(f"{' '.join(command[1:])} failed with exit code {done.returncode}:\n{tail}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result
