"""Seconds of a training step on machines that are not at hand, term by term, against what others publish.

    python benchmarks/run.py step_on_paper [--gpu H100] [--only NAME]

30B on 8 and 32 GPUs, 235B on 128, DeepSeek-V3 on 512: our recipes in layout and settings, with the prompts, samples
and mean length of NeMo-RL's published runs. The terms are those that ``--check`` prints, with their bounds. The last
table names the rung of ``launch/gpu_hour.sh`` that proves or refutes each term; what needs several GPUs has none.
``measured`` compares the same formulas with what this project measured on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from skyrl_megatron_observe.estimate.step_time import StepEstimate


@dataclass(frozen=True)
class Case:
    """A run of a recipe on ``nodes`` nodes of eight GPUs, with the work of a published run."""

    model: str
    recipe: str
    nodes: int
    engines: int
    prompts: int
    samples: int
    update: int
    """Sequences of an optimizer step."""
    longest: int
    mean: int
    """Tokens of a sequence, prompt and response."""
    published: float | None = None
    """Tokens/s per GPU."""
    step_s: float | None = None
    ahead: bool = False
    """Whether the published run trained on samples of the previous weights while it sampled the next; here half of the
    GPUs train and half sample then."""


CASES = {
    "30B on 8": Case("QWEN3_30B_A3B", "qwen3-30b-a3b", 1, 4, 64, 32, 512, 4096, 3306),
    "30B on 32": Case("QWEN3_30B_A3B", "qwen3-30b-a3b-2x8", 4, 16, 64, 32, 512, 4096, 3306, 1102, 192),
    "30B on 32, ahead": Case("QWEN3_30B_A3B", "qwen3-30b-a3b-2x8", 4, 16, 64, 32, 512, 4096, 3306, 1414, 152, True),
    "235B on 128": Case("QWEN3_235B_A22B", "qwen3-235b-a22b", 16, 8, 16, 32, 512, 8192, 5816, 58.9, 395),
    "671B on 512": Case("DEEPSEEK_V3", "deepseek-v3", 64, 8, 16, 32, 512, 1536, 820, 12.8, 64.1, True),
}
"""Published: NeMo-RL 0.6, H100, bf16, GRPO on mathematics; lengths from tokens/s, step and sequences."""
PROMPT = 150
"""Tokens of a prompt of OpenMathInstruct-2, about."""
RUNGS = {
    "prefill": ("slice", "slice_local"),
    "decode": ("slice", "slice_local", "graphs"),
    "log-probs": ("train_te", "train_local", "kernels"),
    "forward": ("train_te", "train_local"),
    "backward": ("train_te", "train_local"),
    "recomputation": ("train_te", "train_local"),
    "optimizer": ("train_te", "train_local"),
    "offload": ("moves", "slice"),
    "sync": ("sync", "slice"),
    "bubbles": (),
}
"""Term → rungs of ``tests/gpu/ladder.py`` that measure it on one GPU."""
MEASURED = {"own layers": (0.1599, 0.4639, 0.0488), "Transformer Engine": (0.2579, 0.6772, 0.0377)}
"""Seconds of log-probs, forward and backward, and Adam on an H200 (``RESULTS.md``, "One GPU")."""


def main() -> None:
    from smoke import parse

    from skyrl_megatron.config.hardware import GPU_TYPES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=list(GPU_TYPES), default="H100")
    parser.add_argument("--only", choices=[*CASES, "measured"])
    args = parse(parser, only="30B on 8")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    for name, case in CASES.items():
        if args.only in (None, name):
            show(name, case, args.gpu)
    if args.only in (None, "measured"):
        show_measured()
    print("\nproved or refuted on one GPU by the rung of launch/gpu_hour.sh:")
    for term, rungs in RUNGS.items():
        print(f"  {term:<14}{', '.join(rungs) or 'none: needs several GPUs'}")


def show(name: str, case: Case, gpu: str) -> None:
    """Print the terms of a case, and the expectation against the published figure."""
    from skyrl_megatron_observe.estimate.step_report import term_lines

    found = estimate(case, gpu)
    work = f"{case.prompts} prompts x {case.samples} samples of {case.mean} tokens, at most {case.longest}"
    print(f"\n{name}: {case.recipe}.yaml on {case.nodes * 8} {gpu}, {work}")
    print("\n".join(term_lines(found)))
    if case.published is None:
        return
    ours = [found.tokens / seconds / found.gpus for seconds in (found.step.high, found.step.likely, found.step.low)]
    low, likely, high = ours
    overlap = ", one step ahead" if case.ahead else ""
    print(
        f"  published     {case.step_s:>8g} s, {case.published:g} tokens/s per GPU{overlap}; expected here: "
        f"{likely:,.0f} ({low:,.0f} … {high:,.0f}), {likely / case.published:.2f}x"
    )


def estimate(case: Case, gpu: str) -> StepEstimate:
    """Return the step of a case. Lengths are uniform up to the longest, around the mean."""
    from skyrl_megatron.config.hardware import GPU_TYPES
    from skyrl_megatron_observe.estimate.machine_rates import Machine
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.memory_phases import role_models
    from skyrl_megatron_observe.estimate.step_time import estimate_step

    with tempfile.TemporaryDirectory() as folder:
        cfg = configuration(case, Path(folder))
        models = role_models(cfg, parameter_tables(cfg))
    rows = case.prompts * case.samples
    spread = min(case.longest - case.mean, case.mean - PROMPT - 1)
    lengths = np.linspace(case.mean - spread, case.mean + spread, rows).astype(np.int64)
    lengths = np.random.default_rng(0).permutation(lengths)
    prompts = np.full(rows, PROMPT)
    machine, memory = Machine.of_gpu(gpu, 8), (GPU_TYPES[gpu].mib or 80_000) << 20
    return estimate_step(cfg, models, machine, prompts, lengths - prompts, memory)


def configuration(case: Case, folder: Path) -> Any:
    """Return the recipe's configuration with the case's machines and work. Only config.json is written."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.load import parse
    from skyrl_megatron.config.validate import find_problems
    from tests.support import released_models

    (folder / "config.json").write_text(json.dumps(getattr(released_models, case.model)))
    settings = {
        "trainer.policy.model.path": folder,
        "trainer.logger": "console",
        "trainer.placement.policy_num_nodes": case.nodes,
        "generator.inference_engine.num_engines": case.engines,
        "trainer.train_batch_size": case.prompts,
        "trainer.policy_mini_batch_size": case.update // case.samples,
        "generator.n_samples_per_prompt": case.samples,
        "trainer.max_prompt_length": 512,
        "generator.sampling_params.max_generate_length": case.longest - 512,
    }
    if case.ahead:  # half of the nodes train, half sample
        settings |= {
            "trainer.placement.colocate_all": "false",
            "trainer.placement.policy_num_nodes": case.nodes // 2,
            "trainer.placement.ref_num_nodes": case.nodes // 2,
            "generator.inference_engine.num_engines": case.engines // 2,
            "trainer.fully_async.enabled": "true",
            "trainer.fully_async.max_staleness_steps": 1,
            "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
        }
    recipe = ROOT / "launch" / "recipes" / f"{case.recipe}.yaml"
    argv = ["--config", str(recipe), *(f"{key}={value}" for key, value in settings.items())]
    cfg, problems = parse(SkyRLTrainConfig, argv)
    problems += find_problems(cfg, Hardware(8, case.nodes, elsewhere=True))
    assert not problems, problems
    return cfg


