"""What the agent loop and collation cost, environments and engines aside.

    python benchmarks/run.py rollout_overhead [--rounds 5]

The loop: 512 conversations of four turns, one message a turn, a 24-token answer each. The engine answers at once with
scripted tokens and the environment with a constant (fakes: their time, measured without the loop, is taken off).
Milliseconds a turn. Collation: 8,192 samples of up to 4,096 tokens into the tensors of a training batch, against
filling tensors of the same shapes.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_megatron.config import GeneratorConfig, SkyRLGymConfig
from skyrl_megatron.data.batch import collate
from skyrl_megatron.envs import BaseTextEnv, register
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
from skyrl_megatron.rollout.interface import TrajectoryID

TURNS, ANSWER = 4, 24
PROMPT, RESPONSE = 512, 3584


class Instant(BaseTextEnv):
    """Three times the same observation, then the end."""

    def step(self, action: str) -> Any:
        """See BaseTextEnv."""
        self.turns += 1
        done = self.turns == TURNS
        observations = [] if done else [{"role": "user", "content": "once more"}]
        return {"observations": observations, "reward": 1.0, "done": done, "metadata": {}}


class InstantEngine:
    """Answers with the same tokens."""

    def __init__(self, answer: Sequence[int]) -> None:
        self.answer, self.logprobs = list(answer), [-0.5] * len(answer)

    async def generate(
        self, prompts: Sequence[Any], sampling: Any, sessions: Any = None, adapters: Any = None
    ) -> list[Generation]:
        """See ``InferenceClient.generate``."""
        return [Generation(list(self.answer), list(self.logprobs), "stop") for _ in prompts]


def loop_ms(rounds: int, trajectories: int) -> float:
    """Milliseconds of the generator's own work a turn, fastest round."""
    from transformers import AutoTokenizer

    from skyrl_megatron.tiny_model import write_embedded_model

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(write_embedded_model(Path(folder) / "model"))
    answer = tokenizer("the answer is " + "1" * (ANSWER - 15), add_special_tokens=False)["input_ids"]
    engine = InstantEngine([*answer, tokenizer.eos_token_id])
    cfg = GeneratorConfig.from_dict_config({"max_turns": TURNS, "max_input_length": 1024})
    generator = SkyRLGymGenerator(cfg, SkyRLGymConfig(), engine, tokenizer)
    batch: Any = {
        "prompts": [[{"role": "user", "content": f"{number}+1=?"}] for number in range(trajectories)],
        "env_classes": ["instant"] * trajectories,
        "env_extras": [{} for _ in range(trajectories)],
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID(str(number), 0) for number in range(trajectories)],
        "batch_metadata": None,
    }
    output = asyncio.run(generator.generate(batch, disable_tqdm=True))
    assert (output["rollout_metrics"] or {})["generate/avg_turns"] == TURNS
    whole = fastest(rounds, lambda: asyncio.run(generator.generate(batch, disable_tqdm=True)))
    return (whole - fastest(rounds, lambda: asyncio.run(fakes(engine, trajectories)))) / (trajectories * TURNS) * 1e3


async def fakes(engine: InstantEngine, trajectories: int) -> None:
    """All calls of engine and environments, without the loop."""
    for _ in range(trajectories):
        environment = Instant(None, {})
        environment.init([])
        for _ in range(TURNS):
            await engine.generate([[]], {}, [""])
            environment.step("")


def collation(rounds: int, samples: int, convert: Callable[[np.ndarray], Any]) -> tuple[float, float]:
    """(seconds of collation, seconds of filling tensors of the same shapes), fastest rounds in turn."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, (samples, PROMPT + RESPONSE))
    lengths = rng.integers(RESPONSE // 2, RESPONSE + 1, samples)
    lengths[0] = RESPONSE
    prompts = [convert(row[:PROMPT]) for row in ids]
    responses = [convert(row[PROMPT : PROMPT + length]) for row, length in zip(ids, lengths, strict=True)]
    by_token: Mapping[str, list[Any]] = {
        "loss_masks": [convert(np.ones(length, np.float32)) for length in lengths],
        "rollout_logprobs": [convert(np.full(length, -0.5, np.float32)) for length in lengths],
    }
    uids = [str(number // 8) for number in range(samples)]

    def fill() -> None:
        torch.empty(samples, PROMPT + RESPONSE, dtype=torch.int64).fill_(1)
        torch.empty(samples, PROMPT + RESPONSE, dtype=torch.bool).fill_(1)
        for _ in ("response_mask", "loss_mask", "rewards", "rollout_logprobs"):
            torch.empty(samples, RESPONSE).fill_(1)

    ours, plain = [], []
    for _ in range(rounds):
        plain.append(fastest(1, fill))
        ours.append(fastest(1, lambda: collate(prompts, responses, uids=uids, rewards=[1.0] * samples, **by_token)))
    return min(ours), min(plain)


def fastest(rounds: int, work: Callable[[], Any]) -> float:
    """Seconds of the fastest of ``rounds`` calls."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Run all and print the figures."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=512, help="of the loop")
    parser.add_argument("--samples", type=int, default=8192, help="that are collated")
    args = parse(parser, rounds=1, trajectories=16, samples=16)
    torch.set_num_threads(1)
    register("instant", Instant)
    print(f"agent loop: {loop_ms(args.rounds, args.trajectories):.3f} ms a turn (wanted: 0.3)")
    converters: dict[str, Any] = {"arrays": np.copy, "lists": np.ndarray.tolist}
    for name, convert in converters.items():
        ours, plain = collation(min(args.rounds, 3), args.samples, convert)
        print(f"collation of {name}: {ours:.2f} s, filling {plain:.2f} s: {ours / plain:.2f}x (wanted: 1.5x)")


if __name__ == "__main__":
    main()
