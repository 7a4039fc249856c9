"""Saving and loading a checkpoint against plain sequential files; the stall of an asynchronous save against memcpy.

    python benchmarks/run.py checkpoint [--gigabytes 2] [--rounds 5] [--folder /tmp/…]

Two ranks hold a Qwen3-MoE in bfloat16 with a distributed fp32 Adam (dp2·ep2), about 2 GB of state. Each round does
three pairs: every rank writes as many bytes as its share to one file and syncs it, and the checkpoint is saved; the
plain files are read from a cold cache, and the checkpoint is loaded from a cold cache, every byte verified; the state
is copied within memory, and an asynchronous save is started. Which of a pair comes first alternates. Files are written
and read twice, and the second time counts: a virtual machine gives freed memory back to its host, and whoever fills
the page cache first after that pays for getting it again. Ratios are medians over the rounds.
"""

import argparse
import gc
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RANKS, BLOCK = 2, 8 * 2**20

Rows = Sequence[Mapping[str, float]]


def build(gigabytes: float) -> Any:
    """A model and an optimizer with random moments; nothing is read from disk."""
    import types

    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from transformers import Qwen3MoeConfig

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import cpu_patches as megatron_patches
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.checkpoint.rank_files import RankState
    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges, set_step_count
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron.runtime.optimizer import build_lr_schedule, build_optimizer

    megatron_patches.install()
    groups = parallel_state.initialize(ParallelConfig(world_size=RANKS, ep=2))
    layers = max(1, round(8 * gigabytes / 2))
    config = Qwen3MoeConfig(
        vocab_size=1024, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=640,
    ).to_dict()  # fmt: skip
    model = build_model(config, groups, dtype=torch.bfloat16)
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    chunks = [
        DistributedDataParallel(model.config, buffers, chunk, pg_collection=groups.collection)
        for chunk in model.chunks
    ]
    settings: Any = types.SimpleNamespace(
        lr=1e-3, min_lr=0.0, weight_decay=0.0, adam_betas=(0.9, 0.95), max_grad_norm=1.0, scheduler="constant",
        num_warmup_steps=0, num_decay_steps=None, decay_norms_and_biases=False, optimizer="adam",
    )  # fmt: skip
    optimizer = build_optimizer(
        chunks, settings, {}, groups, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
        overlap_param_gather=False,
    )  # fmt: skip
    for each in owned_ranges(optimizer):
        for name, tensor in each.tensors.items():
            if name != "param":
                tensor.uniform_()
    set_step_count(optimizer, 3)
    return RankState(chunks, groups, optimizer, build_lr_schedule(optimizer, settings, None))


