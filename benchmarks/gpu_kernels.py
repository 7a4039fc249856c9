"""Log-prob kernels on one GPU against the bandwidth of its memory: bf16 logits, forward and backward.

    python benchmarks/run.py gpu_kernels [--tokens 8192] [--vocab 151936] [--rounds 10]

The limit of a pass is the time of a device copy that moves the bytes which the pass cannot avoid: the forward reads
the logits once; the backward reads them once and writes the gradient once. The rival is plain torch: ``log_softmax``
of ``logits.float()``, gather, entropy. Without a GPU it says so and ends; ``--smoke`` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ENTROPY_WEIGHT = 0.01


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    """Median seconds of a call, after two that warm up."""
    from skyrl_megatron import device

    seconds = []
    for _ in range(rounds + 2):
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def seconds_of_copy(tensor: torch.Tensor, rounds: int) -> float:
    """Seconds in which the device reads a tensor and writes another of its size."""
    target = tensor.clone()
    return median_seconds(lambda: target.copy_(tensor), rounds)


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=10)
    args = parse(parser, tokens=64, vocab=512, rounds=2)

    from skyrl_megatron import device

    if not args.smoke and not device.driver_gpu_count():
        print("no GPU: nothing measured (--smoke runs anywhere)")
        return

    import torch
    import torch.distributed as dist

    from skyrl_megatron.runtime.logprobs import SoftmaxSettings, logprobs_and_entropy

    device.set_local_device(0)
    place = device.device()
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group(device.collective_backend(), store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator(place).manual_seed(0)
    logits = torch.randn(args.tokens, args.vocab, generator=generator, device=place, dtype=torch.bfloat16) * 3
    targets = torch.randint(0, args.vocab, (args.tokens,), generator=generator, device=place)
    settings = SoftmaxSettings(args.vocab, with_entropy=True)

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = logprobs_and_entropy(logits, targets, group, settings)
        assert entropy is not None
        return logprobs, entropy

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        every = torch.log_softmax(logits.float(), -1)
        return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)

    report: dict[str, object] = {
        "device": torch.cuda.get_device_name() if device.has_cuda() else "CPU",
        "tokens": args.tokens,
        "vocab": args.vocab,
    }
    rate = 2 * logits.nbytes / seconds_of_copy(logits, args.rounds)
    report["copy_GB_per_s"] = round(rate / 1e9)
    limit = {"forward": logits.nbytes / rate, "backward": 2 * logits.nbytes / rate}
    for name, way in (("ours", ours), ("plain", plain)):
        logits.requires_grad_(False)
        forward = median_seconds(way, args.rounds)
        logits.requires_grad_(True)

        def both(way: Callable[[], tuple[torch.Tensor, torch.Tensor]] = way) -> None:
            logits.grad = None
            logprobs, entropy = way()
            (logprobs.sum() + ENTROPY_WEIGHT * entropy.sum()).backward()

        seconds = {"forward": forward, "backward": median_seconds(both, args.rounds) - forward}
        report[name] = {
            part: {"ms": round(value * 1e3, 3), "of_bandwidth_limit": round(limit[part] / value, 3)}
            for part, value in seconds.items()
        }
        logits.grad = None
    with torch.no_grad():
        exact = torch.log_softmax(logits[:256].double(), -1).gather(1, targets[:256, None]).squeeze(1)
        errors = {
            name: float((way()[0][:256] - exact).abs().max()) for name, way in (("ours", ours), ("plain", plain))
        }
    report["largest_error_against_fp64"] = errors
    print(json.dumps(report, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
