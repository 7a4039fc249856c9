"""Which experts change their slots, so that the expert-parallel ranks of a layer get equally many tokens.

A layer's ranks wait for the one with most tokens. The plan exchanges experts of that rank for experts of others while
the seconds that this saves in the next :data:`HORIZON` steps exceed the seconds of moving weights and optimizer state.
Every rank keeps its number of experts, and thus its memory. The plan depends on loads and published rates only, not on
measured times, so a resumed run makes the same moves.

With group-limited routing (DeepSeek-V3: arXiv:2412.19437, 2.1.2) a token reaches few groups of experts. So that it
also reaches few ranks, an expert stays on the ranks of its group, or a group moves as a whole if a rank holds several.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_megatron.config.hardware import GPU_TYPES

HORIZON = 10
"""Steps in which a move must pay back: loads of later steps differ."""
OF_PEAK = 0.33
"""Share of the FLOP/s that experts reach in training (``estimate/machine_rates.py``, TRAINING)."""
OF_LINK = 0.65
"""Share of a network's bandwidth that a move reaches (NETWORK of the same file)."""
CPU_FLOPS, CPU_BYTES = 3e10, 1e9
"""FLOP/s and bytes/s of a process of a CPU run."""


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """Seconds that a layer's experts and moves take on a rank."""

    row: float
    """Forward and backward pass of one token in one expert, divided by the ranks that share the work."""
    move: float
    """Receiving weights and optimizer state of one expert."""

    @property
    def tokens(self) -> float:
        """Tokens per step that a rank must have less for the move of an expert to pay back."""
        return self.move / (self.row * HORIZON)

    @classmethod
    def of(
        cls,
        hidden: int,
        width: int,
        *,
        weight_bytes: int,
        edp: int,
        etp: int,
        gpu: str | None = None,
        flops: float | None = None,
        frozen: bool = False,
    ) -> MoveCosts:
        """Return the costs of gated experts from ``hidden`` to ``width`` elements and back.

        Each of ``edp`` ranks holds the weights, and an equal part of fp32 masters and two moments; ``etp`` ranks share
        a matrix. ``gpu``: a key of ``GPU_TYPES``, any other text for one of Hopper, None for a CPU. ``flops``: its
        peak, if it is known better. ``frozen``: weights have no gradient and no optimizer state; their adapters do not
        count.
        """
        gpu_type = None if gpu is None else GPU_TYPES.get(gpu, GPU_TYPES["H100"])
        flops = flops or (gpu_type.flops if gpu_type else CPU_FLOPS)
        bandwidth = gpu_type.network if gpu_type else CPU_BYTES
        elements = 3 * hidden * width / etp
        nbytes = elements * (weight_bytes + (0 if frozen else 12 / edp))
        return cls((2 if frozen else 3) * 2 * elements / edp / (OF_PEAK * flops), nbytes / (OF_LINK * bandwidth))


