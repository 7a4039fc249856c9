"""Convert a HF folder to a Megatron checkpoint and back, tensor by tensor, and compare two folders."""

from __future__ import annotations

import json
import math
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
from bridges.hf_io import DTYPE_NAMES, HfWriter
from bridges.plan import VISION, Plan
from bridges.rows import Shape
from bridges.rules import CheckpointLocation, Entry, checkpoint_location
from bridges.source import (
    CONVERT,
    HF_SUBFOLDER,
    PASSTHROUGH,
    SCORE,
    MegatronSource,
    Source,
    copy_assets,
    is_checkpoint,
    key_dtypes,
    model_folder,
    open_hf,
    open_source,
    output_config,
)
from bridges.staging import LocalFile, Progress, byte_blocks, in_threads, shares, staged
from bridges.torch_dist import ChunkFile, write_metadata

SHOWN = 10  # maximum number of printed differences
LOGITS_GROUP = "bridges.logits"
"""Group of entry points that can run both models. An entry point is a module for ``python -m`` with the options
``--hf``, ``--megatron`` and ``--layout``. Its last line of output is a JSON object."""


@dataclass
class Comparison:
    """The result of :func:`compare`.

    ``differences``: one line each, in the order of the names. ``ignored``: tensors of one side only that hold no
    separate weights.
    """

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
        """Return the JSON object for ``--json``."""
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
            both_kinds = " and ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in kinds)
            result.differences.append(f"{name}: {both_kinds}")
        else:
            pieces = _pieces(plan, left, name), _pieces(plan, right, name)
            result.differences += _first_difference(name, *pieces, stacked=name in plan.stacked)
        progress.add(_nbytes(left, name, shapes[name]))
    progress.finish()
    result.seconds = progress.seconds
    return result


def _repeats(plan: Plan, source: Source, name: str) -> bool:
    """Return whether a tensor is declared as a copy of another one and equals it."""
    return name in plan.copies and same_bytes(source.read(name), source.read(plan.copies[name]))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether dtype, shape […] and all bits are equal, including NaN payloads and the sign of zero."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_raw(a), _raw(b))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _nbytes(source: Source, name: str, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * source.dtype(name).itemsize


