"""Mistakes that parity tests must notice, planted in a loaded model."""

from __future__ import annotations


def swapped_experts(model) -> None:
    """The first two experts of each layer that this rank holds change places."""
    for layer in model.chunks[0].decoder.layers:
        for linear in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2):
            linear.weight.data[[0, 1]] = linear.weight.data[[1, 0]]


def swapped_qk_norm(model) -> None:
    """Query and key norms change places."""
    attention = model.chunks[0].decoder.layers[0].self_attention
    query = attention.q_layernorm.weight.data.clone()
    attention.q_layernorm.weight.data.copy_(attention.k_layernorm.weight.data)
    attention.k_layernorm.weight.data.copy_(query)


def rotated_kv_groups(model) -> None:
    """Each KV group's rows stand where the next group's belong."""
    attention = model.chunks[0].decoder.layers[0].self_attention
    weight = attention.linear_qkv.weight.data
    rows = weight.shape[0] // attention.num_query_groups_per_partition
    weight.copy_(weight.roll(rows, 0))


def dropped_bias(model) -> None:
    """The bias of q, k and v is left at zero in one layer."""
    model.chunks[0].decoder.layers[-1].self_attention.linear_qkv.bias.data.zero_()


FAULTS = {
    "swapped experts": swapped_experts,
    "swapped q/k norm": swapped_qk_norm,
    "rotated KV groups": rotated_kv_groups,
    "dropped bias": dropped_bias,
}
