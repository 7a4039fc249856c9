"""Adapters as a source of tensors: alone, for engines that hold the base weights, or merged into the weights.

:class:`AdapterSource` sends factors from the optimizer's memory. Which rows of which rank's shard make up a factor
follows from the layer that the adapter is attached to, as for the layer's weight (``weight_sync/megatron_source.py``).
Nothing is gathered first.

:class:`MergedWeightSource` adds an adapter while rows are copied into a bucket, in fp32 with one rounding, as
``bridges.peft.merge_adapter`` does. The trainer's base weights do not change, a sync needs no second copy of the
weights, and an adapter of zeros sends the base bit for bit. A rank holds the shards of both factors that its shard of
the layer needs, so nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.runtime.model.local_weights import LocalWeight
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource, ranges_in_shards
from skyrl_megatron.weight_sync.tensors import RowRange, TensorShard, as_rows, dtype_name, memory_id
from skyrl_megatron_lora.attach import Adapters, adapter_modules
from skyrl_megatron_lora.folder import entry_of
from skyrl_megatron_lora.layers import Adapter, Factor
from skyrl_megatron_lora.tensors import FactorName, stacked


class AdapterSource:
    """The factors that a rank holds of one or several ``adapters`` (by name), named as in ``tensors.py``: one
    adapter after the other, each in module order.

    Without a reshard plan, of the ranks that hold shards or copies of a factor the first rank of the first replica
    sends it. The scale of an adapter is multiplied into the ``lora_B`` that is sent: a copy that :meth:`refresh`
    fills.
    """

    def __init__(self, adapters: Mapping[str, Adapters], groups: ProcessGroups) -> None:
        self.adapters, self.groups = dict(adapters), groups
        self.chosen: Sequence[str] = tuple(adapters)
        """The adapters that are sent and listed in :meth:`shards`; equal on all ranks."""
        self._scaled: dict[torch.nn.Parameter, Tensor] = {}
        """Factor → its scaled copy, which is sent instead."""

    def metadata(self) -> Sequence[TensorMeta]:
        return [shard.meta for shard in self.shards() if shard.rank == 0]

    def shards(self) -> Sequence[TensorShard]:
        return [shard for factor, shard in self._all(self.chosen) if self._takes_part(factor)]

    def local_shards(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        """List the shards of all adapters that this rank holds, see ``WeightSource``."""
        found = list(self._all(self.adapters))
        ranks = [0 if shard.group is None else self._groups(factor)[0].rank() for factor, shard in found]
        return [shard for _, shard in found], ranks

    def sends_adapter(self, adapter: str) -> bool:
        return adapter in self.chosen

    def choose(self, adapters: Sequence[str]) -> None:
        self.chosen = adapters

    @torch.no_grad()
    def refresh(self) -> None:
        for name in self.chosen:
            for adapter, factor in self._factors(name):
                # lora_A, and lora_B at scale 1, are sent from the optimizer's own memory: there is nothing to
                # update
                if (sent := self._sent(adapter, factor)) is not factor.tensor:
                    torch.mul(factor.tensor, adapter.scale, out=sent)

    def _all(self, adapters: Iterable[str]) -> Iterator[tuple[Factor, TensorShard]]:
        """Yield (factor, shard) of these adapters on this rank."""
        position = 0  # of a tensor; the same on all ranks of the groups that gather it
        for name in adapters:
            for adapter, factor in self._factors(name):
                for sent_tensor in self._tensors(name, adapter, factor):
                    for part in _runs(factor.experts):
                        yield factor, self._shard(adapter, factor, position, part, *sent_tensor)
                        position += 1

    def _sent(self, adapter: Adapter, factor: Factor) -> Tensor:
        """Return the tensor that is sent of a factor: its own memory, or memory for the scaled copy."""
        if factor.name[-1] == "A" or adapter.scale == 1:
            return factor.tensor
        if factor.tensor not in self._scaled:
            # Kept between syncs: the export plan holds views of it, so its memory must not move.
            self._scaled[factor.tensor] = torch.empty_like(factor.tensor, requires_grad=False)
        return self._scaled[factor.tensor]

    def _factors(self, name: str) -> Iterator[tuple[Adapter, Factor]]:
        for adapter in (each for chunk in self.adapters[name].by_chunk for each in adapter_modules(chunk)):
            for factor in adapter.factors():
                yield adapter, factor

    def addresses(self) -> list[int]:
        factors = (factor for name in self.chosen for factor in self.adapters[name].factors())
        return [number for factor in factors for number in memory_id(factor.tensor)]

    def _takes_part(self, factor: Factor) -> bool:
        """Return whether this rank sends the factor, or holds a shard for the rank that sends it."""
        over, replicas = self._groups(factor)
        # a factor that is not split is equal on all ranks of ``over``, so one of them is enough
        return replicas.rank() == 0 and (factor.split is not None or over.rank() == 0)

    def _groups(self, factor: Factor) -> tuple[Any, Any]:
        """Return the groups that a factor is split over and replicated over."""
        groups = self.groups
        # Megatron has process groups of their own for the parameters of experts
        return (groups.tp, groups.dp_cp) if factor.experts is None else (groups.etp, groups.edp)

    def _tensors(
        self, name: str, adapter: Adapter, factor: Factor
    ) -> Iterator[tuple[FactorName, int, Sequence[RowRange]]]:
        """Yield (name, rows, ranges) of the tensors sent for a factor; rows and ranges are those of one expert."""
        size = 1 if factor.split is None else self._groups(factor)[0].size()
        letter, matrix = factor.name[-1], next(factor.matrices())[1]
        held, width = matrix.shape
        # One expert stands for all: their factors are alike, and _of_experts repeats the rows.
        entry = entry_of(self.adapters[name], adapter, None if adapter.experts is None else adapter.experts[0])
        modules = [stacked(piece.name.removesuffix(".weight")) for piece in entry.hf]
        if adapter.is_joined and letter == "B":
            # One B serves several projections. Its rows are interleaved as those of the layer's weight, so each
            # projection is a list of ranges, not one block.
            ranges_of_pieces = ranges_in_shards(entry, size, matrix)
            for module, piece, rows_of_it in zip(modules, entry.hf, ranges_of_pieces, strict=True):
                yield FactorName((module,), letter, name), piece.shape[0], rows_of_it
            return
        if not adapter.is_joined:
            modules = [module for module in modules if module.endswith(f".{factor.name.split('.')[-2]}")]
        if factor.split == 0:
            ranges = [RowRange(owner, owner * held, held, 0) for owner in range(size)]
            yield FactorName(tuple(modules), letter, name), size * held, ranges
        else:
            ranges = [RowRange(owner, 0, held, 0, column=owner * width) for owner in range(size)]
            yield FactorName(tuple(modules), letter, name), held, ranges

    def _shard(
        self,
        adapter: Adapter,
        factor: Factor,
        position: int,
        part: range,
        name: FactorName,
        rows: int,
        ranges: Sequence[RowRange],
    ) -> TensorShard:
        """Return the shard of the experts at ``part`` of a factor, which have consecutive numbers."""
        over, _ = self._groups(factor)
        size = 1 if factor.split is None else over.size()
        held, width = next(factor.matrices())[1].shape
        columns = width * (size if factor.split == 1 else 1)
        shape: tuple[int, ...] = (rows, columns)
        sent: tuple[int, int] | None = None
        if factor.experts is not None:
            shape = (self.adapters[name.adapter].model.config.num_moe_experts or 0, *shape)
            sent = factor.experts[part[0]], factor.experts[part[-1]] + 1
            ranges = _of_experts(ranges, part, rows, held)
        elif adapter.experts is not None:
            # All experts share this factor. It travels once; the worker expands it
            # (vllm_worker._of_local_experts).
            shape = (1, *shape)
        meta = TensorMeta(str(name), dtype_name(factor.tensor), shape, sent, position=position)
        local = as_rows(factor.name, self._sent(adapter, factor).detach())
        return TensorShard(meta, local, ranges, over if size > 1 else None)


def _runs(experts: Sequence[int] | None) -> Iterator[range]:
    """Yield the longest runs of places whose experts have consecutive numbers; one place for a factor without
    experts."""
    if experts is None:
        yield range(1)
        return
    first = 0
    for end in range(1, len(experts) + 1):
        if end == len(experts) or experts[end] != experts[end - 1] + 1:
            yield range(first, end)
            first = end


def _of_experts(ranges: Sequence[RowRange], part: range, rows: int, held: int) -> list[RowRange]:
    """Repeat the ranges of one expert's factor, [rows, …], for those at ``part``; each owner holds ``held`` rows of an
    expert."""
    # complete experts with consecutive numbers are one run of rows: one copy instead of one per expert
    if all(span.count == rows == held and span.step == 1 for span in ranges):
        return [replace(span, count=len(part) * rows, first=span.first + part[0] * held) for span in ranges]
    return [
        replace(span, start=span.start + number * rows, first=span.first + expert * held)
        for number, expert in enumerate(part)
        for span in ranges
    ]


@dataclass(slots=True)
class _Factors:
    """The factors of an adapter at the last refresh (``Adapter.whole_factors``)."""

    adapter: Adapter
    a: Tensor | None = None
    b: Tensor | None = None

    def added_to(self, base: Tensor, rows: slice, columns: slice, number: int | None) -> Tensor:
        """Add rows and columns of B·A to those of the base. ``number``: index of the expert on this rank."""
        assert self.a is not None and self.b is not None, "refresh() comes first"
        a, b = (each if number is None or each.dim() == 2 else each[number] for each in (self.a, self.b))
        # One rounding, at the end, as in bridges.peft.merge_adapter: engines then hold the bits that an export
        # has.
        return (base.float() + b[rows] @ a[:, columns] * self.adapter.scale).to(base.dtype)


class MergedWeightSource(MegatronWeightSource):
    """The tensors of :class:`MegatronWeightSource` with ``adapters`` merged."""

    def __init__(self, adapters: Adapters, groups: ProcessGroups) -> None:
        super().__init__(adapters.model, groups)
        self._factors: list[_Factors] = []
        self._of_weight: dict[str, tuple[_Factors, int | None]] = {}
        for adapter in (module for chunk in adapters.by_chunk for module in adapter_modules(chunk)):
            self._factors.append(_Factors(adapter))
            if adapter.experts is None:
                self._of_weight[f"{adapter.name}.weight"] = self._factors[-1], None
                continue
            # one adapter module serves all experts of the rank, but weights are listed expert by expert
            for number, expert in enumerate(adapter.experts):
                name = adapter.name.replace(".experts.", f".experts.{expert}.")
                self._of_weight[f"{name}.weight"] = self._factors[-1], number

    def refresh(self) -> None:
        """Read the current factors."""
        for factors in self._factors:
            factors.a, factors.b = factors.adapter.whole_factors()

    def _all(self) -> Iterator[tuple[LocalWeight, Any, Any, TensorShard]]:
        for weight, over, replicas, shard in super()._all():
            if found := self._of_weight.get(weight.entry.name):
                shard = replace(shard, make=partial(_merged, shard, *found))
            yield weight, over, replicas, shard


@torch.no_grad()
def _merged(base: TensorShard, factors: _Factors, number: int | None, rows: slice, columns: slice) -> Tensor:
    part = base.part(rows, columns)
    return factors.added_to(part if isinstance(part, Tensor) else part(), rows, columns, number)
