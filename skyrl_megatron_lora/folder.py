"""Save the adapters of all ranks as one PEFT folder, and load a folder at any layout."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from bridges.disk_form import DiskForm
from bridges.errors import BridgeError
from bridges.hf_io import HfWriter
from bridges.peft import CONFIG, WEIGHTS, AdapterConfig, PeftFolder, adapter_config, dropped_by_peft, tensor_on_disk
from bridges.rows import Shape
from bridges.rules import Entry
from bridges.staging import staged, write_file
from skyrl_megatron.errors import CheckpointError, ModelLoadError, SkyRLMegatronWarning
from skyrl_megatron.hub import origin
from skyrl_megatron.runtime.hf_weights import HfTensor, write_pieces
from skyrl_megatron.runtime.parallel_state import ProcessGroups, from_rank_0, raise_on_all_ranks
from skyrl_megatron_lora.attach import Adapters, adapter_modules
from skyrl_megatron_lora.layers import Adapter, AdapterSettings, Factor
from skyrl_megatron_lora.targets import (
    BASE,
    adapter_mismatches,
    base_file,
    base_mismatch,
    selected_modules,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class HfFactor:
    """A factor of one HF projection, of one expert if it belongs to experts."""

    module: str
    """HF module, e.g. ``model.layers.3.self_attn.q_proj`` or ``model.layers.3.mlp.experts.7.gate_proj``."""
    letter: str
    """``A`` [rank, in] or ``B`` [out, rank]."""
    tensor: Tensor
    scale: float
    """The factor by which B·A of this projection is multiplied."""


@torch.no_grad()
def stream_factors(
    adapters: Adapters, groups: ProcessGroups, *, of: Callable[[Tensor], Tensor] = lambda parameter: parameter.data
) -> Iterator[HfFactor]:
    """Yield every factor, [rank, in] or [out, rank], exactly once over all ranks, on the rank that gathers its shards,
    in module order.

    Every rank must exhaust the iterator (tp and etp groups gather). A factor that serves several projections or
    experts is yielded once for each of them. ``of`` selects the tensor of each parameter, such as its gradient.
    """
    for chunk in adapters.model.chunks:
        for adapter in adapter_modules(chunk):
            for factor in adapter.factors():
                tensor = _gathered(factor, of(factor.tensor), adapter, groups)
                if tensor is None:
                    continue
                for entry, matrix in _of_experts(adapters, adapter, factor, tensor):
                    yield from _projections(adapter, factor, entry, matrix)


def _gathered(factor: Factor, share: Tensor, adapter: Adapter, groups: ProcessGroups) -> Tensor | None:
    """Return the whole tensor (for this rank's experts) on the first rank of the group that it is split over."""
    over, replicas = (groups.tp, groups.dp_cp) if factor.experts is None else (groups.etp, groups.edp)
    # replicas hold the same factors
    if replicas.rank() != 0:
        return None
    if factor.split is None or over.size() == 1:
        # rows beyond factor.rows are padding of the vocabulary
        return share[: factor.rows] if over.rank() == 0 else None
    share = share.contiguous()
    shares = [torch.empty_like(share) for _ in range(over.size())] if over.rank() == 0 else None
    dist.gather(share, shares, group=over, group_dst=0)
    if shares is None:
        return None
    dim = factor.split - 2
    pieces = [shard.chunk(factor.parts, dim) for shard in shares]
    # a shard has its part of each stacked matrix (gate, up): parts of all ranks are put together one by one
    return torch.cat([rank[part] for part in range(factor.parts) for rank in pieces], dim)[: factor.rows]


def _of_experts(adapters: Adapters, adapter: Adapter, factor: Factor, whole: Tensor) -> Iterator[tuple[Entry, Tensor]]:
    for expert, matrix in factor.matrices(whole):
        if expert is None and adapter.experts is not None:  # one for all experts of the layer
            for each in range(adapters.model.config.num_moe_experts or 0):
                yield entry_of(adapters, adapter, each), matrix
        else:
            yield entry_of(adapters, adapter, expert), matrix


def entry_of(adapters: Adapters, adapter: Adapter, expert: int | None) -> Entry:
    """Return the plan's entry for the weight of an adapter's layer, or for one of its experts."""
    name = adapter.name if expert is None else adapter.name.replace(".experts.", f".experts.{expert}.")
    return adapters.model.hf.plan.by_name[f"{name}.weight"]


def factors_of_experts(adapters: Adapters) -> Iterator[tuple[int, Factor]]:
    """Yield (layer number, factor) of this rank's factors that belong to single experts, in module order."""
    for adapter in (each for chunk in adapters.by_chunk for each in adapter_modules(chunk)):
        for factor in adapter.factors():
            if factor.experts is not None:
                yield entry_of(adapters, adapter, factor.experts[0]).layer_number, factor


def _projections(adapter: Adapter, factor: Factor, entry: Entry, matrix: Tensor) -> Iterator[HfFactor]:
    letter = factor.name[-1]
    modules = {
        piece.name.removesuffix(".weight").rpartition(".")[2]: piece.name.removesuffix(".weight") for piece in entry.hf
    }
    if not adapter.is_joined:
        yield HfFactor(modules[factor.name.split(".")[-2]], letter, matrix, adapter.scale)
        return
    # one A serves all projections, so each gets the same; B has the rows of all of them
    tensors = (matrix,) * len(modules) if letter == "A" else entry.to_hf(matrix)
    for module, tensor in zip(modules.values(), tensors, strict=True):
        yield HfFactor(module, letter, tensor, adapter.scale)


class FactorMismatch(Exception):
    """A factor is missing or does not fit. The message says which and why."""


@torch.no_grad()
def fill_factors(adapters: Adapters, groups: ProcessGroups, find: Callable[[str, str], Tensor]) -> None:
    """Set this rank's shard of every factor. ``find(module, letter)`` returns the whole factor of an HF projection,
    [rank, in] or [out, rank].

    Raises FactorMismatch if projections that share a factor here have different ones, or shapes differ.
    """
    for chunk in adapters.model.chunks:
        for adapter in adapter_modules(chunk):
            for factor in adapter.factors():
                for expert, matrix in factor.matrices():
                    tensor = _whole(adapters, adapter, factor, expert, find)
                    matrix.copy_(_share(tensor, factor, matrix, groups))


def _whole(
    adapters: Adapters, adapter: Adapter, factor: Factor, expert: int | None, find: Callable[[str, str], Tensor]
) -> Tensor:
    if adapter.experts is not None and expert is None:
        return _of_all_experts(adapters, adapter, factor, find)
    entry = entry_of(adapters, adapter, expert)
    letter = factor.name[-1]
    modules = [piece.name.removesuffix(".weight") for piece in entry.hf]
    if not adapter.is_joined:
        projection = factor.name.split(".")[-2]
        return find(next(module for module in modules if module.endswith(f".{projection}")), letter)
    factors = [find(module, letter) for module in modules]
    if letter == "B":
        return entry.to_megatron(factors)
    for module, other in zip(modules[1:], factors[1:], strict=True):
        # the folder's format has one A per projection, and here there is one for all
        if not torch.equal(factors[0], other):
            raise FactorMismatch(
                f"{modules[0]} and {module} have different lora_A, but lora_type=lora shares one; set "
                "trainer.policy.megatron_config.lora_config.lora_type=canonical_lora"
            )
    return factors[0]


def _of_all_experts(
    adapters: Adapters, adapter: Adapter, factor: Factor, find: Callable[[str, str], Tensor]
) -> Tensor:
    """Return the factor that all experts of a layer share. Raises FactorMismatch if an expert's factor differs."""
    first = _whole(adapters, adapter, factor, 0, find)
    for expert in range(1, adapters.model.config.num_moe_experts or 0):
        if not torch.equal(_whole(adapters, adapter, factor, expert, find), first):
            module = entry_of(adapters, adapter, expert).hf[0].name.removesuffix(".weight")
            raise FactorMismatch(
                f"{module} has another lora_{factor.name[-1]} than expert 0, but experts_shared_outer_loras shares "
                "one: set trainer.policy.megatron_config.lora_config.experts_shared_outer_loras=false"
            )
    return first


def _share(tensor: Tensor, factor: Factor, like: Tensor, groups: ProcessGroups) -> Tensor:
    over = groups.tp if factor.experts is None else groups.etp
    share = tensor
    if factor.rows is not None:  # the rest is padding of the vocabulary
        share = tensor = F.pad(tensor, (0, 0, 0, max(0, like.shape[0] * over.size() - factor.rows)))
    if factor.split is not None:
        # gate and up are split apart: cutting the joined rows would give one rank gate alone
        pieces = tensor.chunk(factor.parts, 0) if factor.split == 0 else (tensor,)
        share = torch.cat([piece.chunk(over.size(), factor.split)[over.rank()] for piece in pieces])
    if share.shape != like.shape:
        raise FactorMismatch(
            f"{factor.name} is {list(share.shape)}, the model needs {list(like.shape)}: use an adapter of this model "
            "and rank"
        )
    return share


def save_adapter(adapters: Adapters, groups: ProcessGroups, out: str | Path, base: str | None = None) -> None:
    """Write the adapters as a PEFT folder with experts one by one. Every rank calls it and writes what it owns.

    All projections have the rank of the settings. If experts have a smaller rank, their factors are padded with zeros,
    and ``lora_B`` compensates the difference of scales. ``base``: fingerprint of the base weights, which a load
    compares. ``out`` must be on a file system that all ranks share. It appears complete or not at all. Raises
    CheckpointError on every rank if it cannot be written. Warns on rank 0 about modules that PEFT ignores when it
    loads the folder.
    """
    out = Path(out)
    writer, problem = None, None
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            try:
                tensors = _declared(adapters)
                needed = sum(4 * shape[0] * shape[1] for shape, _ in tensors.values())
                folder = stack.enter_context(staged(out, needed))
                # one file: PEFT reads no index
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
    # after the export is complete: as an error, the warning would otherwise leave a part of it
    if writer is not None:
        _warn_of_peft(adapters)


def _warn_of_peft(adapters: Adapters) -> None:
    """Warn about modules that PEFT ignores. The text names no folder, so that a run prints it once for all exports."""
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


def _pieces(adapters: Adapters, groups: ProcessGroups) -> Iterator[HfTensor]:
    for factor in stream_factors(adapters, groups):
        factor = in_common_rank(factor, adapters.settings)
        yield HfTensor(*tensor_on_disk(_name(adapters, factor.module), factor.letter, factor.tensor))


def _name(adapters: Adapters, module: str) -> str:
    """Return PEFT's name of a module: in a model of text and images it is the one on disk."""
    return DiskForm.of(adapters.model.hf.written).name(module)


def in_common_rank(factor: HfFactor, settings: AdapterSettings) -> HfFactor:
    """Return an equivalent factor with the rank and scale of ``settings``; the factor itself if it has them."""
    dim = 0 if factor.letter == "A" else 1
    missing = settings.rank - factor.tensor.shape[dim]
    if not missing:
        return factor
    tensor = factor.tensor
    if factor.letter == "B":
        # B makes up for the scale: with α / rank a larger rank alone would shrink the product
        tensor = tensor * (factor.scale / settings.scale(settings.rank))
    zeros = tensor.new_zeros(*(missing if axis == dim else size for axis, size in enumerate(tensor.shape)))
    return HfFactor(factor.module, factor.letter, torch.cat([tensor, zeros], dim), settings.scale(settings.rank))


def _declared(adapters: Adapters) -> dict[str, tuple[Shape, torch.dtype]]:
    """Return name → (shape, dtype) of every tensor of the folder, in model order."""
    model, rank = adapters.model, adapters.settings.rank
    tensors: dict[str, tuple[Shape, torch.dtype]] = {}
    for module, (rows, columns) in selected_modules(adapters.selection, model.hf.plan).items():
        for letter, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            name, like = tensor_on_disk(_name(adapters, module), letter, torch.empty(shape, device="meta"))
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
        scale=settings.scale(settings.rank),
        modules=sorted(ends) if uniform else [_name(adapters, module) for module in modules],
        base=repo.name if repo else str(path) if path else None,
        revision=repo.revision if repo else None,
    )


