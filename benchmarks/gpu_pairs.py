"""Two ways to do one thing, side by side on one GPU: the way that runs take, against the one that it replaces.

    python benchmarks/run.py gpu_pairs [moves | attention | delta_net | graphs] [--layers 2]

- ``moves``: offload that starts before the driver prepares the weight sync and onload that computing overlaps, against
  those that are waited for (milliseconds, the engine of ``gpu_train.py``);
- ``attention``: forward and backward of attention with sinks (gpt-oss) by the flash kernel, against all scores;
- ``delta_net``: gated delta nets (Qwen3-Next) by the kernels of ``fla-core``, against this package's loop;
- ``graphs``: a token of 8 sequences, decoded by vLLM with CUDA graphs, against ``enforce_eager``.

Without a GPU it says so and ends; ``--smoke`` runs ``moves`` on a CPU, where copies overlap nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DRIVER_S = 0.3
"""What a driver takes between the last update and the weight sync, in the embedded run."""
LOCAL = "trainer.policy.megatron_config.transformer_config_kwargs.transformer_impl=local"
SEQUENCES, ANSWER = 8, 512


def compared(before: float, after: float) -> dict[str, float]:
    """Return milliseconds of both ways and their ratio."""
    return {"before": round(before * 1e3, 2), "after": round(after * 1e3, 2), "ratio": round(after / before, 3)}


def moves(args: argparse.Namespace) -> dict[str, Any]:
    """The step with its onload, and the wait for the offload: alone, and beside other work."""
    from benchmarks.gpu_train import join_group, load_engine, make_batch
    from skyrl_megatron import device
    from tests.gpu import installed

    join_group()
    leaves = ["trainer.policy.optimizer_config.offload_after_step=true", "trainer.placement.colocate_all=true"]
    layers = [LOCAL] if "te" in installed.missing() else []
    rounds, (sequences, length) = (1, (4, 64)) if args.smoke else (3, (4, 4096))
    engine = load_engine(args.layers, 2 * rounds + 1, [*leaves, *layers], smoke=args.smoke)
    batch = make_batch(sequences, length, engine.model.vocab_size)

    def step(early: bool) -> tuple[float, float]:
        device.synchronize()
        began = time.perf_counter()
        if not early:
            engine.onload()
            device.synchronize()
        engine.forward_backward(batch)
        engine.optim_step()
        device.synchronize()
        stepped = time.perf_counter() - began
        if early:
            engine.start_offload()
        time.sleep(DRIVER_S)
        began = time.perf_counter()
        engine.offload()
        device.synchronize()
        return stepped, time.perf_counter() - began

    step(True)  # allocates the host's memory
    before, after = ([step(early) for _ in range(rounds)] for early in (False, True))
    names = ("onload_and_step", "offload")
    times = zip(*(zip(*each, strict=True) for each in (before, after)), strict=True)
    return {
        name: compared(*(statistics.median(seconds) for seconds in both))
        for name, both in zip(names, times, strict=True)
    }


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward in bf16, 64 heads of gpt-oss over 8 of keys."""
    import torch
    from megatron.core.transformer import TransformerConfig

    from benchmarks.gpu_kernels import median_seconds
    from skyrl_megatron import device
    from skyrl_megatron.runtime.model.attention import PackedAttention, flash_pieces

    device.set_local_device(0)
    heads, groups, width, tokens = 64, 8, 64, 512 if args.smoke else 4096
    place = device.device()

    def draw(count: int) -> torch.Tensor:
        return torch.randn(tokens, count, width, device=place, dtype=torch.bfloat16).requires_grad_()

    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * width, num_attention_heads=heads, num_query_groups=groups,
        attention_dropout=0.0, softmax_type="learnable", params_dtype=torch.bfloat16,
    )  # fmt: skip
    groups_of_one: Any = SimpleNamespace(cp=alone, tp=alone)
    module = PackedAttention(config, 1, None, "self", pg_collection=groups_of_one).to(place)
    given = [draw(count) for count in (heads, groups, groups)]
    pieces = flash_pieces((tokens,), 1, 0, None, place)

    def all_scores() -> torch.Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in given)
        return module._attend(query, key, value, None)

    def kernel() -> torch.Tensor:
        query, key, value = given
        return module._join(query, key, value, pieces)

    both = (median_seconds(partial(there_and_back, way), 5) for way in (all_scores, kernel))
    return {f"{tokens} tokens": compared(*both)}


