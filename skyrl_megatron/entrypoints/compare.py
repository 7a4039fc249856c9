"""Hold a run against another: ``python -m skyrl_megatron.compare RUN BASELINE [METRIC=BAND …]``

BAND is the relative change that is allowed, of means over the last steps: ``eval/all/avg_score=0.02``. Without any,
reward, score, gap to the engine, balance of the experts and tokens a second are compared, where both runs have them.
Exit code 0 when every metric stays in its band, 1 when one leaves it (a change for the better never does), 2 when a
metric is missing or no number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_megatron.entrypoints.command import run_command
from skyrl_megatron.errors import ConfigError, Problem

LAST = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("baseline", type=Path, metavar="BASELINE", help="folder of the run to compare it with")
    parser.add_argument("bands", nargs="*", metavar="METRIC=BAND", help="what to compare, and how much it may change")
    parser.add_argument("--last", type=int, default=LAST, help=f"steps that means are taken over (default {LAST})")
    args = parser.parse_args(argv)

    def work() -> int:
        from skyrl_megatron.trainer.compare import compare, default_bands, table

        if args.last < 1:
            raise ConfigError([Problem("--last", args.last, "give at least 1")])
        bands = dict(map(_band, args.bands)) or default_bands(args.run, args.baseline)
        found = compare(args.run, args.baseline, bands, args.last)
        print("\n".join(table(found)))
        return int(any(each.leaves for each in found))

    return run_command(work)


def _band(text: str) -> tuple[str, float]:
    name, _, band = text.partition("=")
    try:
        allowed = float(band)
    except ValueError:
        allowed = -1.0
    if not 0 <= allowed:
        raise ConfigError([Problem(name, band, "give the relative change that is allowed, such as 0.05")])
    return name, allowed


if __name__ == "__main__":
    sys.exit(main())
