"""``skyrl-megatron simulate``: predict step times, utilisation and staleness of an asynchronous run.

Examples: ``skyrl-megatron simulate --run logs/skyrl/run --staleness 2``, or without a run, ``skyrl-megatron simulate
--engines 62 --slots 256 --decode 1:0.01,256:0.03 --groups 512 --samples 16 --tokens 4000:3000 --train 60 --sync 5``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from skyrl_megatron.errors import ConfigError, DataError, Problem, SkyRLMegatronError
from skyrl_megatron.trainer.tracking import METRICS_FILE, read_metrics
from skyrl_megatron_tools.simulate.simulation import MODES, DecodeCurve, Distribution, Prediction, RunPlan, simulate

_Z90 = 1.2815515655446004  # 0.9 quantile of the standard normal distribution


def run_plan(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return (arguments of ``RunPlan``, medians of the metrics in ``metrics.jsonl``).

    A run measures the decoding speed of an engine only at its own load. To simulate another load, give a decode curve.
    For a synchronous run, the speed is fitted so that the simulation takes the measured time to sample a batch. For an
    asynchronous run, it is the engine time of a trajectory divided by its tokens.

    Raises ConfigError if ``config.yaml`` or ``metrics.jsonl`` is missing, and DataError if a needed metric is missing.
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
    if generator.get("step_wise_trajectories"):  # each row is one turn
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
    """Return the decode curve with which a batch takes ``seconds`` to sample, by bisection."""
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
        raise DataError(f"{path} has no {missing[0]}: let the run complete at least one step")
    return {name: float(np.median(values)) for name, values in found.items()}


def _from_p90(mean: float, p90: float) -> Distribution:
    """Return the log-normal distribution with a mean and a 0.9 quantile; a constant if ``p90`` ≤ ``mean``."""
    if mean <= 0 or p90 <= mean:
        return Distribution(mean)
    sigma = _Z90 - math.sqrt(max(_Z90**2 - 2 * math.log(p90 / mean), 0.0))  # ln p90 = ln mean - s²/2 + z s
    return Distribution(mean, mean * math.sqrt(math.expm1(sigma**2)))


_NEEDED = ("engines", "slots", "decode", "groups", "samples", "tokens", "train", "sync")
_NUMBERS = {
    "engines": "number of engines",
    "slots": "sequences that an engine decodes concurrently",
    "groups": "prompts per step",
    "samples": "samples per prompt",
    "turns": "turns per trajectory",
    "workers": "async: groups that are sampled concurrently; 0: as many as the staleness bound allows",
    "steps": "steps to simulate",
    "warmup": "first steps to exclude from the means",
    "engine_gpus": "GPUs per engine",
    "trainer_gpus": "GPUs of the trainer",
    "seed": "seed of lengths and times",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{message}; --help lists all options", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prediction for each mode. Return the exit code."""
    options = vars(_parser().parse_args(arguments))
    try:
        plan, measured = run_plan(options["run"]) if options["run"] else ({}, {})
        plan |= _overrides(options, plan)
        if missing := [name for name in _NEEDED if name not in plan]:
            raise ConfigError([Problem(f"--{missing[0]}", None, "is required without --run")])
        plans = [RunPlan(mode=mode, **plan) for mode in options["mode"] or MODES]
        predictions = [simulate(each) for each in plans]
    except ConfigError as error:
        print("; ".join(map(str, error.problems)), file=sys.stderr)
        return error.exit_code
    except SkyRLMegatronError as error:
        print(error, file=sys.stderr)
        return 2
    found = {name: measured[name] for name in ("timing/step", "timing/generate", "timing/sync_weights") if measured}
    if options["json"]:
        print(json.dumps({"measured": found, "predicted": [each.as_dict() for each in predictions]}))
    else:
        _print_table(plans[0], predictions, found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="skyrl-megatron simulate",
        description="Predict step time, utilisation and staleness of synchronous and asynchronous runs.",
        epilog="Without --run, " + ", ".join(f"--{name}" for name in _NEEDED) + " are required. Times are in seconds.",
        allow_abbrev=False,
    )
    parser.add_argument("--run", type=Path, help="folder of a run: the defaults of the options below")
    for name, text in _NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=text)
    parser.add_argument(
        "--decode", type=_curve, metavar="N:S,…", help="seconds per token with N sequences in an engine"
    )
    parser.add_argument(
        "--tokens", type=_distribution, metavar="MEAN[:STD]", help="sampled tokens per trajectory (log-normal)"
    )
    parser.add_argument(
        "--tokens-file", type=_values, metavar="FILE", help="JSON list of lengths to draw from, instead of --tokens"
    )
    parser.add_argument("--max-tokens", type=float, help="most tokens of a trajectory")
    parser.add_argument("--env", type=_distribution, metavar="MEAN[:STD]", help="environment time per trajectory")
    for name in ("token", "env"):
        parser.add_argument(
            f"--{name}-stragglers", type=_pair, metavar="SHARE:FACTOR", help="this share takes FACTOR times as long"
        )
    parser.add_argument("--train", type=float, help="time of a step without sampling and sync")
    parser.add_argument("--sync", type=float, help="time to pause the engines, load new weights, and resume")
    parser.add_argument("--staleness", type=int, help="staleness bound of async, in steps")
    parser.add_argument(
        "--mode", choices=MODES, action="append", help="mode to simulate, may be repeated (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _overrides(options: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``RunPlan`` that the command line sets."""
    direct = (*_NUMBERS, "decode", "tokens", "env", "train", "sync", "staleness")
    found = {name: options[name] for name in direct if options[name] is not None}
    if options["tokens_file"]:
        found["tokens"] = options["tokens_file"]
    for name in ("token", "env"):
        if options[f"{name}_stragglers"]:
            share, factor = options[f"{name}_stragglers"]
            key = "tokens" if name == "token" else "env"
            known = {**plan, **found}.get(key, Distribution(0.0))
            found[key] = replace(known, straggler_share=share, straggler_factor=factor)
    if options["max_tokens"] is not None:
        found["tokens"] = replace({**plan, **found}.get("tokens", Distribution(0.0)), most=options["max_tokens"])
    return found


def _pair(text: str) -> tuple[float, float]:
    first, _, second = text.partition(":")
    return float(first), float(second)


def _curve(text: str) -> DecodeCurve:
    return DecodeCurve(tuple(sorted(_pair(point) for point in text.split(","))))


def _distribution(text: str) -> Distribution:
    mean, _, std = text.partition(":")
    return Distribution(float(mean), float(std or 0))


def _values(text: str) -> Distribution:
    try:
        values = tuple(float(value) for value in json.loads(Path(text).read_text()))
    except (OSError, TypeError) as error:
        raise ValueError(str(error)) from error
    if not values or min(values) < 0:
        raise ValueError("expected a list of lengths")
    return Distribution(sum(values) / len(values), values=values)


def _print_table(plan: RunPlan, predictions: Sequence[Prediction], measured: dict[str, float]) -> None:
    print(
        f"{plan.gpus} GPUs: {plan.engines} engines x {plan.engine_gpus}, trainer {plan.trainer_gpus};"
        f" {plan.groups} prompts x {plan.samples} samples per step"
    )
    for row in (
        ("", "step", "speed", "trainer", "engines", "GPUs", "sync", "stale", "tokens/s"),
        ("", "s", "", "busy", "busy", "busy", "", "mean / max", "per GPU"),
    ):
        print("{:14}{:>10}{:>8}{:>9}{:>9}{:>7}{:>7}{:>12}{:>11}".format(*row))
    base = predictions[0].step_seconds
    for each in predictions:
        print(
            f"{each.mode:14}{each.step_seconds:10.3f}{base / each.step_seconds:7.2f}x{each.trainer_busy:9.1%}"
            f"{each.engines_busy:9.1%}{each.gpus_busy:7.1%}{each.sync_share:7.1%}"
            f"{each.staleness_mean:8.2f} /{each.staleness_max:2}{each.tokens_per_second_per_gpu:11.1f}"
        )
    if measured:
        print(f"{'measured':14}{measured['timing/step']:10.3f}")


if __name__ == "__main__":
    sys.exit(main())
