"""What ``trainer.exact_rollouts`` costs on CPU: generation, log-probs and a training step, with it and without.

    python benchmarks/run.py exact_rollouts [--only generation training] [--requests 128] [--rows 32] [--rounds 3]

A Mixture-of-Experts model of hidden size 256, fp32. ``generation``: prompts of 32 to 96 tokens, answers of 64, by two
vLLM engines. ``training``: rows of 20 prompt tokens and 64 to 256 answer tokens, in packs of 1,024 tokens, by two
trainers of one rank. The two sides take turns, the other one idle; medians of the rounds are compared. A run with the
mode also needs the pass for log-probs before a step, which others can leave out.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rollout

EXACT, ORDINARY = "exact", "ordinary"


def say(what: str, rates: dict[str, list[float]], unit: str) -> None:
    """Print the medians of both sides, and how many times longer the exact one takes."""
    exact, ordinary = (statistics.median(rates[side]) for side in (EXACT, ORDINARY))
    print(f"{what}: exact {exact:.0f} {unit}, ordinary {ordinary:.0f}: {ordinary / exact:.2f}x the time", flush=True)


# ------------------------------------------------------------------------------------------------------ generation
async def generation(model: Path, requests: int, rounds: int) -> None:
    """Print sampled tokens per second of both engines."""
    from dataclasses import replace

    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    settings = rollout.settings_of(model)
    engines = {side: VLLMEngine(replace(settings, exact=side == EXACT)) for side in (EXACT, ORDINARY)}
    prompts, sampling = rollout.prompts_and_sampling("long", requests)
    rates: dict[str, list[float]] = {side: [] for side in engines}
    try:
        for engine in engines.values():
            await engine.start()
        for number in range(rounds + 1):
            for side, engine in engines.items():
                began = time.perf_counter()
                ids = [f"{number} {i}" for i in range(requests)]
                await asyncio.gather(*map(engine.generate, ids, prompts, [sampling] * requests))
                if number:  # the first warms up
                    rates[side].append(requests * sampling["max_tokens"] / (time.perf_counter() - began))
                await engine.reset_prefix_cache()
    finally:
        for engine in engines.values():
            await engine.shutdown()
    say(f"generation, {requests} requests", rates, "tokens/s")


# -------------------------------------------------------------------------------------------------------- training
def train(pipe: Any, model: Path, exact: bool, rows: int) -> None:
    """Answer each message of ``pipe`` with the seconds of a pass for log-probs and of a training step."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine = MegatronEngine(
        SkyRLTrainConfig.from_cli_overrides(
            {
                "trainer.policy.model.path": str(model),
                "trainer.algorithm.use_kl_loss": False,
                "trainer.gradient_checkpointing": False,
                "trainer.bf16": False,
                "trainer.max_tokens_per_microbatch": 1024,
                "trainer.exact_rollouts": exact,
            }
        )
    )
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 257, (rows,), generator=g).tolist()
    batch = collate(
        torch.randint(8, 488, (rows, 20), generator=g).tolist(),
        [torch.randint(8, 488, (n,), generator=g).tolist() for n in lengths],
        uids=list(map(str, range(rows))),
        rewards=[0.0] * rows,
    )
    batch.advantages = torch.randn(batch.response_mask.shape, generator=g) * batch.response_mask
    pipe.send(int(batch.lengths.sum()))
    while pipe.recv() is not None:
        began = time.perf_counter()
        batch.old_logprobs = engine.compute_logprobs(batch)
        middle = time.perf_counter()
        engine.forward_backward(batch)
        engine.optim_step()
        pipe.send((middle - began, time.perf_counter() - middle))


def training(model: Path, rows: int, rounds: int) -> None:
    """Print tokens per second of both passes of both trainers."""
    context = multiprocessing.get_context("spawn")
    sides: dict[str, Any] = {}
    rates: dict[str, dict[str, list[float]]] = {"log-probs": {}, "training step": {}}
    try:
        for side in (EXACT, ORDINARY):
            pipe, theirs = context.Pipe()
            process = context.Process(target=train, args=(theirs, model, side == EXACT, rows), daemon=True)
            process.start()
            theirs.close()
            if not pipe.poll(300):
                raise SystemExit(f"{side}: the trainer did not start")
            sides[side] = pipe, process, pipe.recv()
        for number in range(rounds + 1):
            for side, (pipe, _, tokens) in sides.items():
                pipe.send("step")
                for each, seconds in zip(rates.values(), pipe.recv(), strict=True):
                    each.setdefault(side, [])
                    if number:  # the first warms up
                        each[side].append(tokens / seconds)
    finally:
        for _, process, _ in sides.values():
            process.kill()
            process.join(30)
    for what, each in rates.items():
        say(f"{what}, {rows} rows", each, "tokens/s")


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["generation", "training"], default=["generation", "training"])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parse(parser, requests=4, rows=4, rounds=1)

    from tests.support.tiny_models import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model("qwen3_moe", Path(folder) / "model", **rollout.MODEL)
        if "generation" in args.only:
            asyncio.run(generation(model, args.requests, args.rounds))
        if "training" in args.only:
            training(model, args.rows, args.rounds)


if __name__ == "__main__":
    main()
