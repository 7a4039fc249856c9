"""Weights with HF's names and shapes: streamed tensor by tensor, or written as a folder by all ranks at once."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bridges.assets import copy_assets, output_config
from bridges.errors import BridgeError
from bridges.hf_io import TensorInfo
from bridges.hf_write import HfWriter
from bridges.rows import Shape
from bridges.shard import unshard
from bridges.source import Source, open_hf
from bridges.staging import byte_blocks, staged, write_all, write_file
from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.agreement import from_rank_0, raise_on_all_ranks
from skyrl_megatron.runtime.hf.value_head import EXPORTED
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.model.local_weights import LocalWeight, local_weights
from skyrl_megatron.runtime.model.scaled_weights import weight_data
from skyrl_megatron.runtime.parallel_state import ProcessGroups


@dataclass(frozen=True, slots=True)
class HfPiece:
    """A HF tensor, or the slice ``[index]`` of one that all experts of a layer share."""

    name: str
    tensor: Tensor
    index: int | None = None


@torch.no_grad()
def stream_hf(
    model: ModelChunks, groups: ProcessGroups, *, of: Callable[[Tensor], Tensor] = weight_data
) -> Iterator[HfPiece]:
    """Yield every HF tensor exactly once over all ranks, on the rank that gathers its shards, in module order.

    Every rank must exhaust it (tp and etp groups gather). At most one whole tensor is held at a time. ``of`` picks
    what is streamed of each parameter; for gradients ``lambda parameter: parameter.main_grad``.
    """
    for weight in local_weights(model, groups, of):
        if weight.is_copy:
            continue
        whole = gathered(weight, groups)
        if whole is None:
            continue
        for piece, tensor in zip(weight.entry.hf, weight.entry.to_hf(whole), strict=True):
            yield HfPiece(piece.name, tensor, piece.index)
    last = model.chunks[-1]
    if model.head == "value" and last.post_process and groups.tp.rank() == 0 and groups.dp_cp.rank() == 0:
        yield HfPiece(EXPORTED, of(last.output_layer.weight))


def gathered(weight: LocalWeight, groups: ProcessGroups) -> Tensor | None:
    """Return the whole tensor on the first rank of the first replica's tp (experts: etp) group, None elsewhere."""
    expert = weight.entry.is_expert
    over, replicas = (groups.etp, groups.edp) if expert else (groups.tp, groups.dp_cp)
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
) -> None:
    """Write ``model`` as a HF folder that any HF tool opens; every rank calls it and writes the tensors it owns.

    ``out`` must be on a file system that all ranks share; it appears whole or not at all. ``template``: the folder
    that tokenizer, generation config and multi-token-prediction layers are taken from, default the one the model was
    built from. ``dtype``: of the weights, default the model's. ``of``: what is written of each parameter, such as
    ``Adapters.merged``. ``card``: text of ``README.md``. Raises CheckpointError on every rank, with nothing left
    behind, when ``out`` exists or cannot be written.
    """
    out, template = Path(out), Path(template) if template else model.hf.path
    stack, writer, problem = contextlib.ExitStack(), None, None
    with stack:
        passthrough: Mapping[str, Source] = {}
        if dist.get_rank() == 0:
            try:
                passthrough = _passthrough(model, template)
                tensors = _declared(model, passthrough, dtype or model.config.params_dtype)
                needed = sum(math.prod(shape) * kind.itemsize for shape, kind in tensors.values())
                writer = HfWriter(stack.enter_context(staged(out, needed)), tensors, max_shard_size)
                stack.callback(writer.close)
            except (BridgeError, OSError) as error:
                problem = str(error)
        raise_on_all_ranks(_error(problem))
        places = from_rank_0((writer.folder, writer.places) if writer else None)
        raise_on_all_ranks(_error(write_pieces(_with_repeats(model, stream_hf(model, groups, of=of)), *places)))
        if writer is not None:
            try:
                for name, source in passthrough.items():
                    writer.write(name, source.read(name))
                copy_assets(template or out, writer.folder, _config(model, dtype))
                if card:
                    write_file(writer.folder / "README.md", card.encode())
                writer.finish()
                stack.close()
            except (BridgeError, OSError) as error:
                problem = str(error)
        raise_on_all_ranks(_error(problem))


def _with_repeats(model: ModelChunks, pieces: Iterator[HfPiece]) -> Iterator[HfPiece]:
    """Yield the pieces, those that the folder repeats under other names as often as it does."""
    repeats = model.hf.plan.repeats
    for piece in pieces:
        yield piece
        for name, original in repeats.items():
            if piece.name == original:
                yield HfPiece(name, piece.tensor, piece.index)


def _error(problem: str | None) -> CheckpointError | None:
    return CheckpointError(problem) if problem else None


def write_pieces(pieces: Iterator[HfPiece], folder: Path, places: Mapping[str, TensorInfo]) -> str | None:
    """Write this rank's pieces into files that exist already. Return a problem only at the end: gathers go on."""
    descriptors: dict[str, int] = {}
    problem = None
    try:
        for piece in pieces:
            if problem:
                continue
            place = places[piece.name]
            size = math.prod(piece.tensor.shape) * place.dtype.itemsize
            offset = place.start + (piece.index or 0) * size
            try:
                if place.file not in descriptors:
                    descriptors[place.file] = os.open(folder / place.file, os.O_WRONLY)
                for block in byte_blocks(piece.tensor.cpu(), place.dtype):
                    offset = write_all(descriptors[place.file], block, offset)
            except OSError as error:
                problem = f"{folder / place.file}: {error.strerror} while writing {piece.name}"
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
        tensors[EXPORTED] = ((1, model.config.hidden_size), dtype)
    tensors |= {name: tensors[original] for name, original in model.hf.plan.repeats.items()}
    return tensors | {name: (source.shapes()[name], source.dtype(name)) for name, source in passthrough.items()}


def _passthrough(model: ModelChunks, template: Path | None) -> dict[str, Source]:
    """Return the source of each multi-token-prediction tensor, which training does not change."""
    if template is None or not model.hf.plan.passthrough or not any(template.glob("*.safetensors")):
        return {}
    source = open_hf(template)
    return {name: source for name in source.shapes() if model.hf.plan.is_passthrough(name)}


def _config(model: ModelChunks, dtype: torch.dtype | None) -> dict[str, Any]:
    config = output_config(model.hf.config, dtype or model.config.params_dtype, drop_mtp=False)
    if model.head == "value":
        family = model.hf.plan.family
        config["architectures"] = [family.architecture.replace("ForCausalLM", "ForTokenClassification")]
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return config
