"""Log-probs and entropy of bf16 logits, and the fused LM head, against plain torch: one run, one thread, on CPU.

    python benchmarks/run.py logprobs [--rounds 5] [--tokens 2048] [--vocab 65536] [--hidden 1024] [--only heads] […]

Two comparisons, forward and backward of Σ (w · log-prob + 0.01 · entropy):

    from logits       against ``log_softmax`` of ``logits.float()``, gather, −Σ p log p, as written in most trainers
    fused LM head     hidden states and weight in bf16 (or fp32), 1024 tokens at a time, against all logits at once

Rounds alternate; figures are of the fastest, as noise of other programs only ever adds, on the clock and in seconds of
the processor, which it adds less to. Memory is the growth of the process's peak (``VmHWM``) over its inputs (and, of
the heads, the gradients of these), in a process of each way's own. Errors are against fp64 on every eighth token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron.runtime.logprobs import SoftmaxSettings, fused_logprobs_and_entropy, logprobs_and_entropy

torch.set_num_threads(1)
ENTROPY_WEIGHT = 0.01
CHUNK = 1024
EVERY = 8


class Alone(dist.ProcessGroup):
    """The group of one rank, which nothing is sent in."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]


def naive(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(logits.float(), -1)
    return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


def ours(logits: Tensor, targets: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    settings = SoftmaxSettings(logits.shape[1], chunk_size=CHUNK, with_entropy=True, overwrite=overwrite)
    logprobs, entropy = logprobs_and_entropy(logits, targets, Alone(), settings)
    assert entropy is not None
    return logprobs, entropy


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    settings = SoftmaxSettings(len(weight), chunk_size=CHUNK, with_entropy=True)
    logprobs, entropy = fused_logprobs_and_entropy(hidden, weight, targets, Alone(), settings)
    assert entropy is not None
    return logprobs, entropy


def backward(results: tuple[Tensor, Tensor], weights: Tensor) -> None:
    logprobs, entropy = results
    ((weights * logprobs).sum() + ENTROPY_WEIGHT * entropy.sum()).backward()


class Inputs:
    """Everything that a way reads; logits ~ N(0, 4), targets drawn from them."""

    def __init__(self, tokens: int, vocab: int, hidden: int, fp32: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.randn(tokens, generator=generator)
        self.targets = torch.randint(vocab, (tokens,), generator=generator)
        self.logits = self.hidden = self.head = torch.empty(0)
        if hidden:
            kind = torch.float32 if fp32 else torch.bfloat16
            self.hidden = torch.randn(tokens, hidden, generator=generator).to(kind)
            self.head = torch.randn(vocab, hidden, generator=generator).mul_(2 / hidden**0.5).to(kind)
        else:
            self.logits = torch.empty(tokens, vocab, dtype=torch.bfloat16)
            for rows in torch.arange(tokens).split(128):
                drawn = torch.randn(len(rows), vocab, generator=generator) * 2
                self.logits[rows] = drawn.bfloat16()
                self.targets[rows] = torch.multinomial(drawn.softmax(-1), 1, generator=generator).squeeze(1)

    def leaves(self) -> list[Tensor]:
        given = [self.hidden, self.head] if len(self.head) else [self.logits]
        return [tensor.detach().requires_grad_() for tensor in given]


Way = Callable[[Inputs, list[Tensor]], tuple[Tensor, Tensor]]
WAYS: dict[str, Way] = {
    "naive": lambda given, leaves: naive(leaves[0], given.targets),
    "ours": lambda given, leaves: ours(leaves[0], given.targets),
    "ours, over the logits": lambda given, leaves: ours(leaves[0] * 1, given.targets, overwrite=True),
    "unfused head": lambda given, leaves: ours(leaves[0] @ leaves[1].t(), given.targets, overwrite=True),
    "fused head": lambda given, leaves: fused(leaves[0], leaves[1], given.targets),
}
FROM_LOGITS, HEADS = ("naive", "ours"), ("unfused head", "fused head")


def run(way: str, given: Inputs) -> tuple[float, float, list[Tensor]]:
    """Return (seconds, those of the processor, [log-probs, entropy, gradients…])."""
    leaves = given.leaves()
    started, worked = time.perf_counter(), time.process_time()
    results = WAYS[way](given, leaves)
    backward(results, given.weights)
    seconds, worked = time.perf_counter() - started, time.process_time() - worked
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return seconds, worked, [results[0].detach(), results[1].detach(), *gradients]


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def memory(way: str, shape: tuple[int, ...]) -> float:
    """Return GiB over the inputs, and over the gradients of hidden states and head, of a process that runs ``way``."""
    command = [sys.executable, __file__, "--measure", way, "--shape", *map(str, shape)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(answer)) / 2**30


def measure(way: str, shape: tuple[int, ...]) -> None:
    run(way, Inputs(8, shape[1], 8 if shape[2] else 0, shape[3]))
    given = Inputs(*shape)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the inputs
    before = peak_bytes()
    _, _, results = run(way, given)
    gradients = sum(tensor.nbytes for tensor in results[2:]) if shape[2] else 0
    print(json.dumps(peak_bytes() - before - gradients))


def errors(given: Inputs, results: list[Tensor]) -> dict[str, float]:
    """Return how far log-probs, entropies and gradient are from fp64's, each over what is allowed."""
    rows = torch.arange(0, len(given.targets), EVERY)
    worst = {"log-probs": 0.0, "entropy": 0.0, "gradient": 0.0}
    for part in rows.split(32):
        leaf = given.logits[part].double().requires_grad_()
        every = torch.log_softmax(leaf, -1)
        exact = every.gather(1, given.targets[part, None]).squeeze(1), -(every.exp() * every).sum(-1)
        backward(exact, given.weights[part].double())
        logprobs, entropy, grad = (tensor[part].double() for tensor in results)
        assert leaf.grad is not None
        allowed = 5e-7 * exact[0].abs().clamp(min=1)
        worst["log-probs"] = max(worst["log-probs"], ((logprobs - exact[0]).abs() / allowed).max().item())
        worst["entropy"] = max(worst["entropy"], (entropy - exact[1]).abs().max().item() / 1e-4)
        ulp = torch.exp2(leaf.grad.abs().clamp(min=1e-38).log2().floor() - 7)
        floor = 1e-6 * leaf.grad.abs().amax(-1, keepdim=True)
        error = (grad - leaf.grad).abs() / torch.maximum(ulp, floor)
        worst["gradient"] = max(worst["gradient"], error.max().item())
    return worst


def compare(ways: tuple[str, str], shape: tuple[int, ...], rounds: int) -> list[Tensor]:
    given = Inputs(*shape)
    fastest = dict.fromkeys(ways, (float("inf"), float("inf")))
    results: list[Tensor] = []
    for _ in range(rounds):
        for way in ways:
            *seconds, results = run(way, given)
            fastest[way] = min(fastest[way][0], seconds[0]), min(fastest[way][1], seconds[1])
    base, mine = (fastest[way] for way in ways)
    used = {way: memory(way, shape) for way in ways}
    for way in ways:
        print(f"{way:14} {fastest[way][0]:7.2f} s {fastest[way][1]:7.2f} s of the processor   +{used[way]:.2f} GiB")
    ratios = [own / other for own, other in zip(mine, base, strict=True)]
    print(f"{ways[1]} takes {ratios[0]:.2f}x the time of {ways[0]}, {ratios[1]:.2f}x of the processor's")
    if not shape[2]:
        for name, error in errors(given, results).items():
            print(f"error of {name}: {error:.2f} of what is allowed")
    return results


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("tokens", 2048), ("vocab", 65536), ("hidden", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=["logits", "heads"])
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--fp32", action="store_true", help="the heads' hidden states and weight")
    args: Any = parse(parser, rounds=1, tokens=64, vocab=512, hidden=32)
    if args.measure:
        measure(args.measure, tuple(args.shape))
        return
    print(f"{args.tokens} tokens, vocabulary {args.vocab}, one thread, {args.rounds} rounds")
    if args.only != "heads":
        compare(FROM_LOGITS, (args.tokens, args.vocab, 0, 0), args.rounds)
    if args.only != "logits":
        compare(HEADS, (args.tokens, args.vocab, args.hidden, int(args.fp32)), args.rounds)


if __name__ == "__main__":
    main()
