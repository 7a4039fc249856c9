"""What low-rank adapters of the policy add to a rank: their factors, and what those keep of a token; and to an engine.

Sizes are those of ``runtime/lora/attach.py``: A [rank, in] and B [out, rank] beside each selected map, split
as the map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridges.plan import Plan
from bridges.rules import Entry
from bridges.shard import local_shape
from skyrl_megatron.config.rules.layout import ParallelConfig, stage_layers
from skyrl_megatron.inference.vllm.adapters import adapter_slots
from skyrl_megatron.runtime.lora.targets import configured_selection, expert_rank
from skyrl_megatron.weight_sync.adapter_tensors import Pairs

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


@dataclass(frozen=True, slots=True)
class AdaptedMap:
    """A linear map with an adapter, alike in several layers and all experts of a layer."""

    entry: Entry
    layers: frozenset[int]
    """Empty for embedding and output layer."""
    share: float
    """Of its rows that are adapted; below 1 where only some projections are."""
    pairs: int
    """Pairs of factors: one, or one for each adapted projection (``canonical_lora``)."""
    projections: int
    """HF projections that are adapted."""
    rank: int
    shared: str | None
    """The factor (``A`` or ``B``) that all experts of a layer have in common."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Numbers of elements of the factors on a rank of a stage."""

    dense: int
    """Of those whose gradients are summed over dp·cp."""
    expert: int
    """Of those whose gradients are summed over edp."""
    gathered: int
    """Of what a merged sync gathers: every projection's factors, whole."""

    @property
    def parameters(self) -> int:
        """All factors of a rank."""
        return self.dense + self.expert

    def __add__(self, other: Factors) -> Factors:
        return Factors(self.dense + other.dense, self.expert + other.expert, self.gathered + other.gathered)


@dataclass(frozen=True)
class AdapterTable:
    """All adapters of a model."""

    maps: tuple[AdaptedMap, ...]
    plan: Plan
    dropout: bool

    @classmethod
    def of(cls, cfg: SkyRLTrainConfig, plan: Plan, top_k: int) -> AdapterTable:
        """Read ``policy.model.lora`` and ``lora_config``. Raises ConfigError for modules that there are not."""
        selection = configured_selection(cfg, plan).modules
        lora, megatron = cfg.trainer.policy.model.lora, cfg.trainer.policy.megatron_config
        how = megatron.lora_config
        of_experts = expert_rank(cfg, top_k or None)
        stacked = how.experts_shared_outer_loras and megatron.moe_grouped_gemm
        found: dict[tuple[int, str, tuple[str, ...]], tuple[Entry, set[int]]] = {}
        for entry in plan.entries:
            taken = selection.get(entry.name.removesuffix(".weight"))
            if taken and not entry.expert:  # the first expert of a layer stands for all
                key = (id(entry.bound), entry.name if entry.layer is None else "", taken)
                found.setdefault(key, (entry, set()))[1].update(() if entry.layer is None else (entry.layer,))
        maps = []
        for (_, _, taken), (entry, layers) in found.items():
            heights = {piece.name.removesuffix(".weight").rpartition(".")[2]: piece.shape[0] for piece in entry.hf}
            maps.append(
                AdaptedMap(
                    entry,
                    frozenset(layers),
                    sum(heights[name] for name in taken) / sum(heights.values()),
                    len(taken) if how.lora_type == "canonical_lora" else 1,
                    len(taken),
                    of_experts if entry.is_expert else lora.rank,
                    ("B" if entry.split.dim == 1 else "A") if stacked and entry.is_expert else None,
                )
            )
        return cls(tuple(maps), plan, lora.dropout > 0)

    def stage(self, parallel: ParallelConfig, stage: int, *, te: bool) -> Factors:
        """Count the factors on each rank of a pipeline stage."""
        count = len(self.plan.shape.moe)
        layers = {layer for chunk in range(parallel.vpp) for layer in stage_layers(parallel, count, stage, chunk)}
        experts = self.plan.shape.dims.get("E", 0)
        dense = expert = gathered = 0
        for each in self.maps:
            entry, over = each.entry, parallel.etp if each.entry.is_expert else parallel.tp
            if each.layers:
                times = len(each.layers & layers)
            else:
                times = int(stage == (0 if entry.name.startswith("embedding.") else parallel.pp - 1))
            local = experts // parallel.ep if entry.is_expert else 1
            sizes = dict(zip("AB", _sizes(each, over, te), strict=True))
            for letter, size in sizes.items():
                if entry.is_expert and letter != each.shared:
                    expert += times * local * size
                else:
                    dense += times * size
            a, b = _sizes(each, 1, te)
            gathered += times * local * (a // each.pairs * each.projections + b)
        return Factors(dense, expert, gathered)

    def in_layer(self, kind: tuple[bool, str]) -> Iterator[AdaptedMap]:
        """Yield the adapted maps of a layer of a kind (``ModelShape.kinds``)."""
        kinds = self.plan.shape.kinds
        yield from (each for each in self.maps if any(kinds[layer] == kind for layer in each.layers))


def slot_bytes(cfg: SkyRLTrainConfig, plan: Plan, pairs: Pairs, width: int) -> int:
    """Count what each rank of an engine holds for the versions of adapters: vLLM makes room for the largest rank in
    each module that some adapter has, in every slot (vllm/lora/layers, ``create_lora_weights``)."""
    engine = cfg.generator.inference_engine
    slots = adapter_slots(pairs, engine.engine_init_kwargs.get("max_loras"))
    assert slots is not None
    tp, ep, elements = engine.tensor_parallel_size, engine.expert_parallel_size, 0.0
    for entry in plan.entries:
        ends = {piece.name.removesuffix(".weight").rpartition(".")[2] for piece in entry.hf}
        if not ({"experts"} if entry.is_expert else ends) & set(slots.targets):
            continue
        over = 1 if entry.is_expert and ep > 1 else tp
        for rows, columns in (piece.shape for piece in entry.hf):
            split = rows / over + columns if entry.split.dim == 0 else rows + columns / over
            elements += split / (ep if entry.is_expert and ep > 1 else 1)
    layers = len(plan.shape.moe)
    of_a_stage = math.ceil(layers / engine.pipeline_parallel_size) / layers
    return round(elements * of_a_stage) * slots.rank * slots.slots * width


def received_bytes(pairs: Pairs, width: int) -> int:
    """Count the factors that an engine's worker receives of all adapters, beside those that it holds."""
    of_all = (pair for own in pairs.values() for pair in own.values())
    return sum((pair.experts or 1) * pair.rank * (pair.rows + pair.columns) for pair in of_all) * width


def _sizes(each: AdaptedMap, over: int, te: bool) -> tuple[int, int]:
    """Return the elements of A and of B on a rank, ``over`` ranks sharing the map."""
    entry = each.entry.whole() if te and each.entry.split.whole_under_te else each.entry
    rows, columns = local_shape(entry, over)
    return each.pairs * each.rank * columns, math.ceil(rows * each.share) * each.rank
