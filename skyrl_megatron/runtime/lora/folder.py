"""Adapters of all ranks as one PEFT folder, and back at any layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from bridges.errors import BridgeError
from bridges.hf_write import HfWriter
from bridges.peft_folder import CONFIG, PREFIX, WEIGHTS, PeftFolder, adapter_config
from bridges.rows import Shape
from bridges.staging import staged, write_file
from skyrl_megatron.errors import CheckpointError, ModelLoadError
from skyrl_megatron.hub import origin
from skyrl_megatron.runtime.agreement import from_rank_0, raise_on_all_ranks
from skyrl_megatron.runtime.hf.export import HfPiece, write_pieces
from skyrl_megatron.runtime.lora.adapter import AdapterSettings
from skyrl_megatron.runtime.lora.attach import Adapters
from skyrl_megatron.runtime.lora.names import HfFactor, UnfitFactor, fill_factors, stream_factors
from skyrl_megatron.runtime.lora.targets import KEY, Selection, adapted
from skyrl_megatron.runtime.parallel_state import ProcessGroups


def save_adapter(adapters: Adapters, groups: ProcessGroups, out: str | Path) -> None:
    """Write the adapters as a PEFT folder with experts one by one; every rank calls it and writes what it owns.

    All projections have the rank of the settings: where experts have a smaller one, their factors end in zeros, and
    ``lora_B`` takes up what their scale differs by. ``out`` must be on a file system that all ranks share; it appears
    whole or not at all. Raises CheckpointError on every rank, with nothing left behind, when it cannot be written.
    """
    out = Path(out)
    writer, problem = None, None
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            try:
                tensors = _declared(adapters)
                needed = sum(4 * shape[0] * shape[1] for shape, _ in tensors.values())
                folder = stack.enter_context(staged(out, needed))
                writer = HfWriter(folder, tensors, 2**63, WEIGHTS.removesuffix(".safetensors"))
                stack.callback(writer.close)
            except (BridgeError, OSError) as error:
                problem = str(error)
        raise_on_all_ranks(CheckpointError(problem) if problem else None)
        places = from_rank_0((writer.folder, writer.places) if writer else None)
        problem = write_pieces(_pieces(adapters, groups), *places)
        raise_on_all_ranks(CheckpointError(problem) if problem else None)
        if writer is not None:
            try:
                write_file(writer.folder / CONFIG, _config(adapters))
                writer.finish()
                stack.close()
            except (BridgeError, OSError) as error:
                problem = str(error)
        raise_on_all_ranks(CheckpointError(problem) if problem else None)


def _pieces(adapters: Adapters, groups: ProcessGroups) -> Iterator[HfPiece]:
    for factor in stream_factors(adapters, groups):
        name = f"{PREFIX}{factor.module}.lora_{factor.letter}.weight"
        yield HfPiece(name, in_common_rank(factor, adapters.settings).tensor)


def in_common_rank(factor: HfFactor, settings: AdapterSettings) -> HfFactor:
    """Return a factor of the rank and scale of ``settings`` with the same product; itself where it has them."""
    dim = 0 if factor.letter == "A" else 1
    missing = settings.rank - factor.tensor.shape[dim]
    if not missing:
        return factor
    tensor = factor.tensor
    if factor.letter == "B":
        tensor = tensor * (factor.scale / settings.scale(settings.rank))
    zeros = tensor.new_zeros(*(missing if axis == dim else size for axis, size in enumerate(tensor.shape)))
    return HfFactor(factor.module, factor.letter, torch.cat([tensor, zeros], dim), settings.scale(settings.rank))


def _declared(adapters: Adapters) -> dict[str, tuple[Shape, torch.dtype]]:
    """Return name → (shape, dtype) of every tensor of the folder, in model order."""
    model, rank = adapters.model, adapters.settings.rank
    tensors: dict[str, tuple[Shape, torch.dtype]] = {}
    for module, (rows, columns) in selected_modules(adapters.selection, adapters).items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = ((rank, columns), model.config.params_dtype)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = ((rows, rank), model.config.params_dtype)
    return tensors


def selected_modules(selection: Selection, adapters: Adapters) -> dict[str, Shape]:
    """Return HF module → shape of its weight for every adapted projection of the whole model, in model order."""
    pieces = adapted(adapters.model.hf.plan, selection)
    return {piece.name.removesuffix(".weight"): piece.shape for _, piece in pieces}


def _config(adapters: Adapters) -> bytes:
    settings = adapters.settings
    modules = selected_modules(adapters.selection, adapters)
    ends = {module.rpartition(".")[2] for module in modules}
    everything = [name.removesuffix(".weight") for name in adapters.model.hf.plan.hf]
    uniform = all(name in modules for name in everything if name.rpartition(".")[2] in ends)
    path = adapters.model.hf.path
    repo = origin(path) if path else None
    return adapter_config(
        rank=settings.rank,
        alpha=settings.alpha,
        rank_stabilised=settings.rank_stabilised,
        dropout=settings.dropout,
        modules=sorted(ends) if uniform else list(modules),
        base=repo.name if repo else str(path) if path else None,
        revision=repo.revision if repo else None,
    )


def load_adapter(adapters: Adapters, groups: ProcessGroups, folder: str | Path) -> None:
    """Set the adapters from a PEFT folder; every rank calls it and reads its own shares.

    Raises ModelLoadError on every rank, naming file or projection and remedy: a folder that is damaged, of another
    model, of another rank or scale, or that does not have exactly the projections that are adapted here.
    """
    problem = None
    try:
        peft = PeftFolder(folder, adapters.model.hf.plan)
        _check(peft, adapters)
        fill_factors(adapters, groups, peft.factor)
    except (BridgeError, UnfitFactor, OSError) as error:
        problem = str(error) if str(folder) in str(error) else f"{folder}: {error}"
    raise_on_all_ranks(ModelLoadError(problem) if problem else None)


def _check(peft: PeftFolder, adapters: Adapters) -> None:
    settings, config = adapters.settings, peft.config
    for name, theirs, ours in (
        ("rank", config.rank, settings.rank),
        ("alpha", config.alpha, settings.alpha),
        ("use_rslora", config.rank_stabilised, settings.rank_stabilised),
    ):
        if theirs != ours:
            raise UnfitFactor(f"{KEY}.{name} is {ours}, the folder's {theirs}: set {KEY}.{name}={theirs}")
    wanted = set(selected_modules(adapters.selection, adapters))
    if absent := sorted(wanted - peft.modules):
        raise UnfitFactor(f"{absent[0]} has no adapter there ({len(absent)} in all): set {KEY}.target_modules to fit")
    if extra := sorted(peft.modules - wanted):
        raise UnfitFactor(f"{extra[0]} has an adapter there ({len(extra)} in all): set {KEY}.target_modules to fit")
