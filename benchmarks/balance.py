"""Balancing of DP ranks and packing of micro-batches, against the usual plain ways of doing both.

    python benchmarks/run.py balance [--rounds 15]

Lengths are lognormal and cut at 20,000 tokens; the cost of a sequence is 24,576·s + s² (projections and attention of a
7B model). Rivals: greedy dealing over a list of sums, as trainers without a heap do it, and first fit decreasing with
a loop over open bins. Rounds alternate; the best round of each is compared, so that other work on the machine shows
little.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from skyrl_megatron.data.splitting import balance, pack_by_tokens

CAP = 32_768


def greedy(costs: np.ndarray, k: int) -> list[list[int]]:
    """Heaviest first to the smallest sum, found by a scan."""
    groups: list[list[int]] = [[] for _ in range(k)]
    sums = [0.0] * k
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        target = sums.index(min(sums))
        groups[target].append(item)
        sums[target] += costs[item]
    return groups


def first_fit_decreasing(lengths: np.ndarray, cap: int) -> list[list[int]]:
    """Longest first into the first bin with room, found by a scan."""
    bins: list[list[int]] = []
    free: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = int(lengths[row])
        for i, room in enumerate(free):
            if length <= room:
                bins[i].append(row)
                free[i] -= length
                break
        else:
            bins.append([row])
            free.append(cap - length)
    return bins


def best(rivals: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: min(values) for name, values in times.items()}


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parse(parser, rounds=1).rounds
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(8.3, 0.9, 8192)), 20_000).astype(np.int64) + 1

    costs = 24_576.0 * lengths + lengths.astype(np.float64) ** 2
    for equal in (False, True):
        sums = np.array([costs[group].sum() for group in balance(costs, 128, equal_counts=equal)])
        kind = "equal counts" if equal else "free counts"
        print(f"balance n=8192 k=128, {kind}: imbalance {100 * (sums.max() / sums.mean() - 1):.4f} %")
    contiguous = np.array([part.sum() for part in np.split(costs, 128)])
    print(f"    contiguous split: {100 * (contiguous.max() / contiguous.mean() - 1):.1f} %")
    took = best(
        {
            "free": lambda: balance(costs, 128),
            "equal": lambda: balance(costs, 128, equal_counts=True),
            "greedy": lambda: greedy(costs, 128),
        },
        rounds,
    )
    print(
        f"    {took['free']:.2f} ms free, {took['equal']:.2f} ms equal counts, greedy scan {took['greedy']:.1f} ms: "
    )
    print(f"    ratio {took['greedy'] / took['free']:.1f}x")

    some = lengths[:4096]
    bins = pack_by_tokens(some, CAP)
    bound = -(-int(some.sum()) // CAP)
    fullest = max(int(some[rows].sum()) for rows in bins)
    print(f"packing n=4096 cap={CAP}: {len(bins)} bins, lower bound {bound}, fullest {fullest}")
    took = best({"ours": lambda: pack_by_tokens(some, CAP), "ffd": lambda: first_fit_decreasing(some, CAP)}, rounds)
    ffd = len(first_fit_decreasing(some, CAP))
    print(f"    {took['ours']:.2f} ms, first fit decreasing {took['ffd']:.0f} ms for {ffd} bins:")
    print(f"    ratio {took['ffd'] / took['ours']:.0f}x")


if __name__ == "__main__":
    main()
