"""Tokens per second through our client against vLLM's own offline ``LLM.generate``, same prompts and engine arguments.

    python benchmarks/run.py rollout [--requests 512] [--short 2000] [--rounds 5]

Each side is a process with an engine of its own; they take turns, the other one idle. ``long``: prompts of 32 to 96
tokens, answers of 64. ``short``: 2,000 requests of 4 tokens in flight at once. Medians of the rounds are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
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

MODEL: dict[str, Any] = dict(
    hidden_size=256, num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256
)


def settings_of(model: Path) -> Any:
    from skyrl_megatron.inference.vllm.settings import EngineSettings

    return EngineSettings(
        str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        kv_cache_bytes=256 << 20,
    )


def prompts_and_sampling(kind: str, count: int) -> tuple[list[list[int]], dict[str, Any]]:
    lengths = [32 + i * 37 % 65 if kind == "long" else 8 + i % 9 for i in range(count)]
    prompts = [[(31 * i + 7 * j + j * j) % 480 + 8 for j in range(n)] for i, n in enumerate(lengths)]
    tokens = 64 if kind == "long" else 4
    return prompts, {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}


def ours(pipe: Any, model: Path) -> None:
    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    async def serve() -> None:
        pool = EnginePool([lambda: VLLMEngine(settings_of(model))])
        await pool.start()
        gc.collect()
        gc.freeze()  # as the engine's actor does
        client = InferenceClient(pool)
        pipe.send("up")
        while (job := await asyncio.to_thread(pipe.recv)) is not None:
            prompts, sampling = prompts_and_sampling(*job)
            began = time.perf_counter()
            answers = await client.generate(prompts, sampling)
            pipe.send((sum(len(a.token_ids) for a in answers), time.perf_counter() - began))
        await pool.shutdown()

    asyncio.run(serve())


def offline(pipe: Any, model: Path) -> None:
    from skyrl_megatron.inference.vllm import settings as platform
    from skyrl_megatron.inference.vllm.processes import OwnedContext
    from skyrl_megatron.inference.vllm.settings import hf_config

    os.environ.update(platform.worker_environment())
    from vllm import LLM, SamplingParams
    from vllm.v1.engine import utils as engine_utils

    engine_utils.get_mp_context = OwnedContext  # an engine core of vLLM alone outlives a process that is killed
    arguments = settings_of(model).arguments() | platform.platform_arguments(hf_config(model))
    llm = LLM(**{name: value for name, value in arguments.items() if not name.startswith("disable_log")})
    pipe.send("up")
    while (job := pipe.recv()) is not None:
        prompts, sampling = prompts_and_sampling(*job)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        answers = llm.generate(requests, SamplingParams(**sampling, detokenize=False), use_tqdm=False)
        pipe.send((sum(len(a.outputs[0].token_ids) for a in answers), time.perf_counter() - began))
    llm.llm_engine.engine_core.shutdown()  # else this process waits for its engine core at exit, for half a minute


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--short", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parse(parser, rounds=1, requests=8, short=8)

    import skyrl_megatron.inference.vllm.compat  # noqa: F401  (once, for both sides)
    from tests.support.tiny_models import write_tiny_model

    context = multiprocessing.get_context("fork")
    sides: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model("qwen3_moe", Path(folder) / "model", **MODEL)
        for name, body in (("ours", ours), ("offline", offline)):
            pipe, theirs = context.Pipe()
            process = context.Process(target=body, args=(theirs, model))
            process.start()
            if not pipe.poll(600) or pipe.recv() != "up":
                raise SystemExit(f"{name}: the engine did not start")
            sides[name] = pipe, process
        for kind, count in (("long", args.requests), ("short", args.short)):
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(args.rounds + 1):
                for name, (pipe, _) in sides.items():
                    pipe.send((kind, count))
                    tokens, seconds = pipe.recv()
                    if number:  # the first warms up
                        rates[name].append(tokens / seconds)
            medians = {name: statistics.median(values) for name, values in rates.items()}
            print(
                f"{kind:<6} {count:5d} requests: ours {medians['ours']:8.0f} tokens/s, "
                f"LLM.generate {medians['offline']:8.0f} tokens/s, ratio {medians['ours'] / medians['offline']:.3f} "
                "(wanted: at least 0.95)",
                flush=True,
            )
        for pipe, process in sides.values():
            pipe.send(None)
            process.join(30)
            process.kill()


if __name__ == "__main__":
    main()
