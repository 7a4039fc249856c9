"""Forward and backward with shared prefixes against separate rows, on the CPU.

    python benchmarks/run.py shared_prefixes [--rounds 4] [--cases group agent separate] [--paper]

One process, one thread, Qwen3-MoE with hidden size 512, 4 layers and 32 experts, fp32. The same engine, weights and
rows on both sides; losses and gradients are compared before anything is timed. Cases: 16 answers of 256 tokens to a
prompt of 1,024; 24 calls of an agent over a context of 4,096, each with 256 tokens of its own; rows that share
nothing. Micro-batches have up to 20,480 tokens on both sides, so that the first case is one of them. Times are of the
processor. Memory is that of the tensors that autograd keeps for the backward pass of the largest micro-batch. The
planner is timed on 4,096 rows of 8,192 tokens, 16 to a prompt of 1,024. ``--paper``: both cases for Qwen3-30B-A3B on
8 H100, by the formulas of ``--check``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

if TYPE_CHECKING:
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.types import TrainingBatch

CASES = {"group": (16, 1024, 256), "agent": (24, 4096, 256), "separate": (16, 0, 640)}
"""Rows, tokens that all of them begin with, tokens of their own."""
TINY = {"group": (4, 64, 16), "agent": (4, 64, 16), "separate": (4, 0, 40)}


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--paper", action="store_true", help="measure nothing: passes and activations on paper")
    args = parse(parser, rounds=1)
    if args.paper:
        on_paper()
        return

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), "tiny" if args.smoke else "large")
        for name in args.cases:
            compare(engine, name, make_batch(*(TINY if args.smoke else CASES)[name]), args.rounds)
    plan(*((16, 4, 256) if args.smoke else (4096, 16, 8192)))
    dist.destroy_process_group()


def make_engine(folder: Path, size: str) -> MegatronEngine:
    from forward_cpu import save_model

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine import MegatronEngine

    keys = {
        "trainer.policy.model.path": str(save_model(size, folder)),
        "trainer.algorithm.use_kl_loss": False,
        "trainer.gradient_checkpointing": False,
        "trainer.max_tokens_per_microbatch": 20_480,
        "trainer.share_prefixes": "always",
        "trainer.policy.megatron_config.optimizer_config_kwargs.use_distributed_optimizer": False,
    }
    return MegatronEngine(SkyRLTrainConfig.from_cli_overrides(keys))


def make_batch(rows: int, prompt: int, answer: int) -> TrainingBatch:
    """Rows that begin with the same ``prompt`` tokens; without any, their own first 384 are their prompt."""
    import torch

    from skyrl_megatron.data.batch import collate

    g = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        return torch.randint(0, 500, (length,), generator=g).tolist()

    shared = text(prompt)
    batch = collate(
        [shared or text(answer * 3 // 5) for _ in range(rows)],
        [text(answer if prompt else answer - answer * 3 // 5) for _ in range(rows)],
        uids=["prompt"] * rows,
        rewards=[0.0] * rows,
    )
    batch.advantages = torch.randn(batch.response_mask.shape, generator=g) * batch.response_mask
    batch.old_logprobs = -4.0 * batch.response_mask
    return batch


def compare(engine: MegatronEngine, name: str, batch: TrainingBatch, rounds: int) -> None:
    import torch

    losses, gradients, kept = {}, {}, {}
    for shares in (False, True):
        metrics, kept[shares] = measured_pass(engine, batch, shares)
        engine.reduce_gradients()
        losses[shares] = metrics["policy_loss"]
        gradients[shares] = torch.cat(
            [buffer.grad_data.clone() for chunk in engine.chunks for buffer in chunk.buffers]
        )
        engine.clear_gradients()
    difference = float((gradients[True] - gradients[False]).norm() / gradients[False].norm())
    assert difference < 1e-5 and abs(losses[True] - losses[False]) < 1e-5, (difference, losses)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        # the side that comes second is the slower one, so each comes first in turn
        for shares in (False, True) if number % 2 else (True, False):
            engine.shares_prefixes = shares
            start = time.process_time()
            engine.forward_backward(batch)
            seconds[shares].append(time.process_time() - start)
            engine.reduce_gradients()
            engine.clear_gradients()
    flat, shared = (statistics.median(seconds[shares]) for shares in (False, True))
    share = metrics["shared_prefix_share"]
    print(
        f"{name:<9} {int(batch.lengths.sum()):7} tokens, {share:.1%} saved (ratio {1 / (1 - share):.2f}): "
        f"{flat:7.2f} s -> {shared:7.2f} s of processor time, {flat / shared:.2f}x as fast; kept for backward "
        f"{kept[False] / 2**20:.0f} -> {kept[True] / 2**20:.0f} MiB, {kept[True] / kept[False]:.2f}x; "
        f"gradients differ by {difference:.1e}",
        flush=True,
    )


def measured_pass(engine: MegatronEngine, batch: TrainingBatch, shares: bool) -> tuple[dict[str, float], int]:
    """Return the metrics, and the bytes of the tensors that autograd kept."""
    import torch

    storages: dict[int, int] = {}
    largest = 0
    weights = {parameter.untyped_storage().data_ptr() for chunk in engine.chunks for parameter in chunk.parameters()}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def begin(*_: Any) -> None:
        nonlocal largest
        largest = max(largest, sum(storages.values()))
        storages.clear()

    engine.shares_prefixes = shares
    hook = engine.chunks[0].register_forward_pre_hook(begin)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        metrics = engine.forward_backward(batch)
    begin()
    hook.remove()
    return metrics, largest


def plan(rows: int, samples: int, length: int) -> None:
    import numpy as np

    from skyrl_megatron.data.prefixes import PrefixTree, prefix_order

    rng, parts = np.random.default_rng(0), []
    for _ in range(rows // samples):
        prompt = rng.integers(0, 150_000, length // 8, dtype=np.int32)
        for _ in range(samples):
            parts += [prompt, rng.integers(0, 150_000, length - length // 8, dtype=np.int32)]
    tokens, lengths = np.concatenate(parts), np.full(rows, length)
    times = []
    for _ in range(5):
        start = time.process_time()
        order, shared = prefix_order(tokens, lengths)
        PrefixTree.of(lengths[order], shared)
        times.append(time.process_time() - start)
    print(f"planner   {rows} rows of {length} tokens: {1e3 * statistics.median(times):.0f} ms of processor time")


def on_paper() -> None:
    """Print the line of ``--check`` for both cases: steps of 64 prompts, responses all of one length."""
    import dataclasses
    import json
    import warnings

    import numpy as np
    from gpu_train import QWEN3_30B_A3B
    from step_on_paper import ROOT

    from bridges.plan import Plan
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import GPU_TYPES, Hardware
    from skyrl_megatron.config.load import parse
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable
    from skyrl_megatron_observe.estimate.step_report import RunEstimate

    warnings.simplefilter("ignore")
    table = ParameterTable(Plan.of(QWEN3_30B_A3B))
    hardware = Hardware(8, 1, gpu="H100", gpu_bytes=(GPU_TYPES["H100"].mib or 0) << 20, elsewhere=True)
    for name in ("group", "agent"):
        rows, prompt, answer = CASES[name]
        settings = {
            "trainer.train_batch_size": 64,
            "trainer.policy_mini_batch_size": 64,
            "trainer.max_tokens_per_microbatch": 20_480,
            "trainer.max_prompt_length": prompt,
            "trainer.policy.megatron_config.transformer_config_kwargs.transformer_impl": "local",
            "generator.n_samples_per_prompt": rows,
            "generator.sampling_params.max_generate_length": answer,
        }
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
            recipe = ROOT / "launch" / "recipes" / "qwen3-30b-a3b.yaml"
            argv = [f"{key}={value}" for key, value in {**settings, "trainer.policy.model.path": folder}.items()]
            cfg, problems = parse(SkyRLTrainConfig, ["--config", str(recipe), *argv])
            assert not problems, problems
            estimate = RunEstimate.of(cfg, {"policy": table, "ref": table}, hardware)
        lengths = dataclasses.replace(
            estimate.lengths, prompts=np.full(64 * rows, prompt), responses=np.full(64 * rows, answer)
        )
        step = estimate.estimate(lengths.prompts, lengths.responses)
        print(f"{name:<9} {rows} x ({prompt} + {answer}): ", end="")
        print(*dataclasses.replace(estimate, lengths=lengths, step=step).shared())


if __name__ == "__main__":
    main()
