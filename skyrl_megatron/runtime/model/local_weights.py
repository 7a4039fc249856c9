"""The weights that a rank holds, by name, and their scales where they are kept in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bridges.names import LAYERS, canonical
from bridges.rules import Entry
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.model.mtp import DRAFT
from skyrl_megatron.runtime.model.scaled_weights import scaled_weight
from skyrl_megatron.runtime.parallel_state import ProcessGroups

_STACKED = "mlp.experts.linear_fc"
_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_OF_DRAFT = f"{DRAFT}."
ADAPTERS = "adapters"
"""The module of a chunk that holds its low-rank adapters, which no family's table knows."""


@dataclass(frozen=True, slots=True)
class LocalWeight:
    """A parameter or buffer, or one expert's slice of it, as this rank holds it."""

    name: str
    """Canonical global name, e.g. ``decoder.layers.3.mlp.experts.7.linear_fc1.weight``."""
    tensor: Tensor
    """This rank's share; a view of the module's tensor."""
    entry: Entry
    """The row of the family's table: HF names, global shape, how it is split."""
    make: Callable[[slice, slice], Tensor] | None = None
    """Makes rows and columns of a parameter that is kept in 8 bits; ``tensor`` is then what ``of`` says of it, and its
    data has no memory."""

    @property
    def is_copy(self) -> bool:
        """Whether this is the last stage's copy of tied embeddings."""
        return self.name != self.entry.name


def local_weights(
    model: ModelChunks, groups: ProcessGroups, of: Callable[[Tensor], Tensor] = lambda parameter: parameter.data
) -> Iterator[LocalWeight]:
    """Yield every weight that this rank holds, chunk by chunk, in module order.

    ``of`` picks what is listed of each parameter: its data, say, or its gradient. Buffers are listed as they are.
    The last stage's copy of tied embeddings comes with the embedding's entry and its own name. A critic's value head
    has no row in any table and is left out. Raises KeyError for a parameter that the table does not know.
    """
    for index, chunk in enumerate(model.chunks):
        names = _Names(model, groups, index)
        for name, parameter in _tensors(chunk):
            full, tensor, scaled = names.of(name, parameter), parameter, scaled_weight(parameter)
            if isinstance(parameter, torch.nn.Parameter):
                tensor = of(parameter)
            stacked = names.stacked(name)
            for number, each in enumerate(full):
                make = partial(scaled.part, expert=number if stacked else None) if scaled else None
                yield LocalWeight(each, tensor[number] if stacked else tensor, names.entry(each), make)


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """A parameter of a module, and the weights of the table that it holds: one, or one of each expert."""

    module: torch.nn.Module
    name: str
    """Of the parameter in its module."""
    weights: Mapping[str, Entry]
    """By canonical global name, as in :class:`LocalWeight`."""

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The parameter."""
        return self.module.get_parameter(self.name)


def weight_places(model: ModelChunks, groups: ProcessGroups) -> Iterator[WeightPlace]:
    """Yield the parameter behind every weight that :func:`local_weights` yields, buffers left out."""
    for index, chunk in enumerate(model.chunks):
        names = _Names(model, groups, index)
        for name, parameter in _parameters(chunk):
            full = names.of(name, parameter)
            if full:
                owner, _, last = name.rpartition(".")
                yield WeightPlace(chunk.get_submodule(owner), last, {each: names.entry(each) for each in full})


class _Names:
    """Canonical global names of a chunk's parameters."""

    def __init__(self, model: ModelChunks, groups: ProcessGroups, chunk: int) -> None:
        self.model, self.entries = model, _entries(model)
        self.layer_offset = model.layers(groups.pp.rank(), chunk).start
        self.expert_offset = first_expert(model, groups)

    def stacked(self, name: str) -> bool:
        """Tell whether a parameter holds a matrix, or a row, of each expert."""
        return _STACKED in name and not name[-1].isdigit()

    def of(self, name: str, tensor: Tensor) -> list[str]:
        """List the weights that a tensor of the chunk is; none for a critic's head, which has no row in any table."""
        if name == _OUTPUT:
            return [] if self.model.head == "value" else [_OUTPUT]
        if name.startswith(_OF_DRAFT):
            layer = self.model.hf.plan.draft_layer
            assert layer is not None
            tail = name.removeprefix(_OF_DRAFT).removeprefix("layer.")
            name = f"{LAYERS}{layer - self.layer_offset}.{tail}"
        own = [f"{name}{number}" for number in range(len(tensor))] if self.stacked(name) else [name]
        offsets = {"layer_offset": self.layer_offset, "expert_offset": self.expert_offset}
        return [canonical(each, **offsets) for each in own]

    def entry(self, name: str) -> Entry:
        """Return the table's entry of a weight; the last stage's copy of tied embeddings has the embedding's."""
        return self.entries[_EMBEDDING if name == _OUTPUT and self.model.hf.tied else name]


def _entries(model: ModelChunks) -> Mapping[str, Entry]:
    """Return the table's entries by name, split as the model's layers split them."""
    entries = model.hf.plan.by_name
    if model.config.transformer_impl != "transformer_engine":
        return entries
    return {name: entry.whole() if entry.split.whole_under_te else entry for name, entry in entries.items()}


def _tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, and the buffers that are weights: others are derived."""
    yield from _parameters(chunk)
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def _parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the chunk's own, without adapters."""
    for name, parameter in chunk.named_parameters():
        if not name.startswith(f"{ADAPTERS}."):
            yield name, parameter


def first_expert(model: ModelChunks, groups: ProcessGroups) -> int:
    """Return the number of the first expert that this rank holds of each layer."""
    experts = model.config.num_moe_experts or 0
    return groups.ep.rank() * (experts // groups.ep.size())
