"""The factors of a Megatron model's adapters as a source of tensors, for engines that hold the base weights.

Factors are sent from the optimizer's memory. Which rows of which rank's shard make up a factor follows from the layer
that the adapter is attached to, as for the layer's weight (``megatron_source.py``). Nothing is gathered first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.config.hf_model import ENGINE_KWARGS
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.runtime.lora.attach import Adapters, adapter_modules
from skyrl_megatron.runtime.lora.folder import entry_of
from skyrl_megatron.runtime.lora.layers import Adapter, Factor
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron.weight_sync.adapter_tensors import FactorName, stacked
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.megatron_source import (
    MegatronWeightSource,
    MergedWeightSource,
    QuantisedWeightSource,
    ranges_in_shards,
)
from skyrl_megatron.weight_sync.tensors import RowRange, TensorShard, WeightSource, as_rows, dtype_name, memory_id


class AdapterSource:
    """The factors that a rank holds of one or several ``adapters`` (by name), named as in ``adapter_tensors.py``: one
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
            # (vllm_adapters._of_local_experts).
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


def weight_source(
    model: ModelChunks,
    adapters: Mapping[str, Adapters],
    groups: ProcessGroups,
    *,
    adapters_alone: bool,
    quantised: bool = False,
) -> WeightSource:
    """Return the source of what a rank sends to engines: the weights, with the adapter merged if one is trained, or
    only ``adapters`` (by name). ``quantised``: engines hold the weights in the 8-bit format of the model's folder.

    Raises WeightSyncError for an adapter that would be merged into 8-bit weights.
    """
    if not adapters:
        return QuantisedWeightSource.of_folder(model, groups) if quantised else MegatronWeightSource(model, groups)
    if adapters_alone:
        return AdapterSource(adapters, groups)
    if quantised:
        raise WeightSyncError(
            "trainer.policy.model.lora.sync_mode=merged: an adapter cannot be merged into 8-bit weights; set "
            f"{ENGINE_KWARGS}.load_format=dummy and {ENGINE_KWARGS}.hf_overrides.quantization_config=null"
        )
    (adapter,) = adapters.values()
    return MergedWeightSource(adapter, groups)