def _pieces(plan: Plan, source: Source, name: str) -> Iterator[Tensor]:
    """Yield the tensor, or the slices of a stacked tensor, so that only one slice is in memory."""
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
    """Run the HF model in transformers and the checkpoint in Megatron at ``layout`` (``tp=2,ep=2``) on one input.

    A separate program, an entry point of :data:`LOGITS_GROUP`, runs both, because this package has no process groups.
    Returns its JSON object. Raises :class:`BridgeError` if no program is installed, or if it fails or times out.
    """
    program = next(iter(metadata.entry_points(group=LOGITS_GROUP)), None)
    if program is None:
        raise BridgeError(
            f"--logits needs an installed package with an entry point of the group {LOGITS_GROUP}; install "
            "skyrl-megatron, or compare only the tensors, without --logits"
        )
    command = [sys.executable, "-m", program.module, "--hf", str(hf), "--megatron", str(megatron)]
    command += ["--layout", layout] if layout else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise BridgeError(f"--logits took longer than {seconds:g} s; use a smaller --layout") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise BridgeError(f"{' '.join(command[1:])} failed with exit code {done.returncode}:\n{tail}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


ONE_FILE = 256 * 2**20  # larger exports have a file per worker, because the kernel serialises writes to one file


@dataclass(frozen=True)
class Report:
    """The result of a conversion: number of tensors, bytes of tensor data written, seconds."""

    out: str
    model_type: str
    tensors: int
    bytes: int
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """Return the JSON object for ``--json``."""
        return {**vars(self), "gb_per_s": round(self.bytes / 1e9 / max(self.seconds, 1e-9), 3)}


@dataclass(frozen=True, slots=True)
class _Import:
    """One unit of work: an entry to convert, or a tensor to copy unchanged (``entry`` None)."""

    name: str
    entry: Entry | None
    nbytes: int


def import_hf(
    hf: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    workers: int = 2,
    drop_mtp: bool = False,
    stream: TextIO | None = None,
) -> Report:
    """Convert a HF folder to a ``torch_dist`` checkpoint in ``out``, with config and tokenizer in ``huggingface/``.

    Megatron's ``dist_checkpointing.load`` opens it at any tp/pp/vpp/ep/etp. ``dtype``: None keeps the dtype of each
    tensor. ``drop_mtp``: omit multi-token-prediction layers. Raises :class:`BridgeError`; ``out`` then does not
    exist.
    """
    source = open_hf(hf)
    plan = Plan.of(source.config)
    plan.family.megatron_config(source.config)  # rejects unsupported options before anything is written
    shapes = source.shapes()
    plan.check(shapes, str(hf))
    _check_copies(plan, source)
    places = {entry.name: checkpoint_location(entry, plan.shape) for entry in plan.entries}
    keys = key_dtypes(plan, source, dtype, {name: location.key for name, location in places.items()})
    tensors: dict[str, tuple[Shape, torch.dtype]] = {}
    work: list[_Import] = []
    for entry in plan.entries:
        location = places[entry.name]
        tensors[location.key] = ((*location.axes, *entry.shape), keys[location.key])
        work.append(_Import(entry.name, entry, math.prod(entry.shape) * keys[location.key].itemsize))
    for name in filter(plan.is_passthrough, shapes):
        if drop_mtp and plan.is_prediction(name):
            continue
        kind = source.dtype(name)
        tensors[PASSTHROUGH + name] = (shapes[name], kind)
        work.append(_Import(name, None, math.prod(shapes[name]) * kind.itemsize))
    total = sum(unit.nbytes for unit in work)
    progress = Progress(total, "import", stream)
    with staged(out, total) as folder:
        names = [f"__{worker}_0.distcp" for worker in range(max(1, workers))]
        files = [ChunkFile(name, LocalFile(folder / name)) for name in names]

        def convert(worker: int, unit: _Import) -> None:
            if unit.entry is None:
                shape, key = shapes[unit.name], PASSTHROUGH + unit.name
                data = byte_blocks(source.read(unit.name), tensors[key][1])
                files[worker].append(key, (0,) * len(shape), shape, tensors[key][1], data)
            else:
                location = places[unit.name]
                _import_entry(source, unit.entry, location, keys[location.key], files[worker])
            progress.add(unit.nbytes)

        try:
            in_threads(shares(work, lambda unit: unit.nbytes, len(files)), convert)
            config = output_config(source.config, dtype, drop_mtp)
            copy_assets(hf, folder / HF_SUBFOLDER, config)
            common = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {}}
            write_metadata(folder, tensors, files, common)
        finally:
            for file in files:
                file.abandon()
    progress.finish()
    return Report(str(out), plan.family.model_type, len(work), progress.done, progress.seconds)


def _import_entry(
    source: Source, entry: Entry, place: CheckpointLocation, dtype: torch.dtype, file: ChunkFile
) -> None:
    parts = entry.bound.conversion.to_parts([source.read(piece.name, piece.index) for piece in entry.hf])
    rows = entry.shape[0] // entry.parts
    rest = (0,) * (len(entry.shape) - 1)
    for number, part in enumerate(parts):
        sizes = (*((1,) * len(place.axes)), *part.shape)
        file.append(place.key, (*place.index, number * rows, *rest), sizes, dtype, byte_blocks(part, dtype))


def _check_copies(plan: Plan, source: Source) -> None:
    """Raise unless a tied output layer on disk equals the embedding, because only the embedding is converted."""
    for name, original in plan.copies.items():
        if name in source.shapes() and not same_bytes(source.read(name), source.read(original)):
            raise BridgeError(
                f"{source.path}: {name} differs from {original}, although config.json ties them; set "
                "tie_word_embeddings to false in config.json to keep both"
            )