def drop_cache(path: str) -> None:
    """Take a file, or all files of a folder, out of the page cache."""
    files = [path] if os.path.isfile(path) else [os.path.join(f, n) for f, _, names in os.walk(path) for n in names]
    for name in files:
        descriptor = os.open(name, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def raw_write(path: str, count: int, buffer: memoryview) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    while count:
        count -= os.write(descriptor, buffer[: min(count, len(buffer))])
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(path: str, buffer: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, all starting together."""
    import torch
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    began = time.perf_counter()
    work()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def measure(gigabytes: float, rounds: int, folder: str) -> tuple[float, Rows]:
    import torch
    import torch.distributed as dist

    from skyrl_megatron.runtime.checkpoint.rank_state import blocks_to_save
    from tests.checkpoint import ranks

    rank, state = dist.get_rank(), build(gigabytes)
    blocks = list(blocks_to_save(state.model_chunks, state.optimizer, state.groups))
    mine = sum(block.data.numel() * block.data.element_size() for block in blocks)
    buffer = memoryview(bytearray(os.urandom(BLOCK)))
    target = torch.empty(mine, dtype=torch.uint8)
    rows = []
    checkpointer: Any = ranks.RankCheckpointer
    asynchronous = checkpointer(os.path.join(folder, "async"), state, asynchronous=True, keep=1)
    saved = checkpointer(os.path.join(folder, "sync"), state)
    for index in range(rounds + 1):  # the first warms up: frames of archives, staging memory
        first_is_ours = index % 2 == 1
        row: dict[str, Any] = {}
        for counts in (False, True):  # each writes new files: memory for the page cache has to be found by both
            step = 2 * index + counts
            plain = os.path.join(folder, f"plain_{rank}_{counts}")
            work: dict[str, Callable[[], Any]] = {
                "raw write": partial(raw_write, plain, mine, buffer),
                "save": partial(saved.save, step),
            }
            seconds = {name: timed(work[name]) for name in in_turn(work, first_is_ours)}
        row |= seconds
        path = f"{folder}/sync/global_step_{step}"
        for _ in range(2):
            work = {
                "raw read": partial(raw_read, plain, buffer),
                "load": partial(resumed, saved, path),
            }
            for name in in_turn(work, first_is_ours):
                drop_cache(plain)
                drop_cache(path)
                row[name] = timed(work[name])
        copies: dict[str, Callable[[], Any]] = {
            "memcpy": partial(copy, blocks, target),
            "stall": partial(asynchronous.save, index),
        }
        row["plan"] = timed(lambda: list(blocks_to_save(state.model_chunks, state.optimizer, state.groups)))
        for name in in_turn(copies, first_is_ours):
            row[name] = timed(copies[name])
            if name == "stall":
                row["rank stall"] = asynchronous.roles["policy"].writer.stall_s
                asynchronous.finish()
        dist.barrier()
        for counts in (False, True):
            os.unlink(os.path.join(folder, f"plain_{rank}_{counts}"))
        if rank == 0:
            for step in (2 * index, 2 * index + 1):
                shutil.rmtree(os.path.join(folder, "sync", f"global_step_{step}"))
        dist.barrier()
        if index:
            rows.append(row)
    saved.close()
    asynchronous.close()
    total = torch.tensor([float(mine)], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item(), rows


def in_turn(works: Mapping[str, Any], second_first: bool) -> Iterable[str]:
    return reversed(list(works)) if second_first else works


def resumed(checkpointer: Any, path: str) -> None:
    assert checkpointer.load("from_path", path) is not None


def copy(blocks: Sequence[Any], target: Any) -> None:
    """One copy of the state into memory that exists already."""
    import torch

    begin = 0
    for block in blocks:
        count = block.data.numel() * block.data.element_size()
        target[begin : begin + count].copy_(block.data.view(torch.uint8))
        begin += count


def report(total: float, rows: Rows) -> None:
    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    def ratio(of: str, to: str) -> float:
        return statistics.median(row[of] / row[to] for row in rows)

    size = total / 1e9
    print(f"{size:.2f} GB of state, {RANKS} ranks, {len(rows)} rounds (seconds: median, and each round)")
    for name in rows[0]:
        print(f"  {name:11s} {median(name):7.3f}   {' '.join(f'{row[name]:.3f}' for row in rows)}")
    print(f"save: {size / median('save'):.3f} GB/s, {100 * ratio('raw write', 'save'):.0f} % of raw (goal 60)")
    print(
        f"load, verified: {size / median('load'):.3f} GB/s, {100 * ratio('raw read', 'load'):.0f} % of raw (goal 60)"
    )
    print(f"async stall: {ratio('stall', 'memcpy'):.2f}x memcpy (goal at most 1.2)")


def main() -> None:
    from smoke import parse

    from tests.support.rank_pool import RankPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="/tmp/checkpoint-benchmark")
    arguments = parse(parser, gigabytes=0.05, rounds=1)
    os.makedirs(arguments.folder)
    pool = RankPool()
    try:
        from benchmarks import checkpoint  # the ranks find the function under its module's name

        results = pool(
            RANKS, checkpoint.measure, arguments.gigabytes, arguments.rounds, arguments.folder, timeout_s=1500
        )
        report(*results[0])
    finally:
        pool.close()
        shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
