"""The problems of the embedded default: all sums of two two-digit numbers, a fifth of them held out."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

OPERANDS = range(10, 100)
HELD_OUT = 0.2
EVALUATED = 256
"""Held-out problems that are evaluated; the others stay unused."""


def split_pairs(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(training, held-out) operand pairs. ``a+b`` and ``b+a`` are on the same side."""
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if a <= b]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    cut = round(len(pairs) * HELD_OUT)
    both = [sorted({pair for a, b in part for pair in ((a, b), (b, a))}) for part in (pairs[cut:], pairs[:cut])]
    for part in both:
        rng.shuffle(part)
    return both[0], both[1]


def write_problems(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``held_out.jsonl`` into ``folder``; returns their paths."""
    train, held_out = split_pairs(seed)
    folder.mkdir(parents=True, exist_ok=True)
    return _write(folder / "train.jsonl", train), _write(folder / "held_out.jsonl", held_out[:EVALUATED])


def _write(path: Path, pairs: Sequence[tuple[int, int]]) -> Path:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w") as file:
        for a, b in pairs:
            row = {
                "data_source": "addition",
                "prompt": [{"role": "user", "content": f"{a}+{b}=?"}],
                "env_class": "addition",
                "reward_spec": {"method": "rule", "ground_truth": str(a + b)},
            }
            file.write(json.dumps(row) + "\n")
    beside.replace(path)
    return path
