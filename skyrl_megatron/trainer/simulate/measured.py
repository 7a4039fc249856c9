"""The plan of a run that was made, from its folder: sizes from ``config.yaml``, times and lengths from
``metrics.jsonl``. Medians over its steps, without the first, in which much happens once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_megatron.errors import ConfigError, DataError, Problem
from skyrl_megatron.trainer.simulate.plan import DecodeCurve, Distribution, RunPlan
from skyrl_megatron.trainer.simulate.simulation import simulate
from skyrl_megatron.trainer.tracking import METRICS_FILE, read_metrics

_Z90 = 1.2815515655446004  # of the normal distribution


def run_plan(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return (arguments of ``RunPlan``, what was measured by its name in ``metrics.jsonl``).

    How fast an engine decodes is known at one load alone, that of the run: give a curve for a plan with another load.
    It is taken to be so fast that a synchronous run samples a batch in the time that this one took. In a run that
    trained at the same time, which does not say that, a token takes what the engines took of trajectories over their
    tokens.
    Raises ConfigError for a folder without the two files, DataError for metrics that lack a time.
    """
    from omegaconf import OmegaConf

    for name in ("config.yaml", METRICS_FILE):
        if not (folder / name).is_file():
            raise ConfigError(
                [Problem("--run", folder, f"has no {name}: give log_path/project_name/run_name of a run")]
            )
    config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    measured = _medians(folder / METRICS_FILE)
    trainer, generator, engine = config["trainer"], config["generator"], config["generator"]["inference_engine"]
    placement = trainer["placement"]
    groups, samples, engines = trainer["train_batch_size"], generator["n_samples_per_prompt"], engine["num_engines"]
    ahead = trainer.get("fully_async") or {}
    running = ahead.get("num_parallel_generation_workers", groups) if ahead.get("enabled") else groups
    slots = engine.get("max_num_seqs") or running * samples
    tokens = measured["generate/avg_assistant_tokens"]
    turns = max(round(measured.get("generate/avg_turns", 1.0)), 1)
    if generator.get("step_wise_trajectories"):  # whose rows are turns
        tokens *= turns
    load = min(slots, max(running * samples // engines, 1))
    env = measured.get("generate/trajectory_time_env_mean", 0.0)
    plan = {
        "engines": engines,
        "slots": slots,
        "decode": DecodeCurve(((load, measured["generate/trajectory_time_llm_mean"] / max(tokens, 1e-9)),)),
        "groups": groups,
        "samples": samples,
        "tokens": Distribution(
            tokens,
            measured.get("generate/std_assistant_tokens", 0.0),
            most=measured.get("generate/max_assistant_tokens", math.inf) * (turns if tokens else 1),
        ),
        "env": _from_p90(env, measured.get("generate/trajectory_time_env_p90", env)),
        "turns": turns,
        "train": max(measured["timing/step"] - measured["timing/generate"] - measured["timing/sync_weights"], 0.0),
        "sync": measured["timing/sync_weights"],
        "engine_gpus": engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1),
        "trainer_gpus": placement["policy_num_nodes"] * placement["policy_num_gpus_per_node"],
    }
    if ahead.get("enabled"):
        plan |= {"workers": running, "staleness": ahead.get("max_staleness_steps", 1)}
    else:
        plan["decode"] = _as_fast_as(plan, measured["timing/generate"])
    return plan, measured


def _as_fast_as(plan: dict[str, Any], seconds: float) -> DecodeCurve:
    """Return the pace at which a batch is sampled in so many seconds, which grow with it."""
    ((load, least),) = plan["decode"].points
    alone = plan | {"train": 0.0, "sync": 0.0, "mode": "sync", "steps": 1, "warmup": 0}
    low, high = least / 1000, least * 10
    for _ in range(14):
        pace = math.sqrt(low * high)
        if simulate(RunPlan(**alone | {"decode": DecodeCurve(((load, pace),))})).step_seconds < seconds:
            low = pace
        else:
            high = pace
    return DecodeCurve(((load, math.sqrt(low * high)),))


def _medians(path: Path) -> dict[str, float]:
    lines = read_metrics(path)
    lines = lines[1:] if len(lines) > 1 else lines
    found: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if value is not None:
                found.setdefault(name, []).append(value)
    needed = (
        "timing/step",
        "timing/generate",
        "timing/sync_weights",
        "generate/avg_assistant_tokens",
        "generate/trajectory_time_llm_mean",
    )
    if missing := [name for name in needed if name not in found]:
        raise DataError(f"{path} has no {missing[0]}: it needs at least one whole step of a run")
    return {name: float(np.median(values)) for name, values in found.items()}


def _from_p90(mean: float, p90: float) -> Distribution:
    """Return the log-normal distribution of a mean and a quantile of 0.9; a constant where the latter is no larger."""
    if mean <= 0 or p90 <= mean:
        return Distribution(mean)
    sigma = _Z90 - math.sqrt(max(_Z90**2 - 2 * math.log(p90 / mean), 0.0))  # ln p90 = ln mean - s²/2 + z s
    return Distribution(mean, mean * math.sqrt(math.expm1(sigma**2)))