@dataclass(frozen=True, slots=True)
class Freedom:
    """What may change places: runs of ``unit`` slots, within blocks of ``ranks`` consecutive ranks."""

    unit: int
    ranks: int

    @classmethod
    def of(cls, experts: int, ranks: int, groups: int | None) -> Freedom:
        """Return the freedom of a layer with ``groups`` groups of experts; ``ranks=1`` if nothing may move."""
        groups = groups or 1
        if groups == 1:
            return cls(1, ranks)
        if groups < ranks:
            return cls(1, ranks // groups if ranks % groups == 0 else 1)
        return cls(experts // groups, ranks if groups % ranks == 0 else 1)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The slots of a layer after its moves."""

    slots: tuple[int, ...]
    before: float
    """Tokens of the busiest rank over the mean, as now."""
    after: float
    """The same after the moves."""
    moved: int
    """Experts that change their slot."""
    incoming: int
    """Experts that the busiest rank receives."""


def rank_loads(load: Sequence[float], slots: Sequence[int], ranks: int) -> np.ndarray:
    """Return the tokens of each expert-parallel rank, [ranks] float64. ``load``: tokens of each expert."""
    found: np.ndarray = np.asarray(load, dtype=np.float64)[np.asarray(slots)].reshape(ranks, -1).sum(1)
    return found


def imbalance(loads: np.ndarray) -> float:
    """Return the largest of the loads, [ranks], over their mean; 1 without tokens."""
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def plan_layer(
    load: Sequence[float], slots: Sequence[int], ranks: int, freedom: Freedom, costs: MoveCosts
) -> LayerPlan:
    """Return the moves of a layer that pay back: the best number of exchanges, from none to all that even out loads.

    ``load``: tokens of each expert in the last step, over all ranks. ``slots``: the expert in each slot.
    """
    units = np.asarray(slots).reshape(-1, freedom.unit)
    weights = np.asarray(load, dtype=np.float64)[units].sum(1).reshape(ranks, -1)
    places = np.arange(len(units)).reshape(ranks, -1)
    start = weights.sum(1)
    best, best_gain = places.copy(), 0.0
    for _ in range(len(units)):
        if not _exchange(weights, places, freedom.ranks):
            break
        saved = start.max() - weights.sum(1).max()
        received = int((places // places.shape[1] != np.arange(ranks)[:, None]).sum(1).max()) * freedom.unit
        gain = saved * costs.row * HORIZON - received * costs.move
        if gain > best_gain:
            best, best_gain = places.copy(), gain
    return _layer_plan(load, slots, units[best.ravel()].ravel(), ranks)


def _exchange(weights: np.ndarray, places: np.ndarray, block: int) -> bool:
    """Exchange a unit of the busiest rank for one of another rank of its block so that the busier of the two gets the
    fewest tokens; return False if none makes it better. Changes both arrays, [ranks, units]."""
    loads = weights.sum(1)
    busy = int(loads.argmax())
    first = busy // block * block
    others = [rank for rank in range(first, first + block) if rank != busy]
    if not others:
        return False
    moved = weights[busy][None, :, None] - weights[others][:, None, :]  # [others, units of busy, units of the other]
    busier = np.maximum(loads[busy] - moved, loads[others][:, None, None] + moved)
    other, unit, other_unit = np.unravel_index(int(busier.argmin()), busier.shape)
    if not busier[other, unit, other_unit] < loads[busy]:
        return False
    target = others[other]
    for array in (weights, places):
        array[busy, unit], array[target, other_unit] = array[target, other_unit], array[busy, unit]
    return True


def shuffle_layer(
    load: Sequence[float], slots: Sequence[int], ranks: int, freedom: Freedom, *, seed: tuple[int, int]
) -> LayerPlan:
    """Return random slots within the same freedom, whatever they cost. ``seed``: step and layer."""
    generator = np.random.default_rng(zlib.crc32(repr(seed).encode()))
    units = np.asarray(slots).reshape(ranks // freedom.ranks, -1, freedom.unit)
    return _layer_plan(load, slots, np.concatenate([generator.permutation(block) for block in units]).ravel(), ranks)


def _layer_plan(load: Sequence[float], before: Sequence[int], after: np.ndarray, ranks: int) -> LayerPlan:
    old, new = np.asarray(before), after
    homes = np.empty(len(old), dtype=np.int64)
    homes[old] = np.arange(len(old)) // (len(old) // ranks)
    incoming = (homes[new].reshape(ranks, -1) != np.arange(ranks)[:, None]).sum(1)
    return LayerPlan(
        tuple(map(int, new)),
        imbalance(rank_loads(load, old.tolist(), ranks)),
        imbalance(rank_loads(load, new.tolist(), ranks)),
        int((old != new).sum()),
        int(incoming.max()),
    )


def plan_moves(
    loads: Mapping[int, Sequence[float]],
    slots: Mapping[int, Sequence[int]],
    ranks: int,
    freedom: Freedom,
    costs: MoveCosts,
    *,
    shuffle: int | None = None,
) -> dict[int, LayerPlan]:
    """Plan each layer of ``loads`` (layer → tokens of each expert); ``slots``: their slots now.

    ``shuffle``: a step number, to move experts at random instead.
    """
    if shuffle is not None:
        return {
            layer: shuffle_layer(load, slots[layer], ranks, freedom, seed=(shuffle, layer))
            for layer, load in loads.items()
        }
    return {layer: plan_layer(load, slots[layer], ranks, freedom, costs) for layer, load in loads.items()}
