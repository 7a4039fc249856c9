"""Adapters by Hugging Face's names: factors of all ranks as whole tensors of single projections, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from bridges.rules import Entry
from skyrl_megatron.runtime.lora.adapter import Adapter, Factor
from skyrl_megatron.runtime.lora.attach import Adapters, adapter_modules
from skyrl_megatron.runtime.parallel_state import ProcessGroups


@dataclass(frozen=True, slots=True)
class HfFactor:
    """A factor of one HF projection (of one expert's)."""

    module: str
    """HF module, e.g. ``model.layers.3.self_attn.q_proj`` or ``model.layers.3.mlp.experts.7.gate_proj``."""
    letter: str
    """``A`` [rank, in] or ``B`` [out, rank]."""
    tensor: Tensor
    scale: float
    """What the product B·A of this projection is multiplied by."""


@torch.no_grad()
def stream_factors(
    adapters: Adapters, groups: ProcessGroups, *, of: Callable[[Tensor], Tensor] = lambda parameter: parameter.data
) -> Iterator[HfFactor]:
    """Yield every factor exactly once over all ranks, on the rank that gathers its shares, in module order.

    Every rank must exhaust it (tp and etp groups gather). A factor that serves several projections or experts comes
    once for each of them. ``of`` picks what is streamed of each parameter, such as its gradient.
    """
    for chunk in adapters.model.chunks:
        for adapter in adapter_modules(chunk):
            for factor in adapter.factors():
                whole = _gathered(factor, of(factor.tensor), adapter, groups)
                if whole is None:
                    continue
                for entry, matrix in _of_experts(adapters, adapter, factor, whole):
                    yield from _projections(adapter, factor, entry, matrix)


def _gathered(factor: Factor, share: Tensor, adapter: Adapter, groups: ProcessGroups) -> Tensor | None:
    """Return the whole tensor (of this rank's experts) on the first rank of the group that it is split over."""
    over, replicas = (groups.tp, groups.dp_cp) if factor.experts is None else (groups.etp, groups.edp)
    if replicas.rank() != 0:
        return None
    if factor.split is None or over.size() == 1:
        return share[: factor.rows] if over.rank() == 0 else None
    share = share.contiguous()
    shares = [torch.empty_like(share) for _ in range(over.size())] if over.rank() == 0 else None
    dist.gather(share, shares, group=over, group_dst=0)
    if shares is None:
        return None
    dim = factor.split - 2
    pieces = [each.chunk(factor.parts, dim) for each in shares]
    return torch.cat([rank[part] for part in range(factor.parts) for rank in pieces], dim)[: factor.rows]


def _of_experts(adapters: Adapters, adapter: Adapter, factor: Factor, whole: Tensor) -> Iterator[tuple[Entry, Tensor]]:
    for expert, matrix in factor.matrices(whole):
        if expert is None and adapter.experts is not None:  # one for all experts of the layer
            for each in range(adapters.model.config.num_moe_experts or 0):
                yield entry_of(adapters, adapter, each), matrix
        else:
            yield entry_of(adapters, adapter, expert), matrix


def entry_of(adapters: Adapters, adapter: Adapter, expert: int | None) -> Entry:
    """Return the weight of the map that an adapter stands beside (of one of its experts)."""
    name = adapter.name if expert is None else adapter.name.replace(".experts.", f".experts.{expert}.")
    return adapters.model.hf.plan.by_name[f"{name}.weight"]


def _projections(adapter: Adapter, factor: Factor, entry: Entry, matrix: Tensor) -> Iterator[HfFactor]:
    letter = factor.name[-1]
    modules = {
        piece.name.removesuffix(".weight").rpartition(".")[2]: piece.name.removesuffix(".weight") for piece in entry.hf
    }
    if not adapter.is_joined:
        yield HfFactor(modules[factor.name.split(".")[-2]], letter, matrix, adapter.scale)
        return
    each = (matrix,) * len(modules) if letter == "A" else entry.to_hf(matrix)
    for module, tensor in zip(modules.values(), each, strict=True):
        yield HfFactor(module, letter, tensor, adapter.scale)


class UnfitFactor(Exception):
    """A factor that is missing or does not fit; says which and why."""


@torch.no_grad()
def fill_factors(adapters: Adapters, groups: ProcessGroups, find: Callable[[str, str], Tensor]) -> None:
    """Set this rank's share of every factor. ``find(module, letter)`` returns the whole factor of a HF projection.

    Raises UnfitFactor where projections that share a factor here have different ones, or shapes differ.
    """
    for chunk in adapters.model.chunks:
        for adapter in adapter_modules(chunk):
            for factor in adapter.factors():
                for expert, matrix in factor.matrices():
                    whole = _whole(adapters, adapter, factor, expert, find)
                    matrix.copy_(_share(whole, factor, matrix, groups))


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
    found = [find(module, letter) for module in modules]
    if letter == "B":
        return entry.to_megatron(found)
    for module, other in zip(modules[1:], found[1:], strict=True):
        if not torch.equal(found[0], other):
            raise UnfitFactor(
                f"{modules[0]} and {module} have different lora_A, which lora_type=lora keeps as one; set "
                "trainer.policy.megatron_config.lora_config.lora_type=canonical_lora"
            )
    return found[0]


def _of_all_experts(
    adapters: Adapters, adapter: Adapter, factor: Factor, find: Callable[[str, str], Tensor]
) -> Tensor:
    """Return the factor that all experts of a layer share, having looked at every expert's."""
    first = _whole(adapters, adapter, factor, 0, find)
    for expert in range(1, adapters.model.config.num_moe_experts or 0):
        if not torch.equal(_whole(adapters, adapter, factor, expert, find), first):
            module = entry_of(adapters, adapter, expert).hf[0].name.removesuffix(".weight")
            raise UnfitFactor(
                f"{module} has another lora_{factor.name[-1]} than expert 0, and experts_shared_outer_loras keeps one "
                "for all: set trainer.policy.megatron_config.lora_config.experts_shared_outer_loras=false"
            )
    return first


def _share(whole: Tensor, factor: Factor, like: Tensor, groups: ProcessGroups) -> Tensor:
    over = groups.tp if factor.experts is None else groups.etp
    share = whole
    if factor.rows is not None:  # the rest is padding of the vocabulary
        share = whole = F.pad(whole, (0, 0, 0, max(0, like.shape[0] * over.size() - factor.rows)))
    if factor.split is not None:
        pieces = whole.chunk(factor.parts, 0) if factor.split == 0 else (whole,)
        share = torch.cat([piece.chunk(over.size(), factor.split)[over.rank()] for piece in pieces])
    if share.shape != like.shape:
        raise UnfitFactor(f"{factor.name} is {list(share.shape)}, the model needs {list(like.shape)}")
    return share


def by_module(factors: Mapping[str, Tensor]) -> Callable[[str, str], Tensor]:
    """Return ``find`` over tensors named ``MODULE.A`` and ``MODULE.B``."""

    def find(module: str, letter: str) -> Tensor:
        if f"{module}.{letter}" not in factors:
            raise UnfitFactor(f"{module} has no lora_{letter}")
        return factors[f"{module}.{letter}"]

    return find
