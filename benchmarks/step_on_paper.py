"""The estimate of a step against steps that others published: seconds, their bounds, and what passes in which phase.

    python benchmarks/run.py step_on_paper [--only NUMBER] [--ours]

``published_steps.yaml`` has the runs, their layouts and their sources, and says which were kept from the fit. Machine
constants are those of ``--check``; none belongs to a run. Terms that were measured to be faster here than in other
frameworks (weight sync, batches between phases) count as theirs; ``--ours`` counts ours. ``--only``: the terms of one
run, and its published split. The last tables compare the same formulas with what this project measured on one GPU, and
name the rung of ``launch/gpu_hour.sh`` that proves or refutes each term.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from skyrl_megatron_observe.estimate.machine_rates import Seconds
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable
    from skyrl_megatron_observe.estimate.step_time import StepEstimate

FILE = ROOT / "benchmarks" / "published_steps.yaml"
CLOSE = 0.35
"""Share by which a likely step may miss the published one."""


@dataclass(frozen=True)
class Run:
    """A row of the file; its keys are described there."""

    name: str
    source: str
    gpu: str
    gpus: int
    model: str
    train: tuple[int, int, int, int]
    engine: int
    mean: int
    seconds: float
    prompts: int
    samples: int
    update: int
    limit: int
    prompt: int
    pack: int | str
    score_pack: int | str
    lag: int
    passes: int
    recompute: bool
    utilization: float
    per_node: int
    kind: str
    train_gpus: int | None = None
    fit: bool = True
    eager: bool = False
    flex: bool = False
    host_optimizer: bool = False
    ends: tuple[int | None, int | None] = (None, None)
    split: dict[str, float] = dataclasses.field(default_factory=dict)
    assumed: str = ""

    @property
    def rows(self) -> int:
        """Sequences of a step."""
        return self.prompts * self.samples


@functools.cache
def _file() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return read


def published_runs() -> list[Run]:
    """Return the runs of the file, in its order."""
    return [Run(**_file()["defaults"] | row) for row in _file()["runs"]]


@functools.cache
def _shape(model: str) -> dict[str, Any]:
    from tests.support import released_models

    told: dict[str, Any] = _file()["models"] | released_models.RELEASED_LATER
    shape: dict[str, Any] = told.get(model) or getattr(released_models, model)
    return shape


@functools.cache
def _parameters(model: str) -> ParameterTable:
    from bridges.plan import Plan
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable

    return ParameterTable(Plan.of(_shape(model)))


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

    runs = published_runs()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, choices=range(1, len(runs) + 1), metavar="NUMBER")
    parser.add_argument("--ours", action="store_true", help="count no term as other frameworks take it")
    args = parse(parser, only=1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    if args.only:
        show(runs[args.only - 1])
        return
    for fit, title in ((True, "in the fit"), (False, "kept from the fit")):
        print(
            f"\n{title}\n{'':4}{'run':<22}{'GPUs':<11}{'source':<11}{'published':>9}{'low':>8}{'likely':>8}{'high':>8}"
        )
        chosen = [(number, run) for number, run in enumerate(runs, 1) if run.fit is fit]
        found = [(run, step_seconds(run, ours=args.ours)) for _, run in chosen]
        for (number, _), (run, step) in zip(chosen, found, strict=True):
            inside = "" if step.low <= run.seconds <= step.high else "  outside"
            print(
                f"{number:>3} {run.name:<22}{run.gpus:>4} {run.gpu:<6}{run.source:<11}{run.seconds:>9g}"
                f"{_short(step.low)}{_short(step.likely)}{_short(step.high)}  {step.likely / run.seconds:.2f}x{inside}"
            )
        print(summary(found))
    show_measured()
    print("\nproved or refuted on one GPU by the rung of launch/gpu_hour.sh:")
    for term, rungs in RUNGS.items():
        print(f"  {term:<14}{', '.join(rungs) or 'none: needs several GPUs'}")


def _short(seconds: float) -> str:
    return f"{seconds:>8,.0f}" if seconds >= 100 else f"{seconds:>8.3g}"


def summary(found: list[tuple[Run, Seconds]]) -> str:
    """Return how many of the runs are close and inside their bounds, and how wide those are."""
    close = sum(abs(step.likely / run.seconds - 1) <= CLOSE for run, step in found)
    inside = sum(step.low <= run.seconds <= step.high for run, step in found)
    off = float(np.median([abs(step.likely / run.seconds - 1) for run, step in found]))
    width = float(np.median([step.high / step.low for _, step in found]))
    return (
        f"    likely within {CLOSE:.0%}: {close} of {len(found)}, off by {off:.0%} in the median; published inside "
        f"the bounds: {inside} of {len(found)}; high over low {width:.2f} in the median"
    )


def show(run: Run) -> None:
    """Print the terms of a run and its phases, with the published split."""
    from skyrl_megatron_observe.estimate.step_report import SHOWN, term_lines

    found = estimate(run)
    work = f"{run.prompts} prompts x {run.samples} samples of {run.mean} tokens, limit {run.limit}"
    print(f"{run.name}, {run.gpus} {run.gpu}, {run.source}: {work}")
    print("\n".join(term_lines(found)))
    for phase, name in SHOWN.items():
        told = f"   published {run.split[name]:g} s" if name in run.split else ""
        print(f"  {name:<14}{found.phase(phase).likely:>8.3g} s{told}")
    step = step_seconds(run)
    print(f"  as published  {step.likely:>8.3g} s  ({step.low:.3g} … {step.high:.3g})   published {run.seconds:g} s")


def step_seconds(run: Run, *, ours: bool = False) -> Seconds:
    """Return the seconds of what was published of a run: a step, or its training."""
    from skyrl_megatron_observe.estimate.step_time import TRAIN

    found = estimate(run)
    if run.kind == "train":
        return found.phase(TRAIN)
    return found.step if ours else found.published()


def estimate(run: Run) -> StepEstimate:
    """Return the step of a run, with the micro-batches that it had in training and in log-probs."""
    from skyrl_megatron.config.roles import needs_reference
    from skyrl_megatron_observe.estimate.step_time import SCORE, Term, policy_passes

    with tempfile.TemporaryDirectory() as folder:
        cfg = configuration(run, Path(folder))
        training = _estimate(run, cfg)
        cfg.trainer.max_tokens_per_microbatch = -1 if run.score_pack == "rows" else run.score_pack
        scoring = {term.name: term.phases[SCORE] for term in _estimate(run, cfg).terms if SCORE in term.phases}
        more = run.passes / (policy_passes(cfg) + needs_reference(cfg))  # a pass that ours does not need
    terms = []
    for term in training.terms:
        phases = {phase: scoring[term.name] if phase == SCORE else took for phase, took in term.phases.items()}
        if SCORE in phases and term.name != "offload":
            phases[SCORE] = phases[SCORE].times(more)
        terms.append(Term(term.name, phases, term.note, term.elsewhere))
    return training.with_terms(terms)


def _estimate(run: Run, cfg: Any) -> StepEstimate:
    from skyrl_megatron.config.hardware import GPU_TYPES
    from skyrl_megatron.config.roles import active_roles
    from skyrl_megatron_observe.estimate.lengths import log_normal
    from skyrl_megatron_observe.estimate.machine_rates import Machine
    from skyrl_megatron_observe.estimate.memory_phases import role_models
    from skyrl_megatron_observe.estimate.step_time import estimate_step

    models = role_models(cfg, {role: _parameters(run.model) for role in active_roles(cfg)})
    if run.kind == "train":
        responses = np.full(run.rows, run.mean)
    else:
        responses = log_normal(run.mean, run.limit - run.prompt, run.rows)
    memory = GPU_TYPES[run.gpu].mib
    machine, prompts = Machine.of_gpu(run.gpu, run.per_node), np.full(run.rows, run.prompt)
    return estimate_step(cfg, models, machine, prompts, responses, None if memory is None else memory << 20)


def configuration(run: Run, folder: Path) -> Any:
    """Return our configuration of a run, with the micro-batches of its training. Only config.json is written."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.load import parse
    from skyrl_megatron.config.validate import find_problems

    (folder / "config.json").write_text(json.dumps(_shape(run.model)))
    asked = 512 if run.kind == "step" else 1  # tokens of the longest prompt
    (tp, cp, ep, pp), on_gpus = run.train, run.train_gpus or run.gpus
    megatron, engine = "trainer.policy.megatron_config.", "generator.inference_engine."
    settings: dict[str, Any] = {
        "trainer.policy.model.path": folder,
        "trainer.logger": "console",
        "trainer.placement.policy_num_nodes": on_gpus // run.per_node,
        "trainer.placement.policy_num_gpus_per_node": run.per_node,
        f"{megatron}tensor_model_parallel_size": tp,
        f"{megatron}context_parallel_size": cp,
        f"{megatron}expert_model_parallel_size": ep,
        f"{megatron}pipeline_model_parallel_size": pp,
        "trainer.gradient_checkpointing": str(run.recompute).lower(),
        f"{engine}tensor_parallel_size": run.engine,
        f"{engine}num_engines": (run.gpus if run.train_gpus is None else run.gpus - on_gpus) // run.engine,
        f"{engine}gpu_memory_utilization": run.utilization,
        f"{engine}max_num_seqs": 1024,
        f"{engine}enforce_eager": str(run.eager).lower(),
        "trainer.train_batch_size": run.prompts,
        "trainer.policy_mini_batch_size": run.update // run.samples,
        "generator.n_samples_per_prompt": run.samples,
        "trainer.max_prompt_length": asked,
        "generator.sampling_params.max_generate_length": run.limit - asked,
        "trainer.max_tokens_per_microbatch": -1 if run.pack == "rows" else run.pack,
        "trainer.share_prefixes": "never",
    }
    if run.flex:
        settings[f"{megatron}moe_token_dispatcher_type"] = "flex"
        settings[f"{megatron}moe_router_dtype"] = "fp32"
    if run.recompute:
        kwargs = f"{megatron}transformer_config_kwargs.recompute_"
        settings |= {f"{kwargs}granularity": "full", f"{kwargs}method": "uniform", f"{kwargs}num_layers": 1}
    for which, layers in zip(("first", "last"), run.ends, strict=True):
        if layers is not None:
            settings[f"{megatron}num_layers_in_{which}_pipeline_stage"] = layers
    if run.pack == "rows":
        settings |= {f"trainer.micro_{which}_batch_size_per_gpu": 1 for which in ("train", "forward")}
    if run.host_optimizer:
        options = f"{megatron}optimizer_config_kwargs."
        settings |= {f"{options}optimizer_cpu_offload": "true", f"{options}optimizer_offload_fraction": 1.0}
    if run.train_gpus is not None:
        settings |= {
            "trainer.placement.colocate_all": "false",
            "trainer.placement.ref_num_nodes": on_gpus // run.per_node,
            "trainer.placement.ref_num_gpus_per_node": run.per_node,
            "trainer.fully_async.enabled": "true",
            "trainer.fully_async.max_staleness_steps": run.lag,
            "trainer.fully_async.num_parallel_generation_workers": run.prompts * run.lag,
            "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
        }
    recipe = ROOT / "launch" / "recipes" / "qwen3-30b-a3b-2x8.yaml"
    argv = ["--config", str(recipe), *(f"{key}={value}" for key, value in settings.items())]
    cfg, problems = parse(SkyRLTrainConfig, argv)
    nodes = run.gpus // run.per_node
    problems += find_problems(cfg, Hardware(run.per_node, nodes, elsewhere=True))
    assert not problems, (run.name, [str(problem) for problem in problems])
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
