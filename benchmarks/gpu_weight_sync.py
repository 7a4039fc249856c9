"""Weight sync within one GPU: a slice of Qwen3-30B-A3B by CUDA IPC from one process to another.

    python benchmarks/run.py gpu_weight_sync [--layers 4] [--rounds 5]

Medians of the rounds, in one run: a transfer with checksums into the memory of a receiving process, against a device
copy of the same bytes; the checksums of one side; and what a tensor costs in a transfer, from 1,000 to 50,000 small
ones. The receiver copies each tensor to its place, as vLLM's loader does. Needs neither vLLM nor Megatron. Without a
GPU it says so and ends; ``--transport gloo --layers 0`` tries the script itself on a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
TIMEOUT_S = 120.0
BUCKET_BYTES = 64 << 20
COUNTS = (1_000, 10_000, 50_000)


def receiver(transport: str, pipe: Any) -> None:
    """Answers (port, weight metadata): connects, then receives as often as it is told to."""
    import torch

    from skyrl_megatron import device
    from skyrl_megatron.weight_sync.buckets import WeightReceiver
    from skyrl_megatron.weight_sync.transport import open_transport

    device.set_local_device(0)
    while (job := pipe.recv()) is not None:
        port, metadata = job
        ends = [open_transport(transport, "127.0.0.1", port, 1, 2, TIMEOUT_S)]
        receiving = WeightReceiver(ends, BUCKET_BYTES, device.device())
        receiving.set_metadata([metadata])
        places = {m.name: torch.empty(m.shape, dtype=m.torch_dtype, device=device.device()) for m in metadata}
        while pipe.recv():
            for name, tensor in receiving.tensors():
                places[name].copy_(tensor)
            receiving.finish()  # waits for the device
            pipe.send(receiving.checksums[0])
        receiving.close()


def transfers(tensors: dict[str, Any], transport: str, pipe: Any, rounds: int) -> list[float]:
    """Seconds of each transfer, the first one, which opens the buffers, left out."""
    from skyrl_megatron.weight_sync.sender import WeightSender
    from tests.support.state_source import StateSource

    sender = WeightSender(StateSource(tensors), bucket_bytes=BUCKET_BYTES, transport=transport)
    _, port = sender.listen("127.0.0.1")
    pipe.send((port, list(sender.metadata())))
    sender.connect("127.0.0.1", port, 1, TIMEOUT_S)
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        pipe.send(True)
        sums = sender.send()
        if not pipe.poll(TIMEOUT_S):
            raise SystemExit("the receiving process does not answer")
        assert pipe.recv() == sums, "checksums differ"
        seconds.append(time.perf_counter() - began)
    pipe.send(False)
    sender.close()
    return seconds[1:]


def timed(work: Any, rounds: int) -> float:
    """Median seconds on the device."""
    from skyrl_megatron import device

    seconds = []
    for _ in range(rounds + 1):
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", default="ipc")
    args = parse(parser, layers=0, rounds=1, transport="gloo")

    from skyrl_megatron import device

    counts = (100, 200) if args.smoke else COUNTS
    if args.transport == "ipc" and not device.driver_gpu_count():
        print("no GPU: nothing measured")
        return

    import torch

    from benchmarks.gpu_train import QWEN3_30B_A3B
    from bridges.plan import Plan
    from skyrl_megatron.weight_sync.buckets import checksum

    device.set_local_device(0)
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receiver, args=(args.transport, theirs), daemon=True)
    process.start()

    shapes = Plan.of(QWEN3_30B_A3B | {"num_hidden_layers": max(args.layers, 1)}).hf
    if not args.layers:
        shapes = {name: shape for name, shape in shapes.items() if "layers.0.mlp.experts" in name}
    tensors = {n: torch.ones(tuple(s), dtype=torch.bfloat16, device=device.device()) for n, s in shapes.items()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    seconds = statistics.median(transfers(tensors, args.transport, pipe, args.rounds))
    buckets = -(-nbytes // BUCKET_BYTES)
    source, target = (torch.ones(BUCKET_BYTES, dtype=torch.uint8, device=device.device()) for _ in range(2))
    copy = timed(lambda: [target.copy_(source) for _ in range(buckets)], args.rounds) * nbytes / buckets / BUCKET_BYTES
    sums = timed(lambda: [checksum(source) for _ in range(buckets)], args.rounds)
    name = torch.cuda.get_device_name() if device.has_cuda() else "CPU"
    print(f"{name}; {nbytes / 1e9:.2f} GB in {len(tensors)} tensors, buckets of {BUCKET_BYTES >> 20} MiB")
    print(f"transfer, checksums included  {seconds * 1e3:8.1f} ms   {nbytes / seconds / 1e9:7.1f} GB/s")
    print(f"device copy                   {copy * 1e3:8.1f} ms   {nbytes / copy / 1e9:7.1f} GB/s")
    print(f"transfer against device copy  {copy / seconds:8.2f}")
    print(f"checksums of one side         {sums * 1e3:8.1f} ms = {sums / seconds:.1%} of a transfer (wanted: < 5 %)")
    fixed = {}
    for count in counts:
        small = {f"layers.{number}.weight": torch.ones(16, 16, device=device.device()) for number in range(count)}
        fixed[count] = statistics.median(transfers(small, args.transport, pipe, args.rounds))
        print(f"{count:6d} tensors of 1 KiB        {fixed[count] * 1e3:8.1f} ms")
    slope = (fixed[counts[-1]] - fixed[counts[0]]) / (counts[-1] - counts[0])
    print(f"a tensor costs both sides     {slope * 1e6:8.2f} µs (wanted: 2)")
    pipe.send(None)
    process.join(10)
    report = {
        "GB": nbytes / 1e9,
        "GB_per_s": nbytes / seconds / 1e9,
        "of_device_copy": copy / seconds,
        "checksums_of_one_side": sums / seconds,
        "us_per_tensor": slope * 1e6,
    }
    print(json.dumps({name: round(value, 3) for name, value in report.items()}, indent=2))


if __name__ == "__main__":
    main()