def show_measured() -> None:
    """Compare the formulas with ``gpu_train.py --layers 2`` on an H200: 16 sequences of 4,096 tokens."""
    from benchmarks.gpu_train import QWEN3_30B_A3B
    from bridges.plan import Plan
    from skyrl_megatron.runtime.flops import component_flops, described_config
    from skyrl_megatron_observe.estimate.machine_rates import Machine
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable

    plan = Plan.of(QWEN3_30B_A3B | {"num_hidden_layers": 2})
    config = described_config(plan.family.megatron_config(plan.hf_config))
    lengths = np.full(16, 4096)
    parts = component_flops(config, plan.shape.dims["V"]).values()
    forward = sum(float(part.forward(lengths).sum()) for part in parts)
    machine = Machine.of_gpu("H200", 1)
    terms = {
        "log-probs": machine.train(forward, 2),
        "forward, backward": machine.train(3 * forward, 2),
        "optimizer": machine.adam(ParameterTable(plan).total()),
    }
    print("\nmeasured on one H200 (2 layers of 30B, 65,536 tokens), ms: on paper, own layers, Transformer Engine")
    for number, (term, seconds) in enumerate(terms.items()):
        took = "".join(f"{measured[number] * 1e3:9.1f}" for measured in MEASURED.values())
        bounds = f"({seconds.low * 1e3:.1f} … {seconds.high * 1e3:.1f})"
        print(f"  {term:<20}{seconds.likely * 1e3:8.1f}  {bounds:<18}{took}")


if __name__ == "__main__":
    main()