def export_megatron(
    megatron: Path,
    out: Path,
    *,
    template: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    workers: int = 2,
    drop_mtp: bool = False,
    stream: TextIO | None = None,
) -> Report:
    """Convert a Megatron checkpoint, plain or of a training run, to a HF folder in ``out``.

    ``megatron``: the checkpoint, or ``ckpt_path/global_step_N`` of a run, whose policy is exported without optimizer.
    ``template``: the original HF folder, the source of config and tokenizer if the checkpoint has none, and of
    multi-token-prediction layers that the checkpoint lacks. Raises :class:`BridgeError`; ``out`` then does not exist.
    """
    megatron = model_folder(megatron)
    if not is_checkpoint(megatron):
        inside = sorted(path.name for path in megatron.glob("global_step_*"))
        hint = f"use one of its checkpoints: {', '.join(inside)}" if inside else "use a Megatron checkpoint folder"
        raise BridgeError(f"{megatron} holds neither metadata.json nor *.distcp files; {hint}")
    source = MegatronSource(megatron, template)
    plan = source.plan
    copies = VISION in plan.passthrough or (plan.passthrough and not drop_mtp and not source.passthrough)
    original = None
    if template is not None and (copies or plan.family.within) and any(template.glob("*.safetensors")):
        original = open_hf(template)
    passthrough = {
        name: origin
        for name, origin in _passthrough(source, original).items()
        if plan.is_passthrough(name) and not (drop_mtp and plan.is_prediction(name))
    }
    plan.require_vision(
        passthrough, f"name the folder that the model was trained from: {CONVERT} --hf-template FOLDER"
    )
    form = source.form if original is None or source.has_value_head else original.form
    if source.has_value_head:
        passthrough[SCORE] = source
    tensors: dict[str, tuple[Shape, torch.dtype]] = {}
    for entry in plan.entries:
        for piece in entry.hf:
            kept = dtype is None or entry.bound.row.keep_dtype
            tensors[piece.name] = (piece.shape, source.dtype(piece.name) if kept else dtype)  # type: ignore[assignment]
    for name, origin in passthrough.items():
        kept = dtype is None or name != SCORE
        tensors[name] = (origin.shapes()[name], origin.dtype(name) if kept else dtype)  # type: ignore[assignment]
    unknown = {kind for _, kind in tensors.values()} - set(DTYPE_NAMES)
    if unknown:
        raise BridgeError(f"{megatron} holds {unknown}, which safetensors does not support: {CONVERT} --dtype bf16")
    total = sum(math.prod(shape) * kind.itemsize for shape, kind in tensors.values())
    if total > ONE_FILE:
        max_shard_size = min(max_shard_size, -(-total // max(1, workers)))
    progress = Progress(total, "export", stream)
    with staged(out, total) as folder:
        writer = HfWriter(folder, tensors, max_shard_size, form=form)

        def convert(worker: int, item: Entry | str) -> None:
            if isinstance(item, str):
                progress.add(writer.write(item, passthrough[item].read(item)))
                return
            for piece, tensor in zip(item.hf, source.hf_tensors(item), strict=True):
                progress.add(writer.write(piece.name, tensor, piece.index))

        try:
            work: list[Entry | str] = [*plan.entries, *passthrough]
            weights = {entry.name: math.prod(entry.shape) for entry in plan.entries}
            weights |= {name: math.prod(tensors[name][0]) for name in passthrough}
            key = lambda item: weights[item if isinstance(item, str) else item.name]  # noqa: E731
            in_threads(shares(work, key, max(1, workers)), convert)
            stored = {kind for name, (_, kind) in tensors.items() if not plan.is_passthrough(name)}
            copy_assets(source.hf_files, folder, output_config(source.config, dtype or _only_dtype(stored), drop_mtp))
            writer.finish()
        finally:
            writer.close()
    progress.finish()
    return Report(str(out), plan.family.model_type, len(tensors), progress.done, progress.seconds)


def _passthrough(source: MegatronSource, original: Source | None) -> dict[str, Source]:
    """Return the source of each tensor that is copied unchanged: the checkpoint, else the template's weights."""
    found: dict[str, Source] = {} if original is None else dict.fromkeys(original.shapes(), original)
    return found | dict.fromkeys(source.passthrough, source)


def _only_dtype(dtypes: set[torch.dtype]) -> torch.dtype | None:
    """Return the dtype of the weights, ignoring fp32 buffers of a 16-bit model; None if they differ."""
    rest = dtypes - {torch.float32} or dtypes
    return rest.pop() if len(rest) == 1 else None
