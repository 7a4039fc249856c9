"""Engines that train on synthetic batches, and an account of what they hold, for the checkpoint tests."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

VOCAB = 1003  # odd: padded to 1004 at tp 2

LAYOUTS: dict[str, dict[str, int]] = {
    "single": dict(world=1),
    "tp2": dict(world=2, tp=2),
    "pp2": dict(world=2, pp=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "cp2": dict(world=2, cp=2),
    "dp2": dict(world=2),
    "dp2·ep2": dict(world=2, ep=2),
    "tp2·etp2": dict(world=2, tp=2, etp=2),
    "tp2·ep2": dict(world=2, tp=2, ep=2),
    "tp2·dp2·ep2": dict(world=4, tp=2, ep=2),
    "tp2·pp2": dict(world=4, tp=2, pp=2),
    "pp2·cp2·ep2": dict(world=4, pp=2, cp=2, ep=2),
    "pp2·vpp2·dp2·ep2": dict(world=4, pp=2, vpp=2, ep=2),
    "tp2·cp2·ep4": dict(world=4, tp=2, cp=2, ep=4),
    "dp4": dict(world=4),
}


def save_model(folder):
    """A HF folder of a four-layer Qwen3-MoE with four experts."""
    from tests.bridges.tiny_models import save_tiny

    return save_tiny("qwen3_moe", folder, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)


def engine(folder, layout: str, *, seed: int = 42, dropout: float = 0.0, **overrides):
    """A policy engine at one of :data:`LAYOUTS`."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine import MegatronEngine

    degrees = LAYOUTS[layout]
    megatron = "trainer.policy.megatron_config."
    keys: dict[str, Any] = {
        "trainer.policy.model.path": str(folder),
        "trainer.placement.policy_num_gpus_per_node": degrees["world"],
        "trainer.seed": seed,
        megatron + "tensor_model_parallel_size": degrees.get("tp", 1),
        megatron + "pipeline_model_parallel_size": degrees.get("pp", 1),
        megatron + "context_parallel_size": degrees.get("cp", 1),
        megatron + "expert_model_parallel_size": degrees.get("ep", 1),
        megatron + "expert_tensor_parallel_size": degrees.get("etp", 1),
        megatron + "transformer_config_kwargs": {"hidden_dropout": dropout, "attention_dropout": 0.0},
        "trainer.policy.optimizer_config.lr": 1e-2,
        "trainer.policy.optimizer_config.scheduler": "cosine",
        "trainer.gradient_checkpointing": False,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.micro_train_batch_size_per_gpu": 3,
        **overrides,
    }
    if "vpp" in degrees:
        keys[megatron + "virtual_pipeline_model_parallel_size"] = degrees["vpp"]
    return MegatronEngine(SkyRLTrainConfig.from_cli_overrides(keys), total_steps=40)


def state_of(engine):
    """What a checkpoint of the engine holds."""
    from skyrl_megatron.runtime.checkpoint.rank_files import RankState

    return RankState(engine.chunks, engine.groups, engine.optimizer, engine.lr_schedule)


def synthetic_batch(seed: int):
    """Seven sequences of unequal lengths with random tokens and advantages."""
    import torch

    from skyrl_megatron.types import PaddedBatch

    generator = torch.Generator().manual_seed(seed)
    rows, prompt, response = 7, 9, 14
    valid = torch.zeros(rows, prompt + response, dtype=torch.bool)
    mask = torch.zeros(rows, response)
    for row in range(rows):
        tokens = int(torch.randint(2, response + 1, (), generator=generator))
        mask[row, -tokens:] = 1
        valid[row, -(tokens + int(torch.randint(2, prompt + 1, (), generator=generator))) :] = True
    return PaddedBatch(
        sequences=torch.randint(0, VOCAB, valid.shape, generator=generator) * valid,
        attention_mask=valid,
        response_mask=mask,
        loss_mask=mask.clone(),
        uids=[f"prompt-{row // 2}" for row in range(rows)],
        advantages=torch.randn(mask.shape, generator=generator) * mask,
        old_logprobs=mask * -4.0,
        rollout_logprobs=mask * -4.0,
    ).flat()


def train(engine, steps) -> list[tuple[float, float]]:
    """Take the given steps, each on a batch drawn from its number. Returns (loss, gradient norm) of each."""
    from skyrl_megatron.data.splitting import split_for_dp

    seen = []
    for step in steps:
        batch = synthetic_batch(step)
        part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
        metrics = engine.forward_backward(part)
        seen.append((metrics["final_loss"], engine.optim_step().grad_norm))
    return seen


def digest(tensor) -> str:
    import torch

    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def held_by_name(engine) -> dict[str, str]:
    """Digest of every weight, and of master and moments of the range that this rank's optimizer owns of it."""
    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges

    names = {id(p): f"{i}.{name}" for i, chunk in enumerate(engine.chunks) for name, p in chunk.named_parameters()}
    held = {name: digest(p) for i, chunk in enumerate(engine.chunks) for name, p in chunk.named_parameters()}
    for each in owned_ranges(engine.optimizer):
        held |= {f"{names[id(each.parameter)]} {key}": digest(value) for key, value in each.tensors.items()}
    return held


