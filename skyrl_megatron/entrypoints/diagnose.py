"""What a run that hangs waits for: ``python -m skyrl_megatron.diagnose RUN``

RUN is the folder of a run (log_path/project_name/run_name) that is under way on this host. Prints of every process of
it (trainer, ranks, engines) what its main thread waits for, its Python stack, and the last lines of its log. Other
hosts of the run see their own processes: run it on each. Reading stacks needs the rights of a debugger: the same user,
and in containers the capability SYS_PTRACE.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_megatron.entrypoints.command import run_command

LOG_LINES = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run that is under way")
    parser.add_argument("--lines", type=int, default=LOG_LINES, help=f"of each log (default {LOG_LINES})")
    args = parser.parse_args(argv)

    def work() -> int:
        from skyrl_megatron.trainer.diagnosis import diagnose, report

        print("\n".join(report(diagnose(args.run), args.run, args.lines)))
        return 0

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
