"""Adapters of all ranks as one PEFT folder, and back at any layout."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bridges.errors import BridgeError
from bridges.hf_write import HfWriter
from bridges.peft_folder import (
    CONFIG,
    WEIGHTS,
    AdapterConfig,
    PeftFolder,
    adapter_config,
    dropped_by_peft,
    tensor_on_disk,
)
from bridges.rows import Shape
from bridges.staging import staged, write_file
from skyrl_megatron.errors import CheckpointError, ModelLoadError, SkyRLMegatronWarning
from skyrl_megatron.hub import origin
from skyrl_megatron.runtime.agreement import from_rank_0, raise_on_all_ranks
from skyrl_megatron.runtime.hf.export import HfPiece, write_pieces
from skyrl_megatron.runtime.lora.adapter import AdapterSettings
from skyrl_megatron.runtime.lora.attach import Adapters, adapter_modules
from skyrl_megatron.runtime.lora.folder_fit import BASE, base_file, base_misfit, misfits, selected_modules
from skyrl_megatron.runtime.lora.names import HfFactor, UnfitFactor, fill_factors, stream_factors
from skyrl_megatron.runtime.parallel_state import ProcessGroups


def save_adapter(adapters: Adapters, groups: ProcessGroups, out: str | Path, base: str | None = None) -> None:
    """Write the adapters as a PEFT folder with experts one by one; every rank calls it and writes what it owns.

    All projections have the rank of the settings: where experts have a smaller one, their factors end in zeros, and
    ``lora_B`` takes up what their scale differs by. ``base``: fingerprint of the weights, for whoever loads the
    folder. ``out`` must be on a file system that all ranks share; it appears whole or not at all. Raises
    CheckpointError on every rank, with nothing left behind, when it cannot be written. Warns on rank 0 of modules that
    PEFT leaves out when it opens the folder.
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
                if base is not None:
                    write_file(writer.folder / BASE, base_file(base))
                writer.finish()
                stack.close()
            except (BridgeError, OSError) as error:
                problem = str(error)
        raise_on_all_ranks(CheckpointError(problem) if problem else None)
    if writer is not None:
        _warn_of_peft(adapters)


def _warn_of_peft(adapters: Adapters) -> None:
    """Name the modules that PEFT drops; the text has no folder in it, so that a run prints it once for all exports."""
    hf = adapters.model.hf
    dropped = dropped_by_peft(str(hf.config["model_type"]), selected_modules(adapters.selection, hf.plan))
    if dropped:
        warnings.warn(
            f"PEFT does not apply these modules of an exported {hf.config['model_type']} adapter: "
            f"{', '.join(dropped)}. Use the merged model, which has all of them: the export's policy folder, or "
            "python -m bridges merge --hf BASE --adapter ADAPTER --out MERGED (docs/guides/after-a-run.md)",
            SkyRLMegatronWarning,
            stacklevel=3,
        )


def _pieces(adapters: Adapters, groups: ProcessGroups) -> Iterator[HfPiece]:
    for factor in stream_factors(adapters, groups):
        factor = in_common_rank(factor, adapters.settings)
        yield HfPiece(*tensor_on_disk(factor.module, factor.letter, factor.tensor))


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
    for module, (rows, columns) in selected_modules(adapters.selection, model.hf.plan).items():
        for letter, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            name, like = tensor_on_disk(module, letter, torch.empty(shape, device="meta"))
            tensors[name] = (tuple(like.shape), model.config.params_dtype)
    return tensors


def _config(adapters: Adapters) -> bytes:
    settings = adapters.settings
    modules = selected_modules(adapters.selection, adapters.model.hf.plan)
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


def load_adapter(adapters: Adapters, groups: ProcessGroups, folder: str | Path, base: str | None = None) -> None:
    """Set the adapters from a PEFT folder; every rank calls it and reads its own shares.

    ``base``: fingerprint of the weights that they are added to. Raises ModelLoadError on every rank, naming file or
    projection and remedy: a folder that is damaged, of another model or base, of another rank or scale, or that does
    not have exactly the projections that are adapted here.
    """
    problem = None
    try:
        settings, plan = adapters.settings, adapters.model.hf.plan
        peft = PeftFolder(folder, plan)
        wanted = AdapterConfig(settings.rank, settings.alpha, settings.rank_stabilised, None)
        wrong = [*misfits(peft, wanted, adapters.selection, plan)]
        if base is not None and (other := base_misfit(Path(folder), base)):
            wrong.append(other)
        if wrong:
            raise UnfitFactor("; ".join(wrong))
        fill_factors(adapters, groups, _OwnRanks(peft, adapters))
    except (BridgeError, UnfitFactor, OSError) as error:
        problem = str(error) if str(folder) in str(error) else f"{folder}: {error}"
    raise_on_all_ranks(ModelLoadError(problem) if problem else None)


class _OwnRanks:
    """The factors of a folder in the ranks that adapters have here: the inverse of :func:`in_common_rank`."""

    def __init__(self, peft: PeftFolder, adapters: Adapters) -> None:
        self.peft, self.settings = peft, adapters.settings
        self.expert_rank = min(
            (
                factor.tensor.shape[-2 if factor.name.endswith(".A") else -1]
                for chunk in adapters.model.chunks
                for adapter in adapter_modules(chunk)
                if adapter.experts is not None
                for factor in adapter.factors()
            ),
            default=self.settings.rank,
        )
        self._of_experts = {
            piece.name.removesuffix(".weight")
            for entry in adapters.model.hf.plan.entries
            if entry.is_expert
            for piece in entry.hf
        }

    def __call__(self, module: str, letter: str) -> Tensor:
        whole = self.peft.factor(module, letter)
        rank = self.expert_rank if module in self._of_experts else self.settings.rank
        if rank == self.settings.rank:
            return whole
        dim = 0 if letter == "A" else 1
        kept, cut = whole.split([rank, self.settings.rank - rank], dim)
        if cut.count_nonzero():
            raise UnfitFactor(
                f"{module} uses a rank of more than {rank}, which normalize_moe_lora leaves to experts: set "
                "trainer.policy.megatron_config.lora_config.normalize_moe_lora=false"
            )
        if letter == "B":
            kept = kept * (self.settings.scale(self.settings.rank) / self.settings.scale(rank))
        own: Tensor = kept
        return own
