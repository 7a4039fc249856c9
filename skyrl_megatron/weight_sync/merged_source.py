"""A model with low-rank adapters as the source of plain HF tensors: base weights with the adapters added.

The base in the trainer stays as it is: products of factors are added to the rows that are copied into a bucket, in
fp32 and rounded once, as ``bridges/merge_adapter.py`` does. So a sync holds no second copy of the weights, and an
adapter that has gone back to zero sends the base bit for bit. A rank's shares of the two factors are what its share of
the map needs, so that nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.runtime.lora.adapter import Adapter
from skyrl_megatron.runtime.lora.attach import Adapters, adapter_modules
from skyrl_megatron.runtime.model.local_weights import LocalWeight
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource
from skyrl_megatron.weight_sync.source import TensorShard


@dataclass(slots=True)
class _Factors:
    """Those of an adapter, as of the last refresh (``Adapter.whole_factors``)."""

    adapter: Adapter
    a: Tensor | None = None
    b: Tensor | None = None

    def added_to(self, base: Tensor, rows: slice, columns: slice, number: int | None) -> Tensor:
        """Add rows and columns of the product to those of the base. ``number``: of the expert, among this rank's."""
        assert self.a is not None and self.b is not None, "refresh() comes first"
        a, b = (each if number is None or each.dim() == 2 else each[number] for each in (self.a, self.b))
        return (base.float() + b[rows] @ a[:, columns] * self.adapter.scale).to(base.dtype)


class MergedWeightSource(MegatronWeightSource):
    """What :class:`MegatronWeightSource` lists, with ``adapters`` in it."""

    def __init__(self, adapters: Adapters, groups: ProcessGroups) -> None:
        super().__init__(adapters.model, groups)
        self._factors: list[_Factors] = []
        self._of_weight: dict[str, tuple[_Factors, int | None]] = {}
        for adapter in (each for hung in adapters.hung for each in adapter_modules(hung)):
            self._factors.append(_Factors(adapter))
            if adapter.experts is None:
                self._of_weight[f"{adapter.name}.weight"] = self._factors[-1], None
                continue
            for number, expert in enumerate(adapter.experts):
                name = adapter.name.replace(".experts.", f".experts.{expert}.")
                self._of_weight[f"{name}.weight"] = self._factors[-1], number

    def refresh(self) -> None:
        """Take the factors as they are now."""
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
