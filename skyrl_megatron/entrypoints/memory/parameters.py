"""How many parameters each rank holds, from the model's mapping table and the layout: no model is built.

The table (``bridges/``) names every Megatron parameter with its global shape and split, so that the counts are those
of the built model exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridges.plan import Plan
from bridges.quantisation import Quantisation
from bridges.rules import Entry
from bridges.shard import local_shape, padded_rows
from skyrl_megatron.config.rules.layout import ParallelConfig, stage_layers

if TYPE_CHECKING:
    from skyrl_megatron.entrypoints.memory.adapters import AdapterTable


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Numbers of elements that each rank of one pipeline stage holds."""

    dense: int
    """Parameters whose gradients are summed over dp·cp: all but the experts."""
    expert: int
    """Parameters of this rank's experts, whose gradients are summed over edp."""
    buffers: int
    """Elements of fp32 buffers (router biases)."""
    router: int = 0
    """Those of ``dense`` that ``freeze_moe_router`` freezes."""
    pinned_rounding: float = 1.0
    """Memory of a copy whose parameters are each rounded up to a power of two, over that of the parameters."""
    scaled: int = 0
    """Those that are kept in the 8 bits of their checkpoint, where nothing of the model learns."""
    scales: int = 0
    """The fp32 scales of those."""
    made: int = 0
    """Most elements of those that a linear map, or all experts of a layer, make of it to compute."""
    indexer: int = 0
    """Those of ``dense`` that choose keys, which are frozen unless ``dsa_indexer_loss_coeff`` trains them."""

    @property
    def parameters(self) -> int:
        """All parameters of a rank."""
        return self.dense + self.expert


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor that is alike in several layers, or in all experts of a layer."""

    entry: Entry
    layers: frozenset[int]
    """Empty for tensors outside the layers."""

    @property
    def is_embedding(self) -> bool:
        return self.entry.name.startswith("embedding.")

    @property
    def is_head(self) -> bool:
        return self.entry.name.startswith("output_layer.")


class ParameterTable:
    """The distinct tensors of a model, each with the layers that have it: counts in any layout take microseconds."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.experts = plan, plan.shape.dims.get("E", 0)
        self.quantisation = Quantisation.of(plan.hf_config, "config.json")
        found: dict[tuple[int, str], tuple[Entry, set[int]]] = {}
        for entry in plan.entries:
            key = (id(entry.bound), entry.name if entry.layer is None else "")
            layers = found.setdefault(key, (entry, set()))[1]
            if entry.layer is not None:
                layers.add(entry.layer)
        self._rows = [_Row(entry, frozenset(layers)) for entry, layers in found.values()]
        self.hf_config: dict[str, Any] = plan.family.config(plan.hf_config).to_dict()
        """config.json with transformers' defaults filled in."""
        self.top_k = int(self.hf_config.get("num_experts_per_tok") or 0)
        """Experts that a token visits."""
        self.of_layers = {row.entry.name.partition("layers.")[2].partition(".")[2]: row.entry for row in self._rows}
        """Name within a layer → a tensor of that name."""
        self.adapters: Sequence[AdapterTable] = ()
        """Adapters that the policy's model gets."""

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.plan.shape.moe)

    def total(self) -> int:
        """Count the parameters of the whole model, vocabulary not padded, tied embeddings once."""
        return self._count(self.experts)

    def active(self, top_k: int) -> int:
        """Count the parameters that take part in one token: of the routed experts, ``top_k`` of each layer."""
        return self._count(top_k)

    def _count(self, experts: int) -> int:
        return sum(
            math.prod(row.entry.shape) * (len(row.layers) or 1) * (experts if row.entry.is_expert else 1)
            for row in self._rows
            if not row.entry.is_buffer
        )

    def stage(
        self, parallel: ParallelConfig, stage: int, *, value_head: bool = False, te: bool = False, frozen: bool = False
    ) -> StageParameters:
        """Count the parameters on each rank of pipeline stage ``stage`` (all its chunks; each rank holds as many).

        ``value_head``: a critic, whose last stage has a row of hidden size instead of the output layer. ``te``: layers
        of Transformer Engine, which keep MLA's down projections whole on every rank. ``frozen``: a base of adapters.
        """
        layers = {
            layer for chunk in range(parallel.vpp) for layer in stage_layers(parallel, self.layers, stage, chunk)
        }
        first, last = stage == 0, stage == parallel.pp - 1
        if last and self.plan.draft_layer is not None:
            layers.add(self.plan.draft_layer)
        dense = expert = buffers = router = rounded = scaled = scales = made = indexer = 0
        for row in self._rows:
            entry = row.entry
            if row.layers:
                times = len(row.layers & layers)
            else:
                times = int(first if row.is_embedding else last and not (value_head and row.is_head))
            if entry.is_expert:
                times, over = times * self.experts // parallel.ep, parallel.etp
                size = _local_size(entry, over)
                expert += times * size
                rounded += times * _power_of_two(size)
            elif entry.is_buffer:
                buffers += times * _local_size(entry, parallel.tp)
            else:
                over = 1 if te and entry.split.whole_under_te else parallel.tp
                size = _local_size(entry, over)
                dense += times * size
                rounded += times * _power_of_two(size)
                router += times * size if ".router." in entry.name else 0
                indexer += times * size if ".indexer." in entry.name else 0
            if frozen and (own := self._scales(entry, parallel.etp if entry.is_expert else parallel.tp)):
                scaled, scales = scaled + times * size, scales + times * own
                at_once = self.experts // parallel.ep if entry.is_expert else 1
                made = max(made, size * at_once if times else 0)
        dims = self.plan.shape.dims
        if last and value_head:
            dense += dims["H"]
        elif last and not first and "untied" not in self.plan.shape.flags:  # the last stage's copy of the embedding
            dense += padded_rows(dims["V"], parallel.tp) // parallel.tp * dims["H"]
        return StageParameters(
            dense, expert, buffers, router, max(1.0, rounded / (dense + expert)), scaled, scales, made, indexer
        )

    def _scales(self, entry: Entry, over: int) -> int:
        """Count the scales of a weight on the rank, ``over`` ranks sharing it, that has the most; 0 where it is not
        kept in 8 bits."""
        pieces = [(piece.name, piece.shape) for piece in entry.hf]
        if self.quantisation is None or not entry.can_be_scaled:
            return 0
        widths = {block and block[1] for block in (self.quantisation.block(*piece) for piece in pieces)}
        if len(widths) > 1 or (width := widths.pop()) is None:
            return 0
        rows, columns = local_shape(entry, over)
        starts = [rank * columns % width for rank in range(over if entry.split.dim == 1 else 1)]
        return rows * max(-(-(start + columns) // width) for start in starts)

    def experts_of_a_layer(self) -> int:
        """Count the parameters of all routed experts of one layer; 0 without experts."""
        return sum(math.prod(row.entry.shape) for row in self._rows if row.entry.is_expert) * self.experts

    def engine_rank(self, tp: int, pp: int, ep: int) -> int:
        """Count the parameters on the fullest rank of an engine with these degrees.

        vLLM splits what Megatron splits over tp, its experts over ``ep`` ranks where that is more than one, and deals
        out layers evenly; key-value heads are repeated where there are fewer of them than ranks.
        """
        share, dims = -(-self.layers // pp), self.plan.shape.dims
        inner = outer = 0.0
        for row in self._rows:
            entry = row.entry
            if entry.is_buffer:
                continue
            size = float(math.prod(entry.shape))
            if entry.is_expert:
                size *= self.experts / (ep if ep > 1 else tp)
            elif entry.split.dim is not None and not entry.split.whole_under_te:
                size /= tp
                if entry.name.endswith("linear_qkv.weight") and tp > dims["G"]:
                    size += 2 * dims["K"] * dims["H"] * (1 / dims["G"] - 1 / tp)
            if row.layers:
                inner += size * len(row.layers) / self.layers
            else:
                outer += size
        return round(inner * share + (outer if pp == 1 else outer / 2))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _local_size(entry: Entry, size: int) -> int:
    return math.prod(local_shape(entry, size))
