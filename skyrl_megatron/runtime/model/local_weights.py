"""Map a rank's parameters and buffers to canonical weight names and entries of the family's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bridges.rules import Entry
from bridges.tensor_names import LAYERS, canonical
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.model.mtp import DRAFT
from skyrl_megatron.runtime.model.scaled_weights import scaled_weight
from skyrl_megatron.runtime.parallel_state import ProcessGroups

_STACKED = "mlp.experts.linear_fc"
_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_OF_DRAFT = f"{DRAFT}."
ADAPTERS = "adapters"
"""The module of a chunk that holds its LoRA adapters, which are not in the family's table."""


@dataclass(frozen=True, slots=True)
class LocalWeight:
    """This rank's shard of a parameter or buffer, or of one expert's slice of it."""

    name: str
    """Canonical global name, e.g. ``decoder.layers.3.mlp.experts.7.linear_fc1.weight``."""
    tensor: Tensor
    """This rank's shard; a view of the module's tensor."""
    entry: Entry
    """The entry of the family's table: HF names, global shape, split."""
    make: Callable[[slice, slice], Tensor] | None = None
    """For a parameter that is kept in 8 bits: dequantises rows and columns. The data of ``tensor`` then has no
    memory."""

    @property
    def is_copy(self) -> bool:
        """Whether this is the last stage's copy of a tied embedding."""
        return self.name != self.entry.name


def local_weights(
    model: ModelChunks, groups: ProcessGroups, of: Callable[[Tensor], Tensor] = lambda parameter: parameter.data
) -> Iterator[LocalWeight]:
    """Yield every weight of this rank, [shape of its shard], by chunk, in module order.

    ``of`` maps a parameter to the tensor to yield, for example its data or its gradient. Buffers are not mapped. The
    last stage's copy of a tied embedding has its own name and the embedding's entry. A critic's value head is not
    in the table and is skipped. Raises KeyError for a parameter that the table lacks.
    """
    for index, chunk in enumerate(model.chunks):
        names = _Names(model, groups, index)
        for name, parameter in _tensors(chunk):
            # an expert tensor is one parameter with many names
            full, tensor, scaled = names.of(name, parameter), parameter, scaled_weight(parameter)
            if isinstance(parameter, torch.nn.Parameter):
                tensor = of(parameter)
            stacked = names.stacked(name)
            for number, full_name in enumerate(full):
                make = partial(scaled.part, expert=number if stacked else None) if scaled else None
                yield LocalWeight(full_name, tensor[number] if stacked else tensor, names.entry(full_name), make)


@dataclass(frozen=True, slots=True)
class WeightLocation:
    """A parameter of a module with the table's weights that it holds: one, or one per expert."""

    module: torch.nn.Module
    name: str
    """Name of the parameter in ``module``."""
    weights: Mapping[str, Entry]
    """Entries by canonical global name, as in :class:`LocalWeight`."""

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The parameter."""
        return self.module.get_parameter(self.name)


def weight_locations(model: ModelChunks, groups: ProcessGroups) -> Iterator[WeightLocation]:
    """Yield the parameter of every weight of :func:`local_weights`, without buffers."""
    for index, chunk in enumerate(model.chunks):
        names = _Names(model, groups, index)
        for name, parameter in _parameters(chunk):
            full = names.of(name, parameter)
            if full:
                owner, _, last = name.rpartition(".")
                yield WeightLocation(chunk.get_submodule(owner), last, {each: names.entry(each) for each in full})


class _Names:
    """Canonical global names of a chunk's parameters."""

    def __init__(self, model: ModelChunks, groups: ProcessGroups, chunk: int) -> None:
        self.model, self.entries = model, _entries(model)
        self.layer_offset = model.layers(groups.pp.rank(), chunk).start
        self.expert_rank = groups.ep.rank()

    def stacked(self, name: str) -> bool:
        """Return whether a parameter stacks a matrix, or a bias, of every expert."""
        return _STACKED in name and not name[-1].isdigit()

    def of(self, name: str, tensor: Tensor) -> list[str]:
        """Return the canonical names of the weights in a tensor of the chunk; empty for a critic's value head."""
        if name == _OUTPUT:
            return [] if self.model.head == "value" else [_OUTPUT]
        if name.startswith(_OF_DRAFT):
            layer = self.model.hf.plan.draft_layer
            assert layer is not None
            tail = name.removeprefix(_OF_DRAFT).removeprefix("layer.")
            # the draft layer's number counts through the model; the chunk's names start at its first layer
            name = f"{LAYERS}{layer - self.layer_offset}.{tail}"
        local_names = [f"{name}{number}" for number in range(len(tensor))] if self.stacked(name) else [name]
        # experts may have moved between ranks: the number is that of the model, not of the slot
        return [canonical(local, layer_offset=self.layer_offset, expert=self._expert) for local in local_names]

    def _expert(self, layer: int, number: int) -> int:
        return self.model.experts.held(layer, self.expert_rank)[number]

    def entry(self, name: str) -> Entry:
        """Return the table's entry of a weight; for the last stage's copy of a tied embedding, the embedding's."""
        return self.entries[_EMBEDDING if name == _OUTPUT and self.model.hf.tied else name]


def _entries(model: ModelChunks) -> Mapping[str, Entry]:
    """Return the table's entries by name, with the split that the model's layers use."""
    entries = model.hf.plan.by_name
    # Transformer Engine keeps MLA's down projections whole on every rank (parallel_mode="duplicated")
    if model.config.transformer_impl != "transformer_engine":
        return entries
    return {name: entry.whole() if entry.split.whole_under_te else entry for name, entry in entries.items()}


def _tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the buffers that are weights; other buffers are derived."""
    yield from _parameters(chunk)
    for name, buffer in chunk.named_buffers():
        # the router's bias is learned outside of the gradient, and exported as a weight
        if name.endswith(".expert_bias"):
            yield name, buffer


def _parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the chunk's parameters, without adapters."""
    for name, parameter in chunk.named_parameters():
        if not name.startswith(f"{ADAPTERS}."):
            yield name, parameter