def there_and_back(way: Callable[[], torch.Tensor]) -> None:
    way().sum().backward()


def delta_net(args: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of the rule in bf16, heads of Qwen3-Next."""
    import torch

    from benchmarks.gpu_kernels import median_seconds
    from skyrl_megatron import device
    from skyrl_megatron.runtime.model import delta_kernels, delta_rule

    device.set_local_device(0)
    place, tokens = device.device(), 512 if args.smoke else 8192
    shapes = [(16, 128), (16, 128), (16, 2, 128), (16, 2), (16, 2)]
    given = [torch.rand(tokens, *shape, device=place, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    starts, plan = delta_kernels.sequence_starts((tokens,), place), delta_rule.chunk_plan((tokens,), place)
    q, k, v, g, beta = given

    def loop() -> torch.Tensor:
        found = delta_rule.gated_delta_rule(delta_rule.l2_normalize(q), delta_rule.l2_normalize(k), v, -g, beta, plan)
        return found[0]

    def kernels() -> torch.Tensor:
        return delta_kernels.gated_delta_rule(q, k, v, -g.float(), beta, starts)

    both = (median_seconds(partial(there_and_back, way), 5) for way in (loop, kernels))
    return {f"{tokens} tokens": compared(*both)}


def graphs(args: argparse.Namespace) -> dict[str, Any]:
    """A decoded token of few sequences, for which an operation's launch takes longer than its kernel."""
    from benchmarks.gpu_run import write_tokenizer
    from benchmarks.gpu_train import QWEN3_30B_A3B, TINY, write_model

    config = QWEN3_30B_A3B | (TINY if args.smoke else {}) | {"num_hidden_layers": args.layers, "eos_token_id": 1}
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(write_model(Path(folder), config), int(str(config["vocab_size"])))
        before, after = (asyncio.run(seconds_of_a_token(folder, eager)) for eager in (True, False))
    return {f"{SEQUENCES} sequences, {args.layers} layers": compared(before, after)}


async def seconds_of_a_token(model: str, eager: bool) -> float:
    """Seconds of a decoding step of an engine."""
    from skyrl_megatron.inference.vllm.settings import EngineSettings
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    engine = VLLMEngine(
        EngineSettings(
            model,
            max_model_len=1024,
            max_num_seqs=SEQUENCES,
            gpu_memory_utilization=0.5,
            enforce_eager=eager,
            start_timeout_s=240.0,
        )
    )
    await engine.start()
    try:
        sampling = {"max_tokens": ANSWER, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
        for turn in ("warm", "timed"):
            began = time.perf_counter()
            async with asyncio.timeout(200):
                await asyncio.gather(
                    *(engine.generate(f"{turn}{n}", range(5 + n, 69 + n), sampling) for n in range(SEQUENCES))
                )
        return (time.perf_counter() - began) / ANSWER
    finally:
        await engine.shutdown()


NEEDS = {
    moves: (),
    attention: ("gpu",),  # torch's flash kernel
    delta_net: ("gpu", "fla"),
    graphs: ("gpu", "vllm"),
}
"""Pairs → what they need (``tests/gpu/installed.py``) beside ``--smoke`` where there is no GPU."""


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("only", nargs="?", choices=[way.__name__ for way in NEEDS])
    parser.add_argument("--layers", type=int, default=2)
    args = parse(parser)

    from tests.gpu import installed

    report, lacking = {}, ""
    for way, needs in NEEDS.items():
        if args.only in (None, way.__name__):
            if lacks := installed.lacking({*needs, *(() if args.smoke else ("gpu",))}):
                lacking = lacking or lacks
            else:
                report[way.__name__] = way(args)
    print(json.dumps(report, indent=2) if report else f"{lacking}: nothing measured")


if __name__ == "__main__":
    main()
