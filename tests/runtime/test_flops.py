"""FLOPs: the peak of a device by its name, and the model's count against what torch counts in transformers' models."""

from __future__ import annotations

import importlib
from unittest import mock

import pytest

from tests.bridges.tiny_models import TINY, tiny_config, tiny_model

INDEXED = ("deepseek_v32", "glm_moe_dsa")
DELTA_NETS = ("qwen3_next", "qwen3_5_moe_text")
B, S = 2, 20  # longer than the window of the one family that has one


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_peak_is_that_of_the_part(name: str, peak: float | None) -> None:
    from skyrl_megatron.config.hardware import GPU_TYPES, gpu_type

    kind = gpu_type(name)
    assert (GPU_TYPES[kind].flops if kind else None) == peak


def flops_of(model_type: str, **options):
    import torch

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime.flops import model_flops
    from skyrl_megatron.runtime.model.build import transformer_config
    from skyrl_megatron.runtime.model.description import read_hf_model

    model = read_hf_model(tiny_config(model_type))
    config = transformer_config(model, ParallelConfig(1), dtype=torch.float32)
    return model_flops(config, model.vocab_size, **options)


@pytest.mark.parametrize("model_type", TINY)
def test_count_without_megatron_is_the_same(model_type: str) -> None:
    """Of the description that ``--check`` has, by layer."""
    import torch

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime.flops import described_config, layer_flops
    from skyrl_megatron.runtime.model.build import transformer_config
    from skyrl_megatron.runtime.model.description import read_hf_model

    model = read_hf_model(tiny_config(model_type))
    built = transformer_config(model, ParallelConfig(1), dtype=torch.float32)
    found = layer_flops(described_config(model.megatron))
    assert found == layer_flops(built) and len(found) == built.num_layers


def counted(module, ids, output) -> tuple[int, int]:
    """FLOPs of the products that torch runs: (forward, forward and backward)."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        result = output(module(ids, use_cache=False))
        forward = counter.get_total_flops()
        result.sum().backward()
    return forward, counter.get_total_flops()


def every_pair(flops) -> float:
    """Forward FLOPs of the batch when each layer computes all S x S scores, as eager attention does: it masks them
    afterwards. The count of the project has the pairs that are attended, so pairs are all that differs."""
    return B * (flops.linear * S + (flops.full_attention + flops.window_attention) * S * S)


@pytest.mark.parametrize("model_type", [name for name in TINY if name not in (*DELTA_NETS, *INDEXED)])
def test_count_is_that_of_torch(model_type: str) -> None:
    """Eager experts get the tokens routed to them and no others, so that top-k of them are counted."""
    import torch

    flops, module = flops_of(model_type), tiny_model(model_type)
    module.set_experts_implementation("eager")
    forward, both = counted(module, torch.randint(0, 1003, (B, S)), lambda out: out.logits)
    assert forward == every_pair(flops)
    assert both == 3 * every_pair(flops)


@pytest.mark.parametrize("model_type", DELTA_NETS)
def test_count_of_delta_nets(model_type: str) -> None:
    """transformers computes the rule by chunks of 64 tokens and the convolution on padding too: both are taken out of
    its count, and what is left is compared; the rule is three products of a head with its state."""
    import torch

    flops, module = flops_of(model_type), tiny_model(model_type)
    module.set_experts_implementation("eager")
    config = module.config
    heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key + heads * value
    nets = config.layer_types.count("linear_attention")
    convolution = nets * channels * 2 * config.linear_conv_kernel_dim
    recurrence = nets * heads * 3 * 2 * key * value
    of = importlib.import_module(type(module).__module__)
    with mock.patch.object(of, "torch_chunk_gated_delta_rule", lambda q, k, v, **_: (v, None)):
        forward, _ = counted(module, torch.randint(0, 1003, (B, S)), lambda out: out.logits)
    with_padding = S + config.linear_conv_kernel_dim - 1
    assert forward == every_pair(flops) - B * S * (convolution + recurrence) + B * with_padding * convolution


@pytest.mark.parametrize("model_type", INDEXED)
def test_count_of_indexers(model_type: str) -> None:
    """Forward alone: nothing flows back through a choice."""
    import torch

    flops, module = flops_of(model_type), tiny_model(model_type)
    module.set_experts_implementation("eager")
    forward, _ = counted(module, torch.randint(0, 1003, (B, S)), lambda out: out.logits)
    assert forward == every_pair(flops)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_count_of_a_critic_has_one_column_for_the_vocabulary(model_type: str) -> None:
    import torch

    module = tiny_model(model_type)
    module.set_experts_implementation("eager")
    module.lm_head = torch.nn.Linear(48, 1, bias=False)
    forward, both = counted(module, torch.randint(0, 1003, (B, S)), lambda out: out.logits)
    flops = flops_of(model_type, head="value")
    assert forward == every_pair(flops)
    assert both == 3 * every_pair(flops)


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_pairs_are_those_of_the_masks(model_type: str) -> None:
    """A query attends to itself and what is before it; in gpt_oss's sliding layers to 17 keys, itself included."""
    import numpy as np
    import torch

    flops = flops_of(model_type)
    lengths = np.array([1, 16, 17, 18, 40])
    for length, forward in zip(lengths.tolist(), flops.forward(lengths), strict=True):
        causal = torch.ones(length, length).tril()
        pairs = flops.full_attention * causal.sum() + flops.window_attention * causal.triu(-16).sum()
        assert forward == flops.linear * length + float(pairs)
    assert flops.training(lengths) == 3 * flops.forward(lengths).sum()
