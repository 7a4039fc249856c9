"""Advantage estimators against those of verl 0.9.1 and skyrl 0.4.0: one thread, one run, the same float32 inputs.

    python benchmarks/run.py advantages --rivals-python RIVALS/bin/python

The rivals live in an environment of their own that shares this one's torch (the last line makes it so)::

    uv venv RIVALS --python .venv/bin/python
    uv pip install --python RIVALS/bin/python --no-deps verl==0.9.1 skyrl==0.4.0 skyrl-gym tensordict pyvers \\
        cloudpathlib orjson jaxtyping codetiming
    echo $PWD/.venv/lib/python3.12/site-packages > RIVALS/lib/python3.12/site-packages/project.pth

Each round runs every implementation once, in turn; the figure is the ratio of the fastest rounds, as noise of other
programs only ever adds. Outputs are compared before anything is timed.

    GAE   B=256,  T=8192: rewards, values, mask → whitened advantages and returns
    GRPO  B=8192, T=4096: token rewards → advantages [B], and → [B, T] by the registered estimator
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

torch.set_num_threads(1)
GAMMA, LAMBDA = 0.99, 0.95

Functions = Mapping[str, Callable[..., Any]]
Answer = tuple[float, list[float]]
"""(seconds, every 32nd advantage)"""


def gae_inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rewards, mask = torch.zeros(256, 8192), torch.zeros(256, 8192)
    rewards[:, -1] = torch.rand(256, generator=generator)
    for row, length in enumerate(torch.randint(256, 8193, (256,), generator=generator).tolist()):
        mask[row, -length:] = 1
    return rewards, torch.randn(256, 8192, generator=generator), mask


def grpo_inputs() -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(1)
    rewards, mask = torch.zeros(8192, 4096), torch.zeros(8192, 4096)
    rewards[:, -1] = torch.rand(8192, generator=generator)
    for row, length in enumerate(torch.randint(64, 4097, (8192,), generator=generator).tolist()):
        mask[row, -length:] = 1
    return rewards, mask, np.array([f"uid-{row // 8}" for row in range(8192)])


def ours() -> Functions:
    from skyrl_megatron.algorithms.advantages import AdvantageEstimatorRegistry, grpo_scores
    from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns as compute

    gae, grpo = AdvantageEstimatorRegistry.get("gae"), AdvantageEstimatorRegistry.get("grpo")
    options: dict[str, Any] = {"gamma": GAMMA, "lambd": LAMBDA}
    return {
        "gae": lambda r, v, m: gae(r, m, v, **options),
        "gae, checked call": lambda r, v, m: compute(r, m, np.arange(256), "gae", None, values=v, **options),
        "grpo scores": lambda r, m, index: grpo_scores(r.sum(1), index),
        "grpo": lambda r, m, index: grpo(r, m, index),
        "grpo, checked call": lambda r, m, index: compute(r, m, index, "grpo", None),
    }


def rivals() -> Functions:
    import skyrl.backends.skyrl_train.utils.ppo_utils as skyrl
    import verl.trainer.ppo.core_algos as verl

    return {
        "gae, verl": lambda r, v, m: verl.compute_gae_advantage_return(r, v, m, GAMMA, LAMBDA),
        "gae, skyrl": lambda r, v, m: skyrl.compute_gae_advantage_return(
            token_level_rewards=r, values=v, response_mask=m, gamma=GAMMA, lambd=LAMBDA
        ),
        "grpo, verl": lambda r, m, index: verl.compute_grpo_outcome_advantage(r, m, index),
        "grpo, verl (grpo_vectorized)": lambda r, m, index: verl.compute_grpo_vectorized_outcome_advantage(
            r, m, index
        ),
        "grpo, skyrl": lambda r, m, index: skyrl.compute_grpo_outcome_advantage(r, m, index),
    }


class Bench:
    """Functions with their inputs; answers what they return, in short, and how long they take."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.inputs: dict[str, tuple[Any, ...]] = {"gae": gae_inputs(), "grpo": grpo_inputs()}

    def run(self, name: str) -> Answer:
        start = time.perf_counter()
        result = self.functions[name](*self.inputs[name[:4].strip(" ,")])
        seconds = time.perf_counter() - start
        advantages = result[0] if isinstance(result, tuple) else result
        mask = self.inputs[name[:4].strip(" ,")][-1 if name.startswith("gae") else 1]
        if advantages.ndim == 2:
            advantages = (advantages * mask)[:, -1]
        return seconds, advantages[::32].tolist()


def serve() -> None:
    """The rivals' end of the pipe: a name a line in, [seconds, sample] out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the packages print goes to stderr
    bench = Bench(rivals())
    print(json.dumps(list(bench.functions)), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(bench.run(line.strip())), file=answers, flush=True)


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals-python", help="interpreter of the rivals' environment")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parse(parser, rounds=1)
    if arguments.serve:
        return serve()
    if not arguments.rivals_python:
        parser.error("--rivals-python is needed: see --help for how to make the environment")
    command = [arguments.rivals_python, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        answers, questions = process.stdout, process.stdin
        bench = Bench(ours())
        their_names = json.loads(answers.readline())

        def ask(name: str) -> Answer:
            print(name, file=questions, flush=True)
            seconds, sample = json.loads(answers.readline())
            return seconds, sample

        runs: dict[str, Callable[[str], Answer]] = {name: bench.run for name in bench.functions} | {
            name: ask for name in their_names
        }
        samples = {name: run(name)[1] for name, run in runs.items()}  # warm-up
        for name, sample in samples.items():
            reference = samples["gae, verl" if name.startswith("gae") else "grpo, verl"]
            error = max(abs(a - b) for a, b in zip(sample, reference, strict=True))
            # verl skips values of masked tokens, which the last token of a row does not see.
            assert error < 2e-3 if name.startswith("gae") else error < 1e-5, (name, error)
        best = {name: min(run(name)[0] for _ in range(1)) for name, run in runs.items()}
        for _ in range(arguments.rounds - 1):
            for name, run in runs.items():
                best[name] = min(best[name], run(name)[0])
        questions.close()
    report(best)


def report(best: Mapping[str, float]) -> None:
    for name, seconds in sorted(best.items()):
        print(f"{name:32} {1e3 * seconds:9.2f} ms")
    gae, grpo = min(best["gae, verl"], best["gae, skyrl"]), min(best["grpo, verl"], best["grpo, skyrl"])
    print(f"\nGAE               {gae / best['gae']:6.1f}x the faster rival   (wanted: 8)")
    print(f"GRPO, scores [B]  {grpo / best['grpo scores']:6.1f}x the faster rival   (wanted: 10)")
    print(f"GRPO, [B, T]      {grpo / best['grpo']:6.2f}x the faster rival   (wanted: 1.8)")
    vectorized = best["grpo, verl (grpo_vectorized)"]
    print(f"against verl's own vectorised GRPO: scores {vectorized / best['grpo scores']:.1f}x, ", end="")
    print(f"[B, T] {vectorized / best['grpo']:.2f}x")


if __name__ == "__main__":
    main()
