"""Experts moved between steps against experts that stay: balance on paper, and a step of two EP ranks on CPU.

    python benchmarks/run.py expert_moves [--only paper step] [--zipf 0.2 0.4 0.8] [--rounds 4]

``paper``: made loads of three released models, in which all sequences prefer the same experts, with shares 1 / rank^s
(Zipf) in a random order of each layer. Printed per step of 16 million trained tokens on H100s: tokens of the busiest
EP rank over the mean, before and after the moves that pay back and after those of a plan to which moves are free; the
seconds that a step gains and that the moves take; processor time of the plan. No move helps against an expert that has
more tokens than a rank should get.

``step``: a training step of two EP ranks on CPU whose rows all prefer the experts of rank 0. Rounds with the initial
and with the planned slots alternate; the fastest are compared. It needs two idle processors.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from expert_balance import on_two_ranks, routed_batch, two_rank_engine

from skyrl_megatron_parts.experts.plan import Freedom, MoveCosts, plan_layer

TOKENS = 1 << 24
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B, ep 8 · edp 1": dict(hidden=2048, width=768, experts=128, layers=48, topk=8, ep=8, edp=1),
    "Qwen3-235B-A22B, ep 32 · edp 1": dict(hidden=4096, width=1536, experts=128, layers=94, topk=8, ep=32, edp=1),
    "DeepSeek-V3, ep 64 · edp 1, 8 groups": dict(
        hidden=7168, width=2048, experts=256, layers=58, topk=8, ep=64, edp=1, groups=8
    ),
}
FREE = MoveCosts(row=1.0, move=0.0)


def paper(exponents: list[float], smoke: bool) -> None:
    """Print what moves gain and take for each model and skew."""
    for name, sizes in MODELS.items():
        experts, ranks, layers = sizes["experts"], sizes["ep"], 2 if smoke else sizes["layers"]
        costs = MoveCosts.of(sizes["hidden"], sizes["width"], weight_bytes=2, edp=sizes["edp"], etp=1, gpu="H100")
        freedom = Freedom.of(experts, ranks, sizes.get("groups"))
        print(f"{name}: an expert of a layer moves in {1e3 * costs.move:.1f} ms, worth {costs.tokens:,.0f} tokens")
        for exponent in exponents:
            rng = np.random.default_rng(0)
            plans, free = [], []
            began = time.process_time()
            for _ in range(layers):
                shares = rng.permutation(1 / np.arange(1, experts + 1) ** exponent)
                load = (TOKENS * sizes["topk"] * shares / shares.sum()).tolist()
                plans.append(plan_layer(load, range(experts), ranks, freedom, costs))
                free.append(plan_layer(load, range(experts), ranks, freedom, FREE).after)
            planned = (time.process_time() - began) / layers / 2
            before, after = (float(np.mean([getattr(plan, key) for plan in plans])) for key in ("before", "after"))
            mean = TOKENS * sizes["topk"] / ranks * costs.row * sizes["layers"]
            moves = float(np.mean([plan.incoming for plan in plans])) * costs.move * sizes["layers"]
            print(
                f"    Zipf {exponent}: max/mean {before:.2f} stay, {after:.2f} moved ({np.mean(free):.2f} if free): "
                f"expert time {before / after:.2f}x, {(before - after) * mean:.2f} s less per step for {moves:.2f} s; "
                f"plan {1e3 * planned:.1f} ms per layer"
            )


# ----------------------------------------------------------------------------------------------------------- step
def race(model: str, rows: int, tokens: int, rounds: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return (seconds of steps with the initial slots, with planned ones, of moves, imbalances). Of one rank.

    Tokens choose each of experts 0 to 3, those of EP rank 0, nine times as often as another.
    """
    import torch.distributed as dist

    from skyrl_megatron_parts.experts.moves import ExpertMoves

    weights = np.log([9.0] * 4 + [1.0] * 4)

    def choose(rng: np.random.Generator, row: int) -> np.ndarray:
        return np.argsort(-(rng.gumbel(size=(tokens - 1, 2, 8)) + weights), axis=-1)[..., :2]

    engine = two_rank_engine(model, 8, moe_expert_moves="auto")
    part = routed_batch(rows, tokens, choose).select(range(engine.dp_rank, rows, 2))
    engine.forward_backward(part)
    result = engine.optim_step().metrics
    moves = next(part for part in engine.parts if isinstance(part, ExpertMoves))
    engine.parts.remove(moves)
    planned = dict(engine.model.experts.moved)
    initial = {layer: tuple(range(8)) for layer in planned}
    seconds: tuple[list[float], list[float]] = ([], [])
    moving: list[float] = []
    for _ in range(rounds):
        for number, slots in enumerate((initial, planned)):
            dist.barrier()
            began = time.perf_counter()
            moves.move([engine.optimizer], slots)
            dist.barrier()
            middle = time.perf_counter()
            engine.forward_backward(part)
            engine.optim_step()
            dist.barrier()
            moving.append(middle - began)
            seconds[number].append(time.perf_counter() - middle)
    return *seconds, moving, [result["moe_rank_imbalance"], result["moe_rank_imbalance_moved"]]


def step(rounds: int, smoke: bool) -> None:
    """Print the time of a training step before and after the moves."""
    stay, moved, moving, imbalance = on_two_ranks(race, rounds, smoke)
    print(f"step, EP 2: max/mean {imbalance[0]:.2f} with the initial slots, {imbalance[1]:.2f} moved")
    print(
        f"    {min(stay):.3f} s, {min(moved):.3f} s moved: {min(stay) / min(moved):.2f}x; a move {min(moving):.3f} s"
    )


def main() -> None:
    """Run the chosen parts."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["paper", "step"], default=["paper", "step"])
    parser.add_argument("--zipf", nargs="+", type=float, default=[0.2, 0.4, 0.8])
    parser.add_argument("--rounds", type=int, default=4)
    args = parse(parser, zipf=[0.4], rounds=1)
    if "paper" in args.only:
        paper(args.zipf, args.smoke)
    if "step" in args.only:
        step(args.rounds, args.smoke)


if __name__ == "__main__":
    main()
