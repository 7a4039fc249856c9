"""A training pass on a CUDA device that is not there: the body of ``test_fake_cuda.py``, for a process of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.testing._internal.distributed.fake_pg import FakeStore

from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.layout import ParallelConfig
from skyrl_megatron.data.prefixes import PrefixTree
from skyrl_megatron.runtime import parallel_state
from skyrl_megatron.runtime.forward_step import LogprobHead, MicroBatch, PolicyStep
from skyrl_megatron.runtime.logprobs import SoftmaxSettings
from skyrl_megatron.runtime.model.attention import flash_pieces
from skyrl_megatron.runtime.model.build import build_model, return_hidden_states
from skyrl_megatron.runtime.model.moe import count_copies
from skyrl_megatron.runtime.packed_inputs import pack
from skyrl_megatron_lora.attach import attach
from skyrl_megatron_lora.layers import AdapterSettings
from skyrl_megatron_lora.targets import select
from tests.bridges.tiny_models import tiny_config
from tests.runtime.scripts.fake_cuda import CUDA, Answers, backward, fake_cuda
from tests.training.reference import padded_batch

SIZES = dict(num_hidden_layers=2, hidden_size=64, moe_intermediate_size=32, intermediate_size=64, vocab_size=1003)
GROUPED = dict(num_attention_heads=4, num_key_value_heads=2)


def even_batch() -> Any:
    """Four sequences of 24 tokens: what is counted on the device, and not known, comes out even."""
    batch = padded_batch(SIZES["vocab_size"], rows=4, prompt=10, response=14)
    batch.attention_mask[:] = True
    batch.response_mask[:] = batch.loss_mask[:] = 1
    return batch


def training_pass(
    family: str,
    layout: dict[str, int],
    rank: int = 0,
    *,
    adapters: bool = False,
    fused: bool = False,
    shared: bool = False,
    fault: str = "",
) -> dict[str, Any]:
    """Forward, loss and backward of one micro-batch on one of the ranks of ``layout`` → what came out.

    ``shared``: the first ten tokens of all rows, and two more of two rows, are computed once.
    """
    world = 1
    for degree in layout.values():
        world *= degree
    flash_pieces.cache_clear()  # of tensors of another mode
    with fake_cuda() as mode:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            groups = parallel_state.initialize(ParallelConfig(world, **layout), seed=0, timeout_s=60)
            model = _model(mode, family, groups, adapters)
            batch = even_batch()
            batch.old_logprobs = batch.rollout_logprobs = batch.ref_logprobs = batch.response_mask * -6.0
            tree = None
            if shared:
                count_copies(model.chunks[0])
                tree = PrefixTree.of(np.full(4, 24), np.array([0, 10, 12, 10]))
            packed = pack(batch, groups, CUDA, tree=tree)
            if fault == "mask left on the host":
                batch = batch.to(CUDA)
                batch.loss_mask = even_batch().loss_mask
            else:
                batch = batch.to(CUDA)
            return _pass(mode, model, groups, batch, packed, fused, fault)
        finally:
            mpu.destroy_model_parallel()
            dist.destroy_process_group()
            torch.compiler.set_stance("default")


def _model(mode: Any, family: str, groups: Any, adapters: bool) -> Any:

    config = tiny_config(family, **SIZES, **({} if family == "deepseek_v3" else GROUPED))
    with mode:
        local = {"transformer_impl": "local"}
        model = build_model(config, groups, dtype=torch.bfloat16, transformer_config_kwargs=local)
        if adapters:
            attach(model, groups, select(model.hf.plan, "all-linear"), AdapterSettings(2, 4, 0.0, "kaiming"))
    return model


def _pass(mode: Any, model: Any, groups: Any, batch: Any, packed: Any, fused: bool, fault: str) -> dict[str, Any]:

    config = SkyRLTrainConfig()
    config.trainer.algorithm.use_kl_loss = config.trainer.algorithm.use_entropy_loss = True
    objective, chunk = PolicyObjective(config.trainer.algorithm), model.chunks[0]
    totals = objective.totals(even_batch().loss_mask)
    topk = model.config.moe_router_topk if model.config.num_moe_experts else 1
    mode.moved.tokens = packed.tokens.numel() * topk // groups.tp.size()
    weight = return_hidden_states(chunk, groups) if fused and groups.is_last_stage else None
    head = LogprobHead(SoftmaxSettings(model.vocab_size, temperature=0.7, chunk_size=64), weight)
    step = PolicyStep(head, objective, totals, entropy=True, seed=(0,))
    with mode, Answers(topk):
        local = packed.tokens.numel() // groups.tp.size()
        received = None
        if not groups.is_first_stage:
            received = torch.empty(
                local, 1, model.config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            chunk.set_input_tensor(received)
        if fault == "positions left on the host":
            packed = dataclasses.replace(packed, targets=torch.zeros(packed.targets.shape, dtype=int))
        output, on_last_stage = step(iter([MicroBatch(np.arange(len(batch)), batch, packed)]), chunk)
        shape = list(output.shape)
        if groups.is_last_stage:
            output = on_last_stage(output)[0]
            if step.failure is not None:
                raise step.failure
        grads = backward(output, torch.ones_like(output))
        trained = {name: p for name, p in chunk.named_parameters() if p.requires_grad}
        return {
            "output": shape,
            "loss": (list(output.shape), str(output.device)) if groups.is_last_stage else None,
            "without gradient": [name for name, p in trained.items() if id(p) not in grads],
            "elsewhere": [
                n for n, p in [*chunk.named_parameters(), *chunk.named_buffers()] if p.device.type != "cuda"
            ],
            "trained": len(trained),
            "received": None if received is None else id(received) in grads,
            "tokens": packed.tokens.numel(),
        }
