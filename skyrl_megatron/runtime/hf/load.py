"""Weights of a HF folder into this rank's chunks, reading only the shards that it holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from bridges.conversions import Conversion, DeinterleaveGateUp, InterleaveQkv, InterleaveRope, Transpose
from bridges.errors import BridgeError
from bridges.rules import Entry
from bridges.shard import check_divisible, shard
from bridges.source import Source, open_hf
from skyrl_megatron.errors import ModelLoadError
from skyrl_megatron.runtime.agreement import raise_on_all_ranks
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.model.local_weights import local_weights
from skyrl_megatron.runtime.parallel_state import ProcessGroups


@torch.no_grad()
def load_hf(model: ModelChunks, folder: str | Path, groups: ProcessGroups) -> None:
    """Set every weight of ``model`` from a HF folder, cast to the parameters' dtype; every rank calls it.

    Files are mapped, and a rank reads the pages of its own shards only. FP8 and MXFP4 folders are dequantised.
    A critic's value head is loaded where the folder has a ``score.weight`` [1, H], else left as it is.
    Raises ModelLoadError on every rank, naming rank, file, tensor and remedy, when any rank fails.
    """
    problem = None
    try:
        _load(model, open_hf(Path(folder).expanduser()), groups)
    except (BridgeError, OSError) as error:
        problem = f"{folder}: {error}" if str(folder) not in str(error) else str(error)
    raise_on_all_ranks(ModelLoadError(problem) if problem else None)


def _load(model: ModelChunks, source: Source, groups: ProcessGroups) -> None:
    plan = model.hf.plan
    shapes = source.shapes()
    score = shapes.pop("score.weight", None)
    if model.head == "value":
        absent_head = {name: shape for name, shape in plan.hf.items() if name == "lm_head.weight"}
        shapes = absent_head | shapes  # a saved critic has no LM head
    plan.check(shapes, str(source.path))
    for weight in local_weights(model, groups):
        over = groups.etp if weight.entry.is_expert else groups.tp
        weight.tensor.copy_(read_shard(source, weight.entry, over.size(), over.rank(), weight.tensor.shape[0]))
    if score is not None and model.head == "value" and groups.is_last_stage:
        model.chunks[-1].output_layer.weight.data.copy_(source.read("score.weight"))


def read_shard(source: Source, entry: Entry, size: int, rank: int, rows: int) -> Tensor:
    """Read the shard of ``rank`` out of ``size`` of one Megatron tensor with ``rows`` rows (vocabularies are padded).

    Slicing before converting touches only this rank's pages: a tp or etp split keeps whole KV groups, heads and
    gate/up pairs together, so the conversion of a shard is that of a model with so many fewer of them.
    """
    tensors = [source.read(piece.name, piece.index) for piece in entry.hf]
    split, conversion = entry.split, entry.bound.conversion
    if split.vocab:
        return shard(entry.to_megatron(tensors), entry, size, rank, rows * size)
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
    if split == 0 and isinstance(conversion, InterleaveRope):
        if conversion.heads % size:
            return None
        return dataclasses.replace(conversion, heads=conversion.heads // size)
    return conversion
