"""Explain why trainer and engine give the same tokens other log-probs: ``skyrl-megatron explain-mismatch RUN --step
N``

RUN is the folder of a run (log_path/project_name/run_name), whose ``trainer.dump_data_batch`` was on. Its policy is
built on the run's own layout beside one eager engine, both get the weights that step N was sampled with, and both
compute the recorded samples again. Printed are the gaps between all of them, the first layer and token that differ,
and the cause: routes, sampling support, precision, stale version or wrong weight. docs/guides/routing-replay.md has an
example.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.entrypoints.command import noise_into, run_command
from skyrl_megatron_tools.logprob_mismatch.diagnosis import (
    Way,
)
from skyrl_megatron_tools.logprob_mismatch.recorded import checkpoints, read_step, run_config

if TYPE_CHECKING:
    from skyrl_megatron_tools.logprob_mismatch.measure import Explained


def lines(explained: Explained) -> list[str]:
    """Return what the command prints."""
    known, verdict = explained.evidence, explained.verdict
    gap, place = known.ways[known.used], verdict.place
    nearest = "" if known.loaded == known.wanted else f", the nearest that is kept to {known.wanted}"
    table = {f"record − trainer, {_way(known.used)} (the run's way)": gap}
    table |= {f"record − trainer, {_way(way)}": other for way, other in known.ways.items() if way != known.used}
    table["engine now − trainer, engine experts"] = known.now
    table |= {f"record − trainer, version {name}": other for name, other in known.versions.items()}
    width = max(map(len, table))
    out = [
        f"step {explained.step} · weights of version {known.loaded}{nearest} · {len(explained.uids)} of "
        f"{explained.samples} samples, those with the largest gaps",
        "",
        f"{'log-probs, nats':{width}}      mean   largest",
        *(f"{name:{width}}{each.mean:>10.1e}{each.largest:>10.1e}" for name, each in table.items()),
    ]
    uid = explained.uids[gap.row]
    out += ["", f"largest gap: {gap.largest:.1e}, uid {uid}, response token {gap.token}"]
    if place is not None:
        token = "" if place.token is None else f", token {place.token} of uid {explained.uids[0]}"
        out += [f"first parting: {place.where}{token}: {place.size:.1e}"]
    elif verdict.cause != "none":
        out += ["first parting: none, engine and trainer agree now in every layer"]
    out += [f"cause: {verdict.cause}", *(f"  {reason}" for reason in verdict.why)]
    return out


def as_json(explained: Explained) -> dict[str, Any]:
    """Return everything that is known of a step, as plain values."""
    known, verdict = explained.evidence, explained.verdict
    apart = {
        name: {place: float(values.max()) for place, values in layers.apart.items()}
        for name, layers in (("in_the_runs_way", known.layers_used), ("with_the_engines_experts", known.layers_same))
    }
    plain = {
        "step": explained.step,
        "cause": verdict.cause,
        "why": verdict.why,
        "place": None if verdict.place is None else dataclasses.asdict(verdict.place),
        "uids": explained.uids,
        "used": known.used._asdict(),
        "ways": [way._asdict() | dataclasses.asdict(gap) for way, gap in known.ways.items()],
        "now": dataclasses.asdict(known.now),
        "versions": {name: dataclasses.asdict(gap) for name, gap in known.versions.items()},
        "largest_relative_difference_by_layer": apart,
    }
    kept = ("wanted", "loaded", "dtypes", "exact", "rounding", "sampled_by", "probe", "tensors")
    plain |= {name: getattr(known, name) for name in kept}
    for name in ("recorded_routes", "natural_routes"):
        diff = getattr(known, name)
        plain[name] = None if diff is None else dataclasses.asdict(diff)
    return plain


def _way(way: Way) -> str:
    return f"{way.routes} experts, {way.support} support" if way.support != "whole" else f"{way.routes} experts"


SAMPLES = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (0 explained, 1 failed, 2 there is nothing to explain it from)."""
    parser = argparse.ArgumentParser(
        prog="explain_gap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--step", type=int, nargs="+", required=True, metavar="N", help="training steps, from 1")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help=f"of a step, those with the largest gaps (default {SAMPLES})"
    )
    parser.add_argument("--json", type=Path, help="a file for everything that is known, one object a step")
    args = parser.parse_args(argv)

    def work() -> int:

        cfg = run_config(args.run)
        found = explain(cfg, args.step, args.run / "explain_gap", args.samples)
        print("\n\n".join("\n".join(lines(each)) for each in found))
        if args.json is not None:
            args.json.write_text(json.dumps([as_json(each) for each in found], indent=1) + "\n")
        return 0

    return run_command(work)


def explain(
    cfg: SkyRLTrainConfig, steps: Sequence[int], logs: Path, samples: int = SAMPLES, say: Callable[[str], None] = print
) -> list[Explained]:
    """Explain some steps of a run, in ascending order. ``cfg``: as :func:`run_config` leaves it. ``logs``: a folder
    for what both sides print. Raises ConfigError for a step that was not dumped, before anything starts."""
    import ray

    from skyrl_megatron.plugins import load_plugins
    from skyrl_megatron.progress import heartbeat
    from skyrl_megatron.workers.ray_setup import initialize_ray
    from skyrl_megatron_tools.logprob_mismatch.measure import Hearing
    from skyrl_megatron_tools.logprob_mismatch.replay import Replay

    recorded = [read_step(cfg, step) for step in sorted(set(steps))]
    load_plugins(cfg.trainer.plugins)
    folders = checkpoints(cfg)
    with noise_into(logs / "console.log"), heartbeat(say):
        initialize_ray(cfg, log_to_driver=False)
        try:
            with Replay(cfg, logs, say) as replay:
                hearings = [Hearing(replay, each, folders, samples) for each in recorded]
                for hearing in hearings:
                    hearing.hear_initial()
                return [hearing.explain() for hearing in hearings]
        finally:
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
