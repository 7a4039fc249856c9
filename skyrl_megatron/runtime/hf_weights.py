"""Load a rank's shards from a HF folder, and export weights as a stream of tensors or as a HF folder."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from bridges.conversions import Conversion, DeinterleaveGateUp, InterleaveQkv, InterleaveRope, JoinByGroup, Transpose
from bridges.disk_form import AS_TEXT, DiskForm, TensorInfo
from bridges.errors import BridgeError
from bridges.hf_io import HfWriter
from bridges.plan import without_output_layer
from bridges.quantized import DequantizedFolder, ScaledMatrix, join_matrices
from bridges.rows import Shape
from bridges.rules import Entry, check_divisible, shard, unshard
from bridges.source import SCORE, FolderChanges, Source, copy_assets, open_hf, output_config, value_config
from bridges.staging import byte_blocks, staged, write_all, write_file
from skyrl_megatron.errors import CheckpointError, ModelLoadError
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.model.description import check_tensors
from skyrl_megatron.runtime.model.local_weights import LocalWeight, local_weights, weight_locations
from skyrl_megatron.runtime.model.scaled_weights import give_memory, keep_scaled, weight_data
from skyrl_megatron.runtime.parallel_state import ProcessGroups, from_rank_0, raise_on_all_ranks

if TYPE_CHECKING:
    pass


@torch.no_grad()
def load_hf(
    model: ModelChunks,
    folder: str | Path,
    groups: ProcessGroups,
    *,
    frozen: bool = False,
    value_head: str = "value_head",
) -> None:
    """Set every weight of ``model`` from a HF folder, cast to the parameters' dtype; every rank calls it.

    Files are memory-mapped, and a rank reads only the pages of its own shards. Quantised folders are dequantised. In a
    model that was built ``frozen``, linear layers that are stored in 8 bits keep them (``model/scaled_weights.py``).
    A critic's value head is loaded if the folder has one (``value_head``: its prefix); otherwise it keeps its initial
    weight. If any rank fails, every rank raises ModelLoadError, which names rank, file, tensor and fix.
    """
    problem = None
    try:
        _load(model, open_hf(Path(folder).expanduser()), groups, frozen, value_head)
    except (BridgeError, OSError) as error:
        # not every error names the folder
        problem = f"{folder}: {error}" if str(folder) not in str(error) else str(error)
    # all ranks together: the others would otherwise wait for this one in the first collective of the run
    raise_on_all_ranks(ModelLoadError(problem) if problem else None)


def load_again(model: ModelChunks, groups: ProcessGroups) -> None:
    """Set every weight from the model's own folder again, after experts changed their slots; no other rank is waited
    for. Not for weights that are kept in 8 bits. Raises ModelLoadError.
    """
    assert model.hf.path is not None
    try:
        _load(model, open_hf(model.hf.path), groups, False, "value_head")
    except (BridgeError, OSError) as error:
        raise ModelLoadError(f"{model.hf.path}: {error}") from error


def _load(model: ModelChunks, source: Source, groups: ProcessGroups, frozen: bool, value_head: str) -> None:
    head = check_tensors(model.hf.plan, source, model.head, value_head)
    kept = _keep_scaled(model, source, groups) if frozen else set()
    for weight in local_weights(model, groups):
        if weight.name in kept:
            continue
        over = groups.etp if weight.entry.is_expert else groups.tp
        weight.tensor.copy_(read_shard(source, weight.entry, over.size(), over.rank(), weight.tensor.shape[0]))
    if head is not None and groups.is_last_stage:
        model.chunks[-1].output_layer.weight.data.copy_(source.read(head))


def _keep_scaled(model: ModelChunks, source: Source, groups: ProcessGroups) -> set[str]:
    """Keep linear weights in 8 bits where the folder stores them in 8 bits; return the names of these weights.

    Allocates memory for all other parameters that were built without it.
    """
    kept: set[str] = set()
    for location in weight_locations(model, groups):
        entries = list(location.weights.values())
        # an expert tensor is one parameter: it stays in 8 bits only if every expert of it can
        if not isinstance(source, DequantizedFolder) or not all(
            is_scaled(source, weight_entry) for weight_entry in entries
        ):
            give_memory(location.parameter)
            continue
        over = groups.etp if entries[0].is_expert else groups.tp
        shares = [scaled_shard(source, entry, over.size(), over.rank()) for entry in entries]
        matrix = join_matrices(shares, torch.stack) if location.parameter.dim() == 3 else shares[0]
        keep_scaled(location.module, location.name, matrix)
        kept.update(location.weights)
    return kept


def is_scaled(source: DequantizedFolder, entry: Entry) -> bool:
    """Return whether a weight can stay in 8 bits: all of its HF tensors are quantised with one block width."""
    blocks = {source.block(piece.name) for piece in entry.hf}
    return entry.can_be_scaled and None not in blocks and len({block[1] for block in blocks if block}) == 1


def scaled_shard(source: DequantizedFolder, entry: Entry, size: int, rank: int) -> ScaledMatrix:
    """Read the shard of ``rank`` out of ``size`` of an 8-bit weight, with rows in Megatron's order."""
    pieces = [source.read_scaled(piece.name) for piece in entry.hf]
    if entry.split.dim == 1:
        check_divisible(entry, size)
        return join_matrices([piece.share(size, rank) for piece in pieces], entry.to_megatron)
    return join_matrices(pieces, lambda tensors: _share_of(tensors, entry, size, rank))


