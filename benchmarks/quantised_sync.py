"""What weights in 8 bits save on the way to engines, and what making them costs the sender.

    python benchmarks/run.py quantised_sync [--rounds 5]

One Megatron rank sends a random Qwen3-MoE in bfloat16, in FP8 blocks and in MXFP8 in turn, over gloo, to one process
that takes the buckets and loads nothing. The rival is the same sender with bfloat16.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.weight_sync import LARGE

BUCKET_BYTES = 1 << 26
FORMS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "fp8, blocks of 128 x 128": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp8": {"quant_method": "mxfp8"},
}


def receiver(pipe: Any) -> None:
    """Takes every pass that it is told of, and answers when it has all of it."""
    import torch

    from skyrl_megatron.weight_sync.buckets import WeightReceiver
    from skyrl_megatron.weight_sync.transport import open_transport

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        (host, port), metadata, passes = job
        taken = WeightReceiver([open_transport("gloo", host, port, 1, 2, 60.0)], BUCKET_BYTES, torch.device("cpu"))
        taken.set_metadata([metadata])
        for _ in range(passes):
            for _ in taken.tensors():
                pass
            taken.finish()
            pipe.send(taken.checksums[0])
        taken.close()


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parse(parser, rounds=1)

    import torch
    import torch.distributed as dist

    from bridges.quantisation import EngineForm
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import cpu_patches as megatron_patches
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource, QuantisedWeightSource
    from skyrl_megatron.weight_sync.sender import WeightSender
    from tests.support.tiny_models import write_tiny_model

    torch.set_num_threads(1)
    megatron_patches.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = parallel_state.initialize(ParallelConfig(world_size=1))
    with tempfile.TemporaryDirectory() as root:
        folder = write_tiny_model("qwen3_moe", Path(root) / "model", dtype="bfloat16", **({} if args.smoke else LARGE))
        model = build_model(folder, groups, dtype=torch.bfloat16)
    maps = frozenset(piece.name for entry in model.hf.plan.entries if entry.can_be_scaled for piece in entry.hf)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receiver, args=(theirs,), daemon=True)
    process.start()
    plain: tuple[int, float] | None = None
    for name, config in FORMS.items():
        form = EngineForm.of({"quantization_config": config}, "config.json")
        source = MegatronWeightSource(model, groups)
        if form is not None:
            source = QuantisedWeightSource(model, groups, form, maps)
        sender = WeightSender(source, bucket_bytes=BUCKET_BYTES, transport="gloo")
        metadata = list(sender.metadata())
        address = sender.listen("127.0.0.1")
        pipe.send((address, metadata, args.rounds + 1))
        sender.connect(*address, 1)
        seconds, scales = [], []
        for _ in range(args.rounds + 1):
            began = time.perf_counter()
            sent = sender.send()
            assert pipe.recv() == sent
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
            source.refresh()
            scales.append(time.perf_counter() - began)
        sender.close()
        nbytes, median = sum(meta.nbytes for meta in metadata), statistics.median(seconds[1:])
        plain = plain or (nbytes, median)
        print(
            f"{name:25s} {nbytes / 1e6:7.1f} MB, {nbytes / plain[0]:.3f} of bfloat16   {median:.2f} s, "
            f"{median / plain[1]:.2f} times as long (scales {statistics.median(scales[1:]):.2f} s)   rounds "
            + ", ".join(f"{each:.2f}" for each in seconds[1:]),
            flush=True,
        )
    pipe.send(None)
    process.join(10)


if __name__ == "__main__":
    main()
