"""Why trainer and engine disagree: ``python -m skyrl_megatron.explain_gap RUN --step N [N …]``

RUN is the folder of a run (log_path/project_name/run_name), whose ``trainer.dump_data_batch`` was on. Its policy is
built on the run's own layout beside one eager engine, both get the weights that step N was sampled with, and both
compute the recorded samples again. Printed are the gaps between all of them, the first layer and token that differ,
and the cause: routes, sampling support, precision, stale version or wrong weight. docs/guides/routing-replay.md has an
example.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.entrypoints.command import noise_into, run_command

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.entrypoints.gap.collect import Explained

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
        from skyrl_megatron.entrypoints.gap.recorded import run_config
        from skyrl_megatron.entrypoints.gap.report import as_json, lines

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

    from skyrl_megatron.entrypoints.gap.collect import Hearing
    from skyrl_megatron.entrypoints.gap.recorded import checkpoints, read_step
    from skyrl_megatron.entrypoints.gap.replay import Replay
    from skyrl_megatron.plugins import load_plugins
    from skyrl_megatron.progress import heartbeat
    from skyrl_megatron.workers.ray_setup import initialize_ray

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
