"""The generation time of synchronous steps with oversampling, against steps that wait for all, on one engine in turn.

    python benchmarks/run.py partial_rollouts [--steps 12] [--prompts 16] [--ratio 1.0]

Both sides train on the same number of samples. The lengths of responses are the same on both sides and have a heavy
tail: they are drawn once from a lognormal distribution with a fixed seed, and each request ends at the length of its
sample. Everything else is what a run has: generator, environment, client, engine, ``OversampledGroups``. The prefix
cache is cleared after each step, as a weight sync does, so that continued samples are prefilled again. Starvation
counts groups that are older than the bound; the reported length bias is compared with that of the known lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MEDIAN, SIGMA, SHORTEST, LONGEST = 60, 0.9, 4, 800
SAMPLES, BOUND = 4, 6


class KnownLengths:
    """The client, whose requests end at the known length of their sample."""

    def __init__(self, client: Any, lengths: np.ndarray) -> None:
        self.client, self.lengths = client, lengths
        self._prompts: dict[str, int] = {}
        self.abort = client.abort

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any], sessions: Sequence[str]
    ) -> Any:
        """See ``InferenceClient.generate``."""
        each = []
        for prompt, session in zip(prompts, sessions, strict=True):
            number, _, sample = session.partition("_")
            done = len(prompt) - self._prompts.setdefault(session, len(prompt))
            left = int(self.lengths[int(number), int(sample)]) - done
            each.append({**sampling, "max_tokens": left, "ignore_eos": True})
        return await self.client.generate(prompts, each, sessions)


def entry(number: int) -> dict[str, Any]:
    """Return the dataset entry of a prompt."""
    prompt = [{"role": "user", "content": f"{number}+1=?"}]
    return {"prompt": prompt, "env_class": "sums", "env_extras": {}, "uid": str(number)}


async def measure(model: Path, args: argparse.Namespace) -> None:
    """Run both sides and print the figures."""
    from transformers import AutoTokenizer

    from skyrl_megatron.config import GeneratorConfig, SkyRLGymConfig
    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron.inference.vllm.settings import EngineSettings
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
    from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
    from skyrl_megatron.rollout.outputs import prepare_generator_input
    from skyrl_megatron.sources.oversampled import OversampledGroups

    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(MEDIAN), SIGMA, ((args.steps + BOUND + 2) * args.prompts * 2, SAMPLES))
    lengths = np.clip(drawn, SHORTEST, LONGEST).astype(int)
    settings = EngineSettings(
        str(model),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        kv_cache_bytes=256 << 20,
    )
    pool = EnginePool([lambda: VLLMEngine(settings)])
    await pool.start()
    cfg = GeneratorConfig.from_dict_config(
        {"max_input_length": 128, "sampling_params": {"max_generate_length": LONGEST, "logprobs": 0}}
    )
    client, tokenizer = InferenceClient(pool), AutoTokenizer.from_pretrained(model)
    sides = {}
    for name in ("all", "first"):
        sides[name] = SkyRLGymGenerator(cfg, SkyRLGymConfig(), KnownLengths(client, lengths), tokenizer)
    groups = OversampledGroups(args.prompts, args.ratio, SAMPLES, BOUND, entry)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens, trained, oldest = dict.fromkeys(sides, 0), [], 0

    async def sample(name: str, entries: list[dict[str, Any]], log: Any = None) -> None:
        made, _ = prepare_generator_input(entries, SAMPLES, None, "sums", "train", 0)
        if log is not None:
            made["trajectory_log"] = log
        began = time.perf_counter()
        await sides[name].generate(made, disable_tqdm=True)
        seconds[name].append(time.perf_counter() - began)
        await pool.slots[0].engine.reset_prefix_cache()

    await sample("all", [entry(number) for number in range(args.prompts)])  # the first requests compile kernels
    seconds["all"].clear()
    for step in range(args.steps):
        first = step * args.prompts
        await sample("all", [entry(number) for number in range(first, first + args.prompts)])
        tokens["all"] += int(lengths[first : first + args.prompts].sum())
        entries, log = groups.begin(step), groups.log(step)
        oldest = max([oldest, *(step - group.started for group in groups.open.values())])
        await sample("first", entries, log)
        taken, _ = groups.end(log, step)
        trained += list(taken)
        found = groups.metrics()
        print(
            f"step {step + 1}: all {seconds['all'][-1]:.2f} s, first {seconds['first'][-1]:.2f} s,"
            f" length bias {found['oversampling/length_bias']:+.3f}"
        )
    await pool.shutdown()
    tokens["first"] = int(lengths[trained].sum())
    started = lengths[: groups.next].mean()
    true = lengths[trained].mean() / started - 1
    reported = found["oversampling/length_bias"]
    for name in sides:
        print(f"{name}: {sum(seconds[name]):.1f} s, {len(seconds[name]) * args.prompts * SAMPLES} samples, ", end="")
        print(f"{tokens[name]} tokens")
    print(f"generation at equal samples: {sum(seconds['first']) / sum(seconds['all']):.2f}x (wanted: 0.67x)")
    starved = sum(group.started < args.steps - BOUND for group in groups.open.values()) + (oldest > BOUND)
    print(f"oldest group: {oldest} steps of at most {BOUND}; starved groups: {starved} (wanted: 0)")
    print(f"length bias: {reported:+.4f} reported, {true:+.4f} in truth: ", end="")
    print(f"{abs((1 + reported) / (1 + true) - 1):.2%} apart (wanted: 2 %)")


def main() -> None:
    """Make a model and measure."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--ratio", type=float, default=1.0, help="share of prompts that is started in addition")
    args = parse(parser, steps=2, prompts=2)

    from skyrl_megatron.envs import BaseTextEnv, register
    from skyrl_megatron.tiny_model import write_embedded_model

    class Sums(BaseTextEnv):
        """Every answer is right."""

        def step(self, action: str) -> Any:
            """See BaseTextEnv."""
            return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}

    register("sums", Sums)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(write_embedded_model(Path(folder) / "model"), args))


if __name__ == "__main__":
    main()
