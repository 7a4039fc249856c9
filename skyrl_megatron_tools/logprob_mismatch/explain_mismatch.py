"""Explain a log-prob mismatch between trainer and engine: ``skyrl-megatron explain-mismatch RUN --step N``

RUN is the folder of a run (log_path/project_name/run_name) with ``trainer.dump_data_batch=true``. The command builds
the policy in the run's layout and one eager engine. It loads the weights that step N was sampled with into both, and
recomputes the recorded samples. It prints the differences between the recorded, the engine's and the trainer's
log-probs, the first layer and token that differ, and the cause: routes, sampling support, precision, stale version or
wrong weight. docs/guides/routing-replay.md has an example.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.command import redirect_stderr, run_command
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron_tools.logprob_mismatch.diagnosis import ComputeMode
from skyrl_megatron_tools.logprob_mismatch.recorded import checkpoints, read_step, run_config

if TYPE_CHECKING:
    from skyrl_megatron_tools.logprob_mismatch.measure import MismatchReport


def lines(explained: MismatchReport) -> list[str]:
    """Return the lines that the command prints."""
    evidence, verdict = explained.evidence, explained.verdict
    gap, divergence = evidence.ways[evidence.used], verdict.place
    nearest = "" if evidence.loaded == evidence.wanted else f", the nearest checkpoint to {evidence.wanted}"
    table = {f"recorded − trainer, {_mode_name(evidence.used)} (as in the run)": gap}
    table |= {
        f"recorded − trainer, {_mode_name(mode)}": other
        for mode, other in evidence.ways.items()
        if mode != evidence.used
    }
    table["engine now − trainer, engine experts"] = evidence.now
    table |= {f"recorded − trainer, version {name}": other for name, other in evidence.versions.items()}
    width = max(map(len, table))
    out = [
        f"step {explained.step} · weights of version {evidence.loaded}{nearest} · {len(explained.uids)} of "
        f"{explained.samples} samples, those with the largest mismatch",
        "",
        f"{'log-probs, nats':{width}}      mean   largest",
        *(f"{name:{width}}{diff.mean:>10.1e}{diff.largest:>10.1e}" for name, diff in table.items()),
    ]
    uid = explained.uids[gap.row]
    out += ["", f"largest mismatch: {gap.largest:.1e}, uid {uid}, response token {gap.token}"]
    if divergence is not None:
        token = "" if divergence.token is None else f", token {divergence.token} of uid {explained.uids[0]}"
        out += [f"first difference: {divergence.where}{token}: {divergence.size:.1e}"]
    elif verdict.cause != "none":
        out += ["first difference: none, engine and trainer now agree in every layer"]
    out += [f"cause: {verdict.cause}", *(f"  {reason}" for reason in verdict.why)]
    return out


def as_json(explained: MismatchReport) -> dict[str, Any]:
    """Return all measurements of a step as JSON values."""
    evidence, verdict = explained.evidence, explained.verdict
    apart = {
        name: {layer: float(values.max()) for layer, values in layers.apart.items()}
        for name, layers in (
            ("in_the_runs_way", evidence.layers_used),
            ("with_the_engines_experts", evidence.layers_same),
        )
    }
    plain = {
        "step": explained.step,
        "cause": verdict.cause,
        "why": verdict.why,
        "place": None if verdict.place is None else dataclasses.asdict(verdict.place),
        "uids": explained.uids,
        "used": evidence.used._asdict(),
        "ways": [way._asdict() | dataclasses.asdict(gap) for way, gap in evidence.ways.items()],
        "now": dataclasses.asdict(evidence.now),
        "versions": {name: dataclasses.asdict(gap) for name, gap in evidence.versions.items()},
        "largest_relative_difference_by_layer": apart,
    }
    kept = ("wanted", "loaded", "dtypes", "exact", "rounding", "sampled_by", "probe", "tensors")
    plain |= {name: getattr(evidence, name) for name in kept}
    for name in ("recorded_routes", "natural_routes"):
        diff = getattr(evidence, name)
        plain[name] = None if diff is None else dataclasses.asdict(diff)
    return plain


def _mode_name(mode: ComputeMode) -> str:
    return f"{mode.routes} experts, {mode.support} support" if mode.support != "whole" else f"{mode.routes} experts"


SAMPLES = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code: 0 explained, 1 failed, 2 the step cannot be replayed."""
    parser = argparse.ArgumentParser(
        prog="explain-mismatch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--step", type=int, nargs="+", required=True, metavar="N", help="training steps, from 1")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help=f"samples per step, the worst ones (default {SAMPLES})"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all measurements to FILE, one object per step"
    )
    args = parser.parse_args(argv)

    def work() -> int:
        cfg = run_config(args.run)
        reports = explain(cfg, args.step, args.run / "explain_gap", args.samples)
        print("\n\n".join("\n".join(lines(report)) for report in reports))
        if args.json is not None:
            args.json.write_text(json.dumps([as_json(report) for report in reports], indent=1) + "\n")
        return 0

    return run_command(work)


def explain(
    cfg: SkyRLTrainConfig, steps: Sequence[int], logs: Path, samples: int = SAMPLES, say: Callable[[str], None] = print
) -> list[MismatchReport]:
    """Explain steps of a run, in ascending order.

    ``cfg``: from :func:`run_config`. ``logs``: a folder for the output of ranks and engine. Raises ConfigError for a
    step that was not dumped, before anything starts.
    """
    import ray

    from skyrl_megatron.plugins import load_plugins
    from skyrl_megatron.progress import heartbeat
    from skyrl_megatron.workers.ray_setup import initialize_ray
    from skyrl_megatron_tools.logprob_mismatch.measure import MismatchMeasurement
    from skyrl_megatron_tools.logprob_mismatch.replay import Replay

    recorded = [read_step(cfg, step) for step in sorted(set(steps))]
    load_plugins(cfg.trainer.plugins)
    folders = checkpoints(cfg)
    with redirect_stderr(logs / "console.log"), heartbeat(say):
        initialize_ray(cfg, log_to_driver=False)
        try:
            with Replay(cfg, logs, say) as replay:
                measurements = [MismatchMeasurement(replay, of_step, folders, samples) for of_step in recorded]
                for measurement in measurements:
                    measurement.measure_initial()
                return [measurement.explain() for measurement in measurements]
        finally:
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