def load_adapter(adapters: Adapters, groups: ProcessGroups, folder: str | Path, base: str | None = None) -> None:
    """Load the adapters from a PEFT folder. Every rank calls it and reads its own shards.

    ``base``: fingerprint of the base weights. Raises ModelLoadError on every rank, with the file or projection and the
    fix, if the folder is damaged, is of another model, base, rank or scale, or does not have exactly the projections
    that are adapted here.
    """
    problem = None
    try:
        settings, plan = adapters.settings, adapters.model.hf.plan
        peft = PeftFolder(folder, plan)
        wanted = AdapterConfig(settings.rank, settings.alpha, settings.rank_stabilised, None)
        wrong = [*adapter_mismatches(peft, wanted, adapters.selection, plan)]
        if base is not None and (other := base_mismatch(Path(folder), base)):
            wrong.append(other)
        if wrong:
            raise FactorMismatch("; ".join(wrong))
        fill_factors(adapters, groups, _OwnRanks(peft, adapters))
    except (BridgeError, FactorMismatch, OSError) as error:
        problem = str(error) if str(folder) in str(error) else f"{folder}: {error}"
    raise_on_all_ranks(ModelLoadError(problem) if problem else None)


class _OwnRanks:
    """Reads the factors of a folder in the ranks that adapters have here: the inverse of :func:`in_common_rank`."""

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
        stored = self.peft.factor(module, letter)
        rank = self.expert_rank if module in self._of_experts else self.settings.rank
        if rank == self.settings.rank:
            return stored
        dim = 0 if letter == "A" else 1
        kept, cut = stored.split([rank, self.settings.rank - rank], dim)
        # zeros that an export added are cut again; anything else there was trained
        if cut.count_nonzero():
            raise FactorMismatch(
                f"{module} has a rank above {rank}, which is all that normalize_moe_lora leaves to experts: set "
                "trainer.policy.megatron_config.lora_config.normalize_moe_lora=false"
            )
        if letter == "B":
            kept = kept * (self.settings.scale(self.settings.rank) / self.settings.scale(rank))
        factor: Tensor = kept
        return factor