def read_shard(source: Source, entry: Entry, size: int, rank: int, rows: int) -> Tensor:
    """Read the shard of ``rank`` out of ``size`` of one Megatron tensor, [rows, …] in the file's dtype; a shard has
    ``rows`` rows.

    ``rows`` includes the padding of vocabularies. The HF tensors are sliced before they are converted, so that only
    this rank's pages are read. This works because tp and etp keep KV groups, heads and gate/up pairs whole: a shard is
    converted like the tensor of a model with fewer of them.
    """
    tensors = [source.read(piece.name, piece.index) for piece in entry.hf]
    # the vocabulary is padded for tp, so the file cannot be cut before the padding is added
    if entry.split.vocab:
        return shard(entry.to_megatron(tensors), entry, size, rank, rows * size)
    return _share_of(tensors, entry, size, rank)


def _share_of(tensors: Sequence[Tensor], entry: Entry, size: int, rank: int) -> Tensor:
    split, conversion = entry.split, entry.bound.conversion
    if split.dim is None or size == 1:
        return entry.to_megatron(tensors)
    # before the cut: chunk() would make unequal parts without an error
    check_divisible(entry, size)
    smaller = _shard_conversion(conversion, split.dim, size)
    if smaller is None:
        return shard(entry.to_megatron(tensors), entry, size, rank)
    # these conversions swap the dimensions, so the file is cut along the other one
    dim = tensors[0].dim() - 1 - split.dim if isinstance(conversion, Transpose | DeinterleaveGateUp) else split.dim
    return smaller.to_megatron([tensor.chunk(size, dim)[rank] for tensor in tensors])


