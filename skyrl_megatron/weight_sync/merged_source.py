"""A model with low-rank adapters as the source of plain HF tensors: base weights with the adapters added.

The base in the trainer stays as it is: products of factors are added to the rows that lie in a bucket, in fp32 and
rounded once, as ``bridges/merge_adapter.py`` does. So a sync holds no second copy of the weights, and an adapter that
has gone back to zero sends the base bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bridges.rules import Entry
from skyrl_megatron.runtime.lora.attach import Adapters
from skyrl_megatron.runtime.lora.names import stream_factors
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource
from skyrl_megatron.weight_sync.routes import Unroutable
from skyrl_megatron.weight_sync.source import TensorShard


@dataclass(frozen=True, slots=True)
class _Product:
    """scale · B·A of one HF projection, whole."""

    a: Tensor
    b: Tensor
    scale: float


class MergedWeightSource(MegatronWeightSource):
    """What :class:`MegatronWeightSource` lists, with ``adapters`` in it."""

    def __init__(self, adapters: Adapters, groups: ProcessGroups) -> None:
        super().__init__(adapters.model, groups)
        self.adapters = adapters
        self._products: dict[str, _Product] = {}

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather the factors of the tensors that this rank sends. Collective over tp and etp."""
        halves: dict[str, dict[str, Tensor]] = {}
        scales: dict[str, float] = {}
        for factor in stream_factors(self.adapters, self.groups):
            halves.setdefault(factor.module, {})[factor.letter] = factor.tensor.float()
            scales[factor.module] = factor.scale
        self._products = {name: _Product(pair["A"], pair["B"], scales[name]) for name, pair in halves.items()}

    def held(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        raise Unroutable("an adapter is added to the weights while they are sent")

    def _finish(self, entry: Entry, shard: TensorShard) -> Callable[[Tensor, range], None] | None:
        named = [piece for piece in entry.hf if piece.name == shard.meta.name]
        pieces = named or list(entry.hf)  # a fused tensor has the rows of all of them, one after the other
        modules = [(piece.name.removesuffix(".weight"), piece.shape[0]) for piece in pieces]
        taken = self.adapters.selection.modules.get(entry.name.removesuffix(".weight"), ())
        if not any(module.rpartition(".")[2] in taken for module, _ in modules):
            return None

        def add(rows_in_bucket: Tensor, rows: range) -> None:
            start = 0
            for module, height in modules:
                first, last = max(rows.start, start), min(rows.stop, start + height)
                product = self._products.get(module)
                if product is not None and first < last:
                    place = rows_in_bucket[first - rows.start : last - rows.start]
                    delta = product.b[first - start : last - start] @ product.a
                    place.copy_(place.float() + delta * product.scale)
                start += height

        return add