def saved(folder, root, overrides):
    """What an engine holds that has been offloaded and saves: :func:`held_by_name`."""
    from tests.checkpoint.ranks import RankCheckpointer

    trained = engine(folder, "single", **overrides)
    train(trained, [1, 2])
    trained.offload()
    trained.onload("weights", "optimizer")
    saver = RankCheckpointer(root, state_of(trained), seed=0)
    saver.save(2)
    saver.close()
    return held_by_name(trained)


def loaded(folder, root, overrides, fault=None, *, stepped=True):
    """What another engine holds when it has loaded that: one trained differently, or not at all (``stepped``), as a
    resumed run's. ``fault``: moments are read into memory that nobody looks at."""
    import dataclasses
    import warnings
    from unittest import mock

    from skyrl_megatron.runtime.checkpoint import rank_files as rank_reader
    from skyrl_megatron.runtime.checkpoint.rank_state import blocks_to_load
    from tests.checkpoint.ranks import RankCheckpointer

    trained = engine(folder, "single", seed=7, **overrides)
    if stepped:
        train(trained, [10])

    def elsewhere(*arguments):
        for block in blocks_to_load(*arguments):
            yield dataclasses.replace(block, data=block.data.clone()) if "exp_avg" in block.key else block

    planted = mock.patch.object(rank_reader, "blocks_to_load", elsewhere) if fault else contextlib.nullcontext()
    with warnings.catch_warnings(), planted:
        warnings.simplefilter("ignore")
        RankCheckpointer(root, state_of(trained)).load()
    return held_by_name(trained)


def local_digests(engine) -> dict[str, str]:
    """SHA-256 of every weight, moment, step count and random state of this rank."""
    import random

    import numpy as np
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    found = {}
    for index, chunk in enumerate(engine.chunks):
        found |= {
            f"{index}.{name}": digest(tensor) for name, tensor in chunk.state_dict().items() if tensor is not None
        }
    for index, part in enumerate(getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])):
        for group in part.optimizer.param_groups:
            for place, main in enumerate(group["params"]):
                named = {"main": main} | part.optimizer.state[main]
                found |= {f"optimizer {index}.{place}.{name}": digest(tensor) for name, tensor in named.items()}
    found["python"] = hashlib.sha256(repr(random.getstate()).encode()).hexdigest()
    found["numpy"] = hashlib.sha256(repr(np.random.get_state()).encode()).hexdigest()
    found["torch"] = digest(torch.get_rng_state())
    found |= {f"tracker {name}": digest(state) for name, state in get_cuda_rng_tracker().get_states().items()}
    return found


def global_digests(engine) -> dict[str, str] | None:
    """SHA-256 of every global weight and optimizer tensor, put together by Megatron's own ``sharded_state_dict`` and
    its own gather of the distributed optimizer. On rank 0; None elsewhere. Padding of the vocabulary is cut off."""
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    pieces = []
    state = megatron_state(engine, is_loading=False)
    apply_factories(state)
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor):
            pieces.append((entry.key, entry.global_shape, entry.global_slice(), entry.data.detach().clone()))
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(pieces, everyone)
    if everyone is None:
        return None
    whole: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    for key, shape, place, data in (piece for rank in everyone for piece in rank):
        if key not in whole:
            whole[key], seen[key] = torch.zeros(shape, dtype=data.dtype), torch.zeros(shape, dtype=torch.bool)
        assert torch.equal(whole[key][place][seen[key][place]], data[seen[key][place]]), f"replicas of {key} differ"
        whole[key][place] = data
        seen[key][place] = True
    assert all(each.all() for each in seen.values())
    return {key: digest(tensor[:VOCAB] if tensor.shape[0] in (VOCAB, VOCAB + 1) else tensor)
            for key, tensor in whole.items()}  # fmt: skip


def megatron_state(engine, *, is_loading: bool) -> dict[str, Any]:
    """Megatron's own sharded state dict of weights and optimizer, in its ``fully_reshardable`` format."""
    from skyrl_megatron.runtime.checkpoint.rank_state import CONTENT, unwrapped

    def metadata():
        return CONTENT | {"dp_cp_group": engine.groups.dp_cp}

    model = {
        f"model{index}": unwrapped(chunk).sharded_state_dict(metadata=metadata())
        for index, chunk in enumerate(engine.chunks)
    }
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata())
    for chunk in model.values():
        for key in [key for key in chunk if key.endswith("_extra_state")]:
            del chunk[key]
    parts = optimizer.items() if "param_state" not in optimizer else [("0", optimizer)]
    return model | {f"optimizer {name}": part["param_state"] for name, part in parts if "param_state" in part}
