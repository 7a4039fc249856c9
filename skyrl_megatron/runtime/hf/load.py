"""Weights of a HF folder into this rank's chunks, reading only the shards that it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bridges.conversions import Conversion, DeinterleaveGateUp, InterleaveQkv, InterleaveRope, JoinByGroup, Transpose
from bridges.errors import BridgeError
from bridges.quantized import DequantizedFolder
from bridges.rules import Entry
from bridges.scaled import ScaledMatrix, together
from bridges.shard import check_divisible, shard
from bridges.source import Source, open_hf
from skyrl_megatron.errors import ModelLoadError
from skyrl_megatron.runtime.agreement import raise_on_all_ranks
from skyrl_megatron.runtime.hf.value_head import check_tensors
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.model.local_weights import local_weights, weight_places
from skyrl_megatron.runtime.model.scaled_weights import give_memory, keep_scaled
from skyrl_megatron.runtime.parallel_state import ProcessGroups


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

    Files are mapped, and a rank reads the pages of its own shards only. Quantised folders are dequantised; of a model
    that was built ``frozen``, linear maps that have 8 bits on disk keep them (``model/scaled_weights.py``).
    A critic's value head is loaded where the folder has one (``value_head.py``; ``value_head`` is its prefix there),
    else left as it is.
    Raises ModelLoadError on every rank, naming rank, file, tensor and remedy, when any rank fails.
    """
    problem = None
    try:
        _load(model, open_hf(Path(folder).expanduser()), groups, frozen, value_head)
    except (BridgeError, OSError) as error:
        problem = f"{folder}: {error}" if str(folder) not in str(error) else str(error)
    raise_on_all_ranks(ModelLoadError(problem) if problem else None)


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
    """Keep the weights of linear maps as 8 bits where the folder has them so; return the names of these weights.
    Give all others the memory that they may have been built without."""
    kept: set[str] = set()
    for place in weight_places(model, groups):
        entries = list(place.weights.values())
        if not isinstance(source, DequantizedFolder) or not all(is_scaled(source, each) for each in entries):
            give_memory(place.parameter)
            continue
        over = groups.etp if entries[0].is_expert else groups.tp
        shares = [scaled_shard(source, entry, over.size(), over.rank()) for entry in entries]
        matrix = together(shares, torch.stack) if place.parameter.dim() == 3 else shares[0]
        keep_scaled(place.module, place.name, matrix)
        kept.update(place.weights)
    return kept


def is_scaled(source: DequantizedFolder, entry: Entry) -> bool:
    """Tell whether a weight can be kept as it is on disk: all of it in 8 bits, in blocks of one width."""
    blocks = {source.block(piece.name) for piece in entry.hf}
    return entry.can_be_scaled and None not in blocks and len({block[1] for block in blocks if block}) == 1


def scaled_shard(source: DequantizedFolder, entry: Entry, size: int, rank: int) -> ScaledMatrix:
    """Read the share of ``rank`` out of ``size`` of a weight of 8 bits, in Megatron's order of rows."""
    pieces = [source.read_scaled(piece.name) for piece in entry.hf]
    if entry.split.dim == 1:
        check_divisible(entry, size)
        return together([piece.share(size, rank) for piece in pieces], entry.to_megatron)
    return together(pieces, lambda tensors: _share_of(tensors, entry, size, rank))


def read_shard(source: Source, entry: Entry, size: int, rank: int, rows: int) -> Tensor:
    """Read the shard of ``rank`` out of ``size`` of one Megatron tensor with ``rows`` rows (vocabularies are padded).

    Slicing before converting touches only this rank's pages: a tp or etp split keeps whole KV groups, heads and
    gate/up pairs together, so the conversion of a shard is that of a model with so many fewer of them.
    """
    tensors = [source.read(piece.name, piece.index) for piece in entry.hf]
    if entry.split.vocab:
        return shard(entry.to_megatron(tensors), entry, size, rank, rows * size)
    return _share_of(tensors, entry, size, rank)


def _share_of(tensors: Sequence[Tensor], entry: Entry, size: int, rank: int) -> Tensor:
    split, conversion = entry.split, entry.bound.conversion
    if split.dim is None or size == 1:
        return entry.to_megatron(tensors)
    check_divisible(entry, size)
    smaller = _shard_conversion(conversion, split.dim, size)
    if smaller is None:
        return shard(entry.to_megatron(tensors), entry, size, rank)
    dim = tensors[0].dim() - 1 - split.dim if isinstance(conversion, Transpose | DeinterleaveGateUp) else split.dim
    return smaller.to_megatron([tensor.chunk(size, dim)[rank] for tensor in tensors])


def _shard_conversion(conversion: Conversion, split: int, size: int) -> Conversion | None:
    """Return the conversion of one of ``size`` shards; None where shards cannot be converted on their own."""
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
