"""Building a model: checkpoint keys, the critic's head, the patches for the CPU, and what happens when a rank dies."""

import math

import pytest

from tests.bridges.tiny_models import save_tiny, tiny_config
from tests.support import forked
from tests.support.rank_pool import end_layout, free_port

# What Megatron's Transformer Engine layers write for the tiny models with 2 KV groups (3 layers, hidden 48, 6 heads,
# 4 experts of 24): read off TELayerNormColumnParallelLinear, TEGroupedMLP and get_gpt_layer_with_transformer_engine
# _submodules of megatron-core 0.19.2. Layers, then experts, are leading axes; the vocabulary is that before padding.
COMMON = {
    "embedding.word_embeddings.weight": (1003, 48),
    "decoder.final_layernorm.weight": (48,),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (3, 48),
}
HEADS_OF_16 = {
    "decoder.layers.self_attention.linear_qkv.weight": (3, 160, 48),
    "decoder.layers.self_attention.linear_proj.weight": (3, 48, 96),
    "decoder.layers.self_attention.q_layernorm.weight": (3, 16),
    "decoder.layers.self_attention.k_layernorm.weight": (3, 16),
}
HEADS_OF_8_WITH_BIAS = {
    "decoder.layers.self_attention.linear_qkv.weight": (3, 80, 48),
    "decoder.layers.self_attention.linear_qkv.bias": (3, 80),
    "decoder.layers.self_attention.linear_proj.weight": (3, 48, 48),
}
DENSE = {
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (3, 48),
    "decoder.layers.mlp.linear_fc1.weight": (3, 80, 48),
    "decoder.layers.mlp.linear_fc2.weight": (3, 48, 40),
}
EXPERTS = {
    "decoder.layers.pre_mlp_layernorm.weight": (3, 48),
    "decoder.layers.mlp.router.weight": (3, 4, 48),
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (3, 4, 48, 48),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": (3, 4, 48, 24),
}
SHARED_EXPERT = {
    "decoder.layers.mlp.shared_experts.linear_fc1.weight": (3, 64, 48),
    "decoder.layers.mlp.shared_experts.linear_fc2.weight": (3, 48, 32),
    "decoder.layers.mlp.shared_experts.gate_weight": (3, 1, 48),
}
UNTIED = {"output_layer.weight": (1003, 48)}
RECORDED = {
    "qwen2": COMMON | HEADS_OF_8_WITH_BIAS | DENSE,  # tied
    "qwen3": COMMON | HEADS_OF_16 | DENSE | UNTIED,
    "qwen3_moe": COMMON | HEADS_OF_16 | EXPERTS | UNTIED,
    "qwen2_moe": COMMON | HEADS_OF_8_WITH_BIAS | EXPERTS | SHARED_EXPERT | UNTIED,
}


def checkpoint_shapes(model_types, layout, build):
    """Model type → checkpoint key → global shape, of this rank's part of the model."""
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.model.build import build_model

    groups = parallel_state.initialize(ParallelConfig(dist.get_world_size(), **layout))
    shapes = {}
    for model_type in model_types:
        config = tiny_config(model_type, num_key_value_heads=2)
        model = build_model(config, groups, dtype=torch.float32, transformer_config_kwargs=build)
        state = model.chunks[0].sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        apply_factories(state)
        tensors = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
        shapes[model_type] = {tensor.key: tuple(tensor.global_shape) for tensor in tensors}
    return shapes


@pytest.mark.parametrize(
    "model_types, layout, build",
    [
        (list(RECORDED), {}, {}),
        (["qwen3_moe", "qwen2_moe"], {}, {"moe_grouped_gemm": False}),
        (["qwen3_moe", "qwen2_moe"], dict(tp=2, ep=2), {}),
        (["qwen2", "qwen3"], dict(tp=2), {}),
    ],
    ids=["one rank", "sequential experts", "tp2·ep2", "dense tp2"],
)
def test_checkpoint_keys_are_those_of_transformer_engine(ranks, model_types, layout, build):
    padding = layout.get("tp", 1) - 1  # 1003 entries become 1004 at tp=2
    for found in ranks(layout.get("tp", 1), checkpoint_shapes, model_types, layout, build):
        for model_type in model_types:
            recorded = RECORDED[model_type].items()
            expected = {key: (s[0] + padding, *s[1:]) if s[0] == 1003 else s for key, s in recorded}
            assert found[model_type] == expected


LENGTHS = (13, 8, 21)


