"""Transformer Engine's Adam under Megatron's distributed optimizer, in host memory: all but its step, a kernel.

Bodies for ``ranks``. Weights, masters and moments are set by the test, so that each is known without the optimizer.
"""

from __future__ import annotations

import contextlib
from typing import Any

AWARE = {"use_precision_aware_optimizer": True}


@contextlib.contextmanager
def in_host_memory():
    """Give what Transformer Engine asks of "cuda" from host memory. Its cast to FP8, a kernel, leaves zeros, and empty
    FP8 tensors, which its extension makes with the CUDA driver, are laid out as there (csrc/quantizer.cpp before
    Blackwell: the data, a transpose where columns are used, a scale)."""
    import torch
    from torch.overrides import TorchFunctionMode
    from transformer_engine.pytorch import Float8Quantizer, Float8Tensor

    class OnHost(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {})
            if str(given.get("device", "")).startswith("cuda"):
                given["device"] = torch.device("cpu")
            return func(*args, **given)

    def update_quantized(self, src, dst, **_):
        dst._data.zero_()
        return dst

    def make_empty(self, shape, *, dtype=torch.float32, **_):
        turned = torch.empty(shape[-1], *shape[:-1], dtype=torch.uint8) if self.columnwise_usage else None
        data, scale = torch.empty(shape, dtype=torch.uint8), torch.ones(1)
        parts = {"data": data, "data_transpose": turned, "fp8_scale_inv": scale}
        return Float8Tensor(shape=tuple(shape), dtype=dtype, fp8_dtype=self.dtype, quantizer=self, **parts)

    made, cast = Float8Quantizer.make_empty, Float8Quantizer.update_quantized
    Float8Quantizer.make_empty = make_empty
    Float8Quantizer.update_quantized = update_quantized
    try:
        with OnHost():
            yield
    finally:
        Float8Quantizer.make_empty, Float8Quantizer.update_quantized = made, cast


def state_bytes(folder, options, dtype):
    """Bytes of masters and moments before the first step, as a checkpoint's load makes them, and of the copies that it
    takes them through: (held, copied), and what ``--check`` counts."""
    import dataclasses
    import json

    from bridges.plan import Plan
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges
    from skyrl_megatron.runtime.offload import memory_of, optimizer_tensors
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable, rank_bytes
    from tests.checkpoint.test_variants import bf16_state

    def storages(tensors):
        return {
            t.untyped_storage().data_ptr(): t.nbytes for t in tensors if t.numel() > 1
        }  # without counts and scales

    with in_host_memory():
        state = bf16_state(folder, {}, 1, options, dtype)
        ranges = list(owned_ranges(state.optimizer))
        stored = storages(tensor for each in ranges for tensor in each.tensors.values())
        own = storages(memory for whole in optimizer_tensors(state.optimizer) for memory in memory_of(whole))
    weights = {p.untyped_storage().data_ptr() for chunk in state.model_chunks for p in chunk.parameters()}
    held = sum(size for place, size in own.items() if place not in weights)
    copied = sum(size for place, size in stored.items() if place not in own)

    megatron = SkyRLTrainConfig().trainer.policy.megatron_config
    megatron.optimizer_config_kwargs = options
    table = ParameterTable(Plan.of(json.loads((folder / "config.json").read_text())))
    count = dataclasses.replace(table.stage(ParallelConfig(1), 0), pinned_rounding=1.0)
    counted = rank_bytes(count, ParallelConfig(1), megatron, bf16=dtype == "bfloat16", trained=True)
    return (held, copied), (counted.optimizer, counted.unscaled)


def shards(state):
    """Yield (name, parameter, Adam, the flat tensor that Adam has of it); one rank has all of it."""
    from skyrl_megatron.runtime.checkpoint.rank_state import inner_optimizers

    names = {id(p): name for chunk in state.model_chunks for name, p in chunk.named_parameters()}
    for part in inner_optimizers(state.optimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            yield names[id(parameter)], parameter, part.optimizer, part.optimizer.param_groups[group]["params"][order]


def is_lower_half(adam, shard):
    """Whether Adam keeps the lower half of the master alone."""
    import torch

    return adam.master_weights and adam.store_param_remainders and shard.dtype == torch.bfloat16


def fill(state):
    """Give every parameter a random master, whose rounded weight it has, and moments. Halves are cut as the kernel
    cuts them (transformer_engine/common/multi_tensor/adam.cu)."""
    import torch

    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter, adam, shard in shards(state):
            master, first, second = (torch.randn(shard.numel(), generator=generator) for _ in range(3))
            master[:3] = torch.tensor([0x3F808000, 0x3F818000, -0x407E8000], dtype=torch.int32).view(torch.float32)
            parameter.copy_(master.view_as(parameter))
            if adam.master_weights:
                adam.initialize_state(shard, is_lower_half(adam, shard))
            else:
                shard.copy_(master)
                adam.state[shard] |= {"exp_avg": torch.zeros_like(shard), "exp_avg_sq": torch.zeros_like(shard)}
            adam.set_scaled_state(shard, "exp_avg", first)
            adam.set_scaled_state(shard, "exp_avg_sq", second.square())
            if is_lower_half(adam, shard):
                bits = master.view(torch.int32)
                lower = bits.to(torch.int16)
                shard.view(torch.int16).copy_((bits >> 16) + (lower < 0))
                adam.state[shard]["master_param"].copy_(lower)
            elif adam.master_weights:
                adam.set_scaled_state(shard, "master_param", master)
    for part in getattr(state.optimizer, "chained_optimizers", [state.optimizer]):
        for group in part.optimizer.param_groups:
            group["step"] = 3


def account(state):
    """Return name → (weight, fp32 master, moments) as Adam's step takes them."""
    import torch

    found = {}
    for name, parameter, adam, shard in shards(state):
        moments = [adam.get_unscaled_state(shard, each).float() for each in ("exp_avg", "exp_avg_sq")]
        if is_lower_half(adam, shard):
            lower = adam.state[shard]["master_param"]
            upper = shard.detach().view(torch.int16).to(torch.int32) - (lower < 0).to(torch.int32)
            master = ((upper << 16) | (lower.to(torch.int32) & 0xFFFF)).view(torch.float32)
        else:
            master = adam.get_unscaled_state(shard, "master_param") if adam.master_weights else shard.detach()
        arrays = [parameter.detach().float().view(-1), master, *moments]
        found[name] = [array.clone().numpy() for array in arrays]
        assert all(group["step"] == 3 for group in adam.param_groups)
    return found


def saved(folder, root, options):
    """Fill an optimizer and save it; returns its :func:`account`."""
    from tests.checkpoint.ranks import RankCheckpointer
    from tests.checkpoint.test_variants import bf16_state

    with in_host_memory():
        state = bf16_state(folder, {}, 1, options)
        fill(state)
        checkpointer = RankCheckpointer(root, state, seed=0)
        checkpointer.save(3)
        checkpointer.close()
        return account(state)


def loaded(folder, root, options):
    """Load that into an optimizer that has not stepped; returns its :func:`account`."""
    from tests.checkpoint.ranks import RankCheckpointer
    from tests.checkpoint.test_variants import bf16_state

    with in_host_memory():
        state = bf16_state(folder, {}, 2, options)
        checkpointer = RankCheckpointer(root, state, seed=0)
        checkpointer.load()
        checkpointer.close()
        return account(state)
