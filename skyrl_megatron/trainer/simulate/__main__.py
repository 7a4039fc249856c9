"""``python -m skyrl_megatron.trainer.simulate``: predict a run that trains while it samples.

Example: ``python -m skyrl_megatron.trainer.simulate --run logs/skyrl/run --staleness 2``, or without a run, with
``--engines 62 --slots 256 --decode 1:0.01,256:0.03 --groups 512 --samples 16 --tokens 4000:3000 --train 60 --sync 5``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronError
from skyrl_megatron.trainer.simulate.measured import run_plan
from skyrl_megatron.trainer.simulate.plan import MODES, DecodeCurve, Distribution, RunPlan
from skyrl_megatron.trainer.simulate.simulation import Prediction, simulate

_NEEDED = ("engines", "slots", "decode", "groups", "samples", "tokens", "train", "sync")
_NUMBERS = {
    "engines": "engines",
    "slots": "sequences that an engine decodes at the same time",
    "groups": "prompts of a step",
    "samples": "of a prompt",
    "turns": "of a trajectory",
    "workers": "groups sampled at the same time in async; 0: as many as the bound lets",
    "steps": "to simulate",
    "warmup": "first steps that are left out of the means",
    "engine_gpus": "GPUs of an engine",
    "trainer_gpus": "GPUs of the trainer",
    "seed": "of lengths and times",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{message}; --help lists all options", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is predicted of each mode; returns the exit code."""
    options = vars(_parser().parse_args(arguments))
    try:
        plan, measured = run_plan(options["run"]) if options["run"] else ({}, {})
        plan |= _given(options, plan)
        if missing := [name for name in _NEEDED if name not in plan]:
            raise ConfigError([Problem(f"--{missing[0]}", None, "is needed where no --run gives it")])
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
        prog="python -m skyrl_megatron.trainer.simulate",
        description="Predict step time, utilisation and staleness of runs that sample and train at the same time.",
        epilog="Without --run, " + ", ".join(f"--{name}" for name in _NEEDED) + " are needed. Times are in seconds.",
        allow_abbrev=False,
    )
    parser.add_argument("--run", type=Path, help="folder of a run: what is not given below is taken from it")
    for name, text in _NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=text)
    parser.add_argument("--decode", type=_curve, metavar="N:S,…", help="seconds a token with N sequences in an engine")
    parser.add_argument(
        "--tokens", type=_distribution, metavar="MEAN[:STD]", help="sampled of a trajectory (log-normal)"
    )
    parser.add_argument("--tokens-file", type=_values, metavar="FILE", help="JSON list of such lengths, drawn from")
    parser.add_argument("--max-tokens", type=float, help="no trajectory has more")
    parser.add_argument("--env", type=_distribution, metavar="MEAN[:STD]", help="of the environment, a trajectory")
    for name in ("token", "env"):
        parser.add_argument(
            f"--{name}-stragglers", type=_pair, metavar="SHARE:FACTOR", help="some take so much longer"
        )
    parser.add_argument("--train", type=float, help="of a step, beside sampling and sync")
    parser.add_argument("--sync", type=float, help="pause, new weights, resume")
    parser.add_argument("--staleness", type=int, help="bound of async, in steps")
    parser.add_argument(
        "--mode", choices=MODES, action="append", help="may be given several times; all of them if not"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _given(options: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``RunPlan`` that options name."""
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
        raise ValueError("no lengths")
    return Distribution(sum(values) / len(values), values=values)


def _print_table(plan: RunPlan, predictions: Sequence[Prediction], measured: dict[str, float]) -> None:
    print(
        f"{plan.gpus} GPUs: {plan.engines} engines x {plan.engine_gpus}, trainer {plan.trainer_gpus};"
        f" {plan.groups} prompts x {plan.samples} samples a step"
    )
    for row in (
        ("", "step", "speed", "trainer", "engines", "GPUs", "sync", "stale", "tokens/s"),
        ("", "s", "", "busy", "busy", "busy", "", "mean / max", "a GPU"),
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