def _shard_conversion(conversion: Conversion, split: int, size: int) -> Conversion | None:
    """Return the conversion of one of ``size`` shards; None if shards cannot be converted separately."""
    if split == 0 and isinstance(conversion, InterleaveQkv):
        return dataclasses.replace(conversion, groups=conversion.groups // size)
    if split == 0 and isinstance(conversion, JoinByGroup):
        if not conversion.keeps_order:
            return None
        return dataclasses.replace(conversion, groups=conversion.groups // size)
    if split == 0 and isinstance(conversion, InterleaveRope):
        if conversion.heads % size:
            return None
        return dataclasses.replace(conversion, heads=conversion.heads // size)
    return conversion


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A HF tensor, or the slice ``[index]`` of a tensor that holds all experts of a layer."""

    name: str
    tensor: Tensor
    index: int | None = None


@torch.no_grad()
def stream_hf(
    model: ModelChunks, groups: ProcessGroups, *, of: Callable[[Tensor], Tensor] = weight_data
) -> Iterator[HfTensor]:
    """Yield every HF tensor, [shape on disk], on one rank, the one that gathers its shards, in module order.

    Every rank must exhaust the iterator, because tp and etp groups gather. A rank holds at most one whole tensor at a
    time. ``of`` maps a parameter to the tensor to stream; for gradients: ``lambda parameter: parameter.main_grad``.
    """
    for weight in local_weights(model, groups, of):
        # a tied embedding is on two stages; one of them exports it
        if weight.is_copy:
            continue
        gathered_tensor = gathered(weight, groups)
        if gathered_tensor is None:
            continue
        for piece, tensor in zip(weight.entry.hf, weight.entry.to_hf(gathered_tensor), strict=True):
            yield HfTensor(piece.name, tensor, piece.index)
    last = model.chunks[-1]
    if model.head == "value" and last.post_process and groups.tp.rank() == 0 and groups.dp_cp.rank() == 0:
        yield HfTensor(SCORE, of(last.output_layer.weight))


def gathered(weight: LocalWeight, groups: ProcessGroups) -> Tensor | None:
    """Return the whole tensor, [Megatron's shape without padding], on the first rank of the first replica's tp
    (experts: etp) group, None elsewhere."""
    expert = weight.entry.is_expert
    over, replicas = (groups.etp, groups.edp) if expert else (groups.tp, groups.dp_cp)
    # replicas hold the same values
    if replicas.rank() != 0:
        return None
    if over.size() == 1 or weight.entry.split.dim is None:
        return unshard([weight.tensor], weight.entry) if over.rank() == 0 else None
    share = weight.tensor.contiguous()
    shares = [torch.empty_like(share) for _ in range(over.size())] if over.rank() == 0 else None
    dist.gather(share, shares, group=over, group_dst=0)
    return unshard(shares, weight.entry) if shares is not None else None


def save_hf(
    model: ModelChunks,
    groups: ProcessGroups,
    out: str | Path,
    *,
    template: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    of: Callable[[Tensor], Tensor] = weight_data,
    card: str | None = None,
    changes: FolderChanges | None = None,
) -> None:
    """Write ``model`` as a HF folder, tensors in [shape on disk]. Every rank calls it and writes what it gathers.

    ``out`` must be on a file system that all ranks share; it is created complete or not at all. ``template``: the
    source of tokenizer, generation config and multi-token-prediction layers, by default the folder that the model was
    built from. ``dtype`` of the weights: by default the model's. ``of`` maps a parameter to the tensor to write, for
    example ``Adapters.merged``. ``card``: text of ``README.md``. ``changes`` of other files. If ``out``
    exists or cannot be written, every rank raises CheckpointError and no file remains.
    """
    out, template = Path(out), Path(template) if template else model.hf.path
    stack, writer, problem = contextlib.ExitStack(), None, None
    with stack:
        passthrough: Mapping[str, Source] = {}
        # only this rank creates files, so that no two ranks race for a name
        if dist.get_rank() == 0:
            try:
                passthrough = _passthrough(model, template)
                tensors = _declared(model, passthrough, dtype or model.config.params_dtype)
                needed = sum(math.prod(shape) * kind.itemsize for shape, kind in tensors.values())
                folder, form = stack.enter_context(staged(out, needed)), _form(model, passthrough)
                writer = HfWriter(folder, tensors, max_shard_size, form=form)
                stack.callback(writer.close)
            except (BridgeError, OSError) as error:
                problem = str(error)
        # before anyone gathers: a rank that fails alone would leave the others in a collective
        raise_on_all_ranks(_error(problem))
        places = from_rank_0((writer.folder, writer.places) if writer else None)
        raise_on_all_ranks(_error(write_pieces(_with_repeats(model, stream_hf(model, groups, of=of)), *places)))
        if writer is not None:
            try:
                for name, source in passthrough.items():
                    writer.write(name, source.read(name))
                copy_assets(template or out, writer.folder, _config(model, dtype), changes)
                if card:
                    write_file(writer.folder / "README.md", card.encode())
                writer.finish()
                # moves the folder to its final name, the last thing that can fail
                stack.close()
            except (BridgeError, OSError) as error:
                problem = str(error)
        raise_on_all_ranks(_error(problem))


def _with_repeats(model: ModelChunks, pieces: Iterator[HfTensor]) -> Iterator[HfTensor]:
    """Yield the tensors, and repeat those that the folder stores under several names."""
    repeats = model.hf.plan.repeats
    for piece in pieces:
        yield piece
        for name, original in repeats.items():
            if piece.name == original:
                yield HfTensor(name, piece.tensor, piece.index)


def _error(problem: str | None) -> CheckpointError | None:
    return CheckpointError(problem) if problem else None


def write_pieces(pieces: Iterator[HfTensor], folder: Path, places: Mapping[str, TensorInfo]) -> str | None:
    """Write this rank's tensors into files that exist already; return an error message, or None.

    After an error the loop continues to the end, because other ranks still need this rank's gathers.
    """
    descriptors: dict[str, int] = {}
    problem = None
    try:
        for piece in pieces:
            if problem:
                # continues without writing: ending here would leave the ranks of the gathers waiting
                continue
            info = places[piece.name]
            size = math.prod(piece.tensor.shape) * info.dtype.itemsize
            offset = info.start + (piece.index or 0) * size
            try:
                if info.file not in descriptors:
                    descriptors[info.file] = os.open(folder / info.file, os.O_WRONLY)
                for block in byte_blocks(piece.tensor.cpu(), info.dtype):
                    offset = write_all(descriptors[info.file], block, offset)
            except OSError as error:
                problem = f"{folder / info.file}: {error.strerror} while writing {piece.name}"
        # before the folder gets its name: a power failure must not leave a complete-looking folder with holes
        for descriptor in descriptors.values():
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return problem


def _declared(
    model: ModelChunks, passthrough: Mapping[str, Source], dtype: torch.dtype
) -> dict[str, tuple[Shape, torch.dtype]]:
    """Return name → (shape, dtype) of every tensor of the folder, in model order."""
    tensors = {
        piece.name: (piece.shape, torch.float32 if entry.bound.row.keep_dtype else dtype)
        for entry in model.hf.plan.entries
        for piece in entry.hf
    }
    if model.head == "value":
        tensors.pop("lm_head.weight", None)
        tensors[SCORE] = ((1, model.config.hidden_size), dtype)
    tensors |= {name: tensors[original] for name, original in model.hf.plan.repeats.items()}
    return tensors | {name: (source.shapes()[name], source.dtype(name)) for name, source in passthrough.items()}


def _passthrough(model: ModelChunks, template: Path | None) -> dict[str, Source]:
    """Return the source of each tensor that training does not change: multi-token prediction, images."""
    plan = model.hf.plan
    if model.head == "value":
        plan = without_output_layer(plan)
    sources: dict[str, Source] = {}
    if template is not None and plan.passthrough and any(template.glob("*.safetensors")):
        source = open_hf(template)
        sources = {name: source for name in source.shapes() if plan.is_passthrough(name)}
    plan.require_vision(sources, f"{template} must be the folder that the model was trained from")
    return sources


def _form(model: ModelChunks, passthrough: Mapping[str, Source]) -> DiskForm:
    """Return how the tensors are named on disk: as in the folder that others are copied from."""
    if model.head == "value":
        return AS_TEXT
    return next((source.form for source in passthrough.values()), DiskForm.of(model.hf.written))


def _config(model: ModelChunks, dtype: torch.dtype | None) -> dict[str, Any]:
    config = output_config(model.hf.written, dtype or model.config.params_dtype, drop_mtp=False)
    return value_config(config, model.hf.plan.family.architecture) if model.head == "value" else config
