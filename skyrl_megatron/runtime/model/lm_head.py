"""A model that returns hidden states, so that log-probs can be computed from them chunk by chunk."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from skyrl_megatron.runtime.parallel_state import ProcessGroups

_HANDS_ON = "hands_hidden_states_on"


def returns_hidden_states(output_layer: Any) -> bool:
    """Return whether :func:`return_hidden_states` was here: what comes out of the layer are no logits."""
    return getattr(output_layer, _HANDS_ON, False)


def return_hidden_states(chunk: Any, groups: ProcessGroups) -> Tensor:
    """Make the last chunk return [b, s, H] instead of [b, s, V_padded / tp]; returns the head's weight.

    The output layer stays where it is, with its weight, its checkpoint key and its hooks; only its ``forward`` hands
    the hidden states on, gathered over tp where the sequence is split. Their gradient is summed over tp on the way
    back, since each tp rank computes the part that its columns of the vocabulary give.
    """

    def hand_on(
        hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        if chunk.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=groups.tp)
        return hidden, None

    chunk.output_layer.forward = hand_on
    setattr(chunk.output_layer, _HANDS_ON, True)
    tied = chunk.share_embeddings_and_output_weights
    weight: Tensor = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
    return weight
