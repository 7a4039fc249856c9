"""Parameters and buffers of this rank's chunks by their canonical global names, one entry per expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bridges.names import canonical
from bridges.rules import Entry
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.parallel_state import ProcessGroups

_STACKED = "mlp.experts.linear_fc"
_OUTPUT = "output_layer.weight"
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
    offset = first_expert(model, groups)
    entries = _entries(model)
    for index, chunk in enumerate(model.chunks):
        layer_offset = model.layers(groups.pp.rank(), index).start
        for name, tensor in _tensors(chunk, of):
            if name == _OUTPUT and model.head == "value":
                continue
            if name == _OUTPUT and model.hf.tied:
                yield LocalWeight(_OUTPUT, tensor, entries["embedding.word_embeddings.weight"])
                continue
            if _STACKED in name and not name[-1].isdigit():
                for number, expert in enumerate(tensor):
                    full = canonical(f"{name}{number}", layer_offset=layer_offset, expert_offset=offset)
                    yield LocalWeight(full, expert, entries[full])
                continue
            full = canonical(name, layer_offset=layer_offset, expert_offset=offset)
            yield LocalWeight(full, tensor, entries[full])


def _entries(model: ModelChunks) -> Mapping[str, Entry]:
    """Return the table's entries by name, split as the model's layers split them."""
    entries = model.hf.plan.by_name
    if model.config.transformer_impl != "transformer_engine":
        return entries
    return {name: entry.whole() if entry.split.whole_under_te else entry for name, entry in entries.items()}


def _tensors(chunk: torch.nn.Module, of: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, and the buffers that are weights: others are derived."""
    for name, parameter in chunk.named_parameters():
        if not name.startswith(f"{ADAPTERS}."):
            yield name, of(parameter)
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def first_expert(model: ModelChunks, groups: ProcessGroups) -> int:
    """Return the number of the first expert that this rank holds of each layer."""
    experts = model.config.num_moe_experts or 0
    return groups.ep.rank() * (experts // groups.ep.size())
