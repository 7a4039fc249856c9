"""What each process of a run waits for: ``skyrl-megatron diagnose RUN``

RUN is the folder of a run (log_path/project_name/run_name) that is under way. Prints of every process of it (trainer,
ranks, engines) what its main thread waits for, its Python stack, and the last lines of its log: of this host, and with
RAY_ADDRESS, as the run was started with, of every host of that cluster. Reading stacks needs the rights of a debugger:
the same user, and in containers the capability SYS_PTRACE.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_megatron.entrypoints.command import run_command
from skyrl_megatron.errors import LaunchError

LOG_LINES = 5
HOST_S = 120.0
"""How long a host may take to look at its processes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run that is under way")
    parser.add_argument("--lines", type=int, default=LOG_LINES, help=f"of each log (default {LOG_LINES})")
    args = parser.parse_args(argv)

    def work() -> int:
        run = args.run.expanduser().resolve()
        if address := os.environ.get("RAY_ADDRESS"):
            return _on_every_host(address, run, args.lines)
        print("\n".join(of_this_host(run, args.lines)))
        return 0

    return run_command(work)


def of_this_host(run: Path, lines: int) -> list[str]:
    """Return what there is to say of a run's processes here. Raises LaunchError where there are none."""
    from skyrl_megatron.trainer.hang import diagnose, report

    return report(diagnose(run), run, lines)


def _on_every_host(address: str, run: Path, lines: int) -> int:
    """Print it of every host of a cluster; one that does not answer is told, and so is one without processes. Returns
    1 when no host has any."""
    import ray

    from skyrl_megatron.workers.nodes import start_on_nodes
    from skyrl_megatron.workers.processes import joined_environment
    from skyrl_megatron.workers.ray_setup import join

    join(address, joined_environment())
    try:
        found = 0
        asked = start_on_nodes([node for node in ray.nodes() if node["Alive"]], of_this_host, run, lines)
        for node, answer in asked.items():
            print(f"━━ host {node}")
            try:
                print("\n".join(ray.get(answer, timeout=HOST_S)))
                found += 1
            except ray.exceptions.RayTaskError as error:
                print(error.cause if isinstance(error.cause, LaunchError) else error)
            except ray.exceptions.GetTimeoutError:
                print(f"no answer within {HOST_S:.0f} s: the host is down, or Ray hangs there")
            except ray.exceptions.RayError as error:
                print(f"no answer: {str(error).splitlines()[0]}")
        return int(not found)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