def token_rows():
    import torch

    return [torch.randint(1003, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def critic_body(folder, layout):
    """(values of all tokens, gradient of the head, the head's weight), each None where this rank has none."""
    import torch
    import torch.distributed as dist
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import loss_scale, parallel_state
    from skyrl_megatron.runtime.forward_step import run_schedule
    from skyrl_megatron.runtime.hf_weights import load_hf
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron.runtime.packed_inputs import pack
    from skyrl_megatron.types import PaddedBatch

    groups = parallel_state.initialize(ParallelConfig(dist.get_world_size(), **layout))
    model = build_model(folder, groups, dtype=torch.float32, head="value")
    load_hf(model, folder, groups)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    loss_scale.sum_gradients(model.config, settings)
    chunks = [
        DistributedDataParallel(model.config, settings, chunk, pg_collection=groups.collection)
        for chunk in model.chunks
    ]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    longest = max(LENGTHS)
    sequences = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in token_rows()])
    mask = torch.stack([torch.arange(longest) >= longest - n for n in LENGTHS])
    response = mask[:, 1:] & mask[:, :-1]
    batch = PaddedBatch(sequences, mask, response.float(), response.float())
    found = []

    def forward_step(micro_batches, chunk):
        packed = pack(next(micro_batches), groups, torch.device("cpu"))

        def on_last_stage(values):
            values = packed.to_responses(values.flatten())
            found.append(values.detach())
            return loss_scale.loss_for_schedule(values.square().sum(), {})

        return chunk(**packed.model_arguments()), on_last_stage

    run_schedule(forward_step, [batch], chunks, groups, forward_only=False)
    finalize_model_grads(chunks, None, pg_collection=groups.collection)
    if not found:
        return None
    head = model.chunks[-1].output_layer.weight
    return found[0][response].tolist(), head.main_grad.tolist(), head.detach().tolist()


@pytest.mark.parametrize("layout", [{}, dict(tp=2, ep=2), dict(pp=2), dict(cp=2)], ids=str)
def test_a_critic_is_the_model_with_one_number_per_token(ranks, tmp_path, layout):
    """Values and the gradient of Σ value² at the head, against transformers' last hidden states."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = save_tiny("qwen3_moe", tmp_path, num_key_value_heads=2, num_hidden_layers=4, initializer_range=0.2)
    world = math.prod(layout.get(degree, 1) for degree in ("tp", "pp", "cp"))
    results = [result for result in ranks(world, critic_body, folder, layout) if result]
    assert len(results) == (1 if "pp" in layout else world)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    with torch.no_grad():
        # A value belongs to the token that it is the state before: that of the position predicting it.
        hidden = torch.cat([model(row[None]).last_hidden_state[0, :-1] for row in token_rows()])
    for values, gradient, weight in results:
        head = torch.tensor(weight[0], requires_grad=True)
        expected = hidden @ head
        expected.square().sum().backward()
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(torch.tensor(values), expected.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.tensor(gradient[0]), head.grad, atol=1e-4, rtol=1e-4)


def patches_body():
    """What is replaced before, inside and after the context manager, by name."""
    import torch

    from skyrl_megatron.runtime import cpu_patches as megatron_patches

    megatron_patches.uninstall()
    places = [(torch, "empty"), (torch.Tensor, "cuda"), (torch.Tensor, "to"), (torch.cuda, "Stream")]
    before = [vars(owner).get(name) for owner, name in places]
    with megatron_patches.installed():
        inside = [vars(owner).get(name) for owner, name in places]
        where = str(torch.zeros(1, device="cuda").cuda().device)
        with megatron_patches.installed():
            pass
        still = [vars(owner).get(name) for owner, name in places]
    after = [vars(owner).get(name) for owner, name in places]
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return before == after, inside == still, inside != before, where, str(error)


def test_the_cpu_patches_are_taken_back(ranks):
    restored, nested, replaced, where, error = ranks(1, patches_body)[0]
    assert restored and nested and replaced and where == "cpu"
    assert "CUDA" in error or "NVIDIA" in error


def random_states(seeds):
    import random

    import numpy as np
    import torch

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.checkpoint import rank_files as rng

    found = []
    for seed in seeds:
        random.seed(), np.random.seed(), torch.seed()  # from the machine's entropy, as a new process has them
        parallel_state.initialize(ParallelConfig(1), seed=seed)
        found.append(rng.capture_rng())
        end_layout()
    return found


def test_every_random_state_follows_the_seed(ranks):
    first, again, other = ranks(1, random_states, (5, 5, 6))[0]
    assert first == again != other


def dying_rank(rank, port, folder, pipe):
    """A forward pass over two ranks of which rank 1 dies; rank 0 reports how it ended."""
    import datetime
    import os

    import torch
    import torch.distributed as dist

    from skyrl_megatron import device
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.hf_weights import load_hf
    from skyrl_megatron.runtime.model.build import build_model

    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, datetime.timedelta(seconds=500))
    dist.init_process_group(device.collective_backend(), store=store, rank=rank, world_size=2)
    groups = parallel_state.initialize(ParallelConfig(2, tp=2), timeout_s=3600)
    model = build_model(folder, groups, dtype=torch.float32)
    load_hf(model, folder, groups)
    dist.barrier()
    if rank == 1:
        os._exit(7)
    tokens = torch.arange(16)[None]
    try:
        model.chunks[0](input_ids=tokens, position_ids=tokens, attention_mask=None)
        pipe.send("no error")
    except RuntimeError as error:
        pipe.send(str(error))


@pytest.mark.process
def test_a_rank_that_dies_takes_the_others_down_at_once(tmp_path):
    """The group's timeout is an hour; the survivor's error comes when the connection breaks, not then."""
    folder = save_tiny("qwen3_moe", tmp_path, num_key_value_heads=2)
    context = forked.context()
    ours, theirs = context.Pipe()
    port = free_port()
    processes = [context.Process(target=dying_rank, args=(rank, port, folder, theirs)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        assert ours.poll(500), "rank 0 is still waiting for the dead rank"
        assert ours.recv() != "no error"
        processes[1].join(60)
        assert processes[1].exitcode == 7
    finally:
        for process in processes:
            process.kill()
            process.join()
