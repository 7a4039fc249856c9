"""Which expert-parallel rank holds which experts of a layer.

A layer has one slot for each expert. Slots ``[r · E/ep, (r + 1) · E/ep)`` are those of expert-parallel rank r, in the
order of its parameters. At first slot s holds expert s. Experts keep their numbers when they move to other slots:
router weights, expert biases, routes, checkpoints, exports and weight syncs use the number of an expert. Only
:class:`ExpertPlacement` translates between experts and slots, for all that walks a rank's parameters, and for the
router's output, whose columns a token dispatcher reads as slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

type Slots = tuple[int, ...]
"""The expert in each slot of a layer: a permutation of the experts' numbers."""

_ATTRIBUTE = "expert_placement"


class ExpertPlacement:
    """The slots of every layer of a model with ``experts`` experts over ``ranks`` expert-parallel ranks.

    Layers are numbered from 0 over all pipeline stages. A draft layer keeps the initial slots.
    """

    def __init__(self, experts: int, ranks: int) -> None:
        self.experts, self.ranks = experts, ranks
        # Equal on all ranks, also after moves: memory and checkpoints' shapes depend on it.
        self.per_rank = experts // ranks
        self.movable = False
        """Whether experts of this model move; then it uses the slots of a checkpoint that it loads."""
        self.moving = False
        """Whether weights and slots differ, during a move or after one that failed."""
        self.load_frozen: Callable[[], None] | None = None
        """Loads frozen weights into the present slots; None if checkpoints have all weights."""
        self._moved: dict[int, Slots] = {}
        self._columns: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def moved(self) -> Mapping[int, Slots]:
        """Slots of the layers that differ from the initial ones."""
        return self._moved

    def slots(self, layer: int) -> Sequence[int]:
        """Return the expert in each slot of a layer."""
        return self._moved.get(layer, range(self.experts))

    def held(self, layer: int, rank: int) -> Sequence[int]:
        """Return the experts of an expert-parallel rank, in the order of its parameters."""
        return self.slots(layer)[rank * self.per_rank : (rank + 1) * self.per_rank]

    def ranks_of(self, layer: int) -> list[int]:
        """Return the expert-parallel rank of each expert of a layer."""
        ranks = [0] * self.experts
        for slot, expert in enumerate(self.slots(layer)):
            ranks[expert] = slot // self.per_rank
        return ranks

    def columns(self, layer: int, device: torch.device) -> Tensor | None:
        """Return the experts in the order of their slots, [E] int64, on ``device``; None for the initial order."""
        # None spares the router an index_select per layer and pass in runs without moves.
        if layer not in self._moved:
            return None
        order = self._columns.get((layer, device))
        if order is None:
            order = self._columns[layer, device] = torch.tensor(self._moved[layer], device=device)
        return order

    def set(self, slots: Mapping[int, Sequence[int]]) -> None:
        """Use these slots, and the initial ones for layers without an entry. It moves no weights.

        Raises ValueError unless every entry is a permutation of the experts.
        """
        for layer, order in slots.items():
            if sorted(order) != list(range(self.experts)):
                raise ValueError(f"the experts of layer {layer} are no permutation of 0 to {self.experts - 1}")
        initial = tuple(range(self.experts))
        self._moved = {layer: tuple(order) for layer, order in sorted(slots.items()) if tuple(order) != initial}
        # Tables on devices are of the old slots.
        self._columns, self.moving = {}, False

    def place(self, slots: Mapping[int, Sequence[int]]) -> None:
        """Use the slots of a checkpoint, as :meth:`set` does, whose weights are read next. Frozen weights, which it
        lacks, are loaded again if they are in other slots."""
        # After a failed move weights and slots differ, so equal slots alone do not mean equal weights.
        before, failed = self._moved, self.moving
        self.set(slots)
        if self.load_frozen is not None and (failed or self._moved != before):
            self.load_frozen()


def give_placement(chunk: torch.nn.Module, placement: ExpertPlacement) -> None:
    """Let a model chunk and its modules with a ``placement`` share this one."""
    setattr(chunk, _ATTRIBUTE, placement)
    module: Any
    for module in chunk.modules():
        if hasattr(module, "placement"):
            module.placement = placement


def placement_of(chunk: Any) -> ExpertPlacement | None:
    """Return the placement of a model chunk that ``build_model`` made."""
    found: ExpertPlacement | None = getattr(chunk, _ATTRIBUTE, None)
    return found
