"""HF folder → Megatron checkpoint and back, streaming: one tensor at a time per worker, nothing kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from bridges.assets import HF_SUBFOLDER, copy_assets, output_config
from bridges.errors import BridgeError
from bridges.hf_io import DTYPE_NAMES
from bridges.hf_write import HfWriter
from bridges.megatron_io import write_metadata
from bridges.places import CheckpointPlace, checkpoint_place
from bridges.plan import Plan
from bridges.rows import Shape
from bridges.rules import Entry
from bridges.source import PASSTHROUGH, MegatronSource, Source, is_checkpoint, key_dtypes, model_folder, open_hf
from bridges.staging import LocalFile, byte_blocks, staged
from bridges.torch_dist import ChunkFile
from bridges.verify import same_bytes
from bridges.workers import Progress, in_threads, shares

ONE_FILE = 256 * 2**20  # exports beyond are cut into a file per worker: the kernel lets one thread write to a file


@dataclass(frozen=True)
class Report:
    """What a conversion did: bytes of tensor data written, tensors, seconds."""

    out: str
    model_type: str
    tensors: int
    bytes: int
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {**vars(self), "gb_per_s": round(self.bytes / 1e9 / max(self.seconds, 1e-9), 3)}


@dataclass(frozen=True, slots=True)
class _Import:
    """One unit of work: an entry to convert, or a tensor to carry over as it is."""

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
    """Write the ``torch_dist`` checkpoint of a HF folder to ``out``, with config and tokenizer in ``huggingface/``.

    Stock ``megatron.core.dist_checkpointing.load`` opens it at any tp/pp/vpp/ep/etp. ``dtype`` None keeps each
    tensor's; ``drop_mtp`` leaves multi-token-prediction layers out. Raises :class:`BridgeError`; ``out`` then does
    not exist.
    """
    source = open_hf(hf)
    plan = Plan.of(source.config)
    plan.family.megatron_config(source.config)  # refuses what Megatron cannot compute, before anything is written
    shapes = source.shapes()
    plan.check(shapes, str(hf))
    _check_copies(plan, source)
    places = {entry.name: checkpoint_place(entry, plan.shape) for entry in plan.entries}
    keys = key_dtypes(plan, source, dtype, {name: place.key for name, place in places.items()})
    tensors: dict[str, tuple[Shape, torch.dtype]] = {}
    work: list[_Import] = []
    for entry in plan.entries:
        place = places[entry.name]
        tensors[place.key] = ((*place.axes, *entry.shape), keys[place.key])
        work.append(_Import(entry.name, entry, math.prod(entry.shape) * keys[place.key].itemsize))
    for name in () if drop_mtp else filter(plan.is_passthrough, shapes):
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
                place = places[unit.name]
                _import_entry(source, unit.entry, place, keys[place.key], files[worker])
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


def _import_entry(source: Source, entry: Entry, place: CheckpointPlace, dtype: torch.dtype, file: ChunkFile) -> None:
    parts = entry.bound.conversion.to_parts([source.read(piece.name, piece.index) for piece in entry.hf])
    rows = entry.shape[0] // entry.parts
    rest = (0,) * (len(entry.shape) - 1)
    for number, part in enumerate(parts):
        sizes = (*((1,) * len(place.axes)), *part.shape)
        file.append(place.key, (*place.index, number * rows, *rest), sizes, dtype, byte_blocks(part, dtype))


def _check_copies(plan: Plan, source: Source) -> None:
    """Raise unless a tied output layer on disk repeats the embedding exactly: only one of them is converted."""
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
    """Write the HF folder of a Megatron checkpoint (plain or of a training run, then without optimizer) to ``out``.

    ``megatron``: of a run also ``ckpt_path/global_step_N``, whose policy is taken.
    ``template``: the original HF folder, for config and tokenizer if the checkpoint has none, and for
    multi-token-prediction layers that training did not keep. Raises :class:`BridgeError`; ``out`` then does not exist.
    """
    megatron = model_folder(megatron)
    if not is_checkpoint(megatron):
        inside = sorted(path.name for path in megatron.glob("global_step_*"))
        hint = f"give one of its checkpoints: {', '.join(inside)}" if inside else "give a Megatron checkpoint folder"
        raise BridgeError(f"{megatron} holds neither metadata.json nor *.distcp files; {hint}")
    source = MegatronSource(megatron, template)
    plan = source.plan
    passthrough = {} if drop_mtp else _passthrough(source, template)
    tensors: dict[str, tuple[Shape, torch.dtype]] = {}
    for entry in plan.entries:
        for piece in entry.hf:
            kept = dtype is None or entry.bound.row.keep_dtype
            tensors[piece.name] = (piece.shape, source.dtype(piece.name) if kept else dtype)  # type: ignore[assignment]
    for name, origin in passthrough.items():
        tensors[name] = (origin.shapes()[name], origin.dtype(name))
    unknown = {kind for _, kind in tensors.values()} - set(DTYPE_NAMES)
    if unknown:
        raise BridgeError(f"{megatron} holds {unknown}, which safetensors cannot; choose --dtype")
    total = sum(math.prod(shape) * kind.itemsize for shape, kind in tensors.values())
    if total > ONE_FILE:
        max_shard_size = min(max_shard_size, -(-total // max(1, workers)))
    progress = Progress(total, "export", stream)
    with staged(out, total) as folder:
        writer = HfWriter(folder, tensors, max_shard_size)

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


def _passthrough(source: MegatronSource, template: Path | None) -> dict[str, Source]:
    """Return multi-token-prediction tensors and where they come from: the checkpoint, else the template's weights."""
    if source.passthrough:
        return dict.fromkeys(source.passthrough, source)
    if template is None or not any(template.glob("*.safetensors")):
        return {}
    original = open_hf(template)
    return {name: original for name in original.shapes() if source.plan.is_passthrough(name)}


def _only_dtype(dtypes: set[torch.dtype]) -> torch.dtype | None:
    """Return the dtype of the weights; fp32 buffers among 16-bit weights do not count."""
    rest = dtypes - {torch.float32} or dtypes
    return rest.pop() if len(rest) == 1 else None
