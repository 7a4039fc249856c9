"""Show what each process of a run waits for: ``skyrl-megatron diagnose RUN``

RUN is the folder of a running run (log_path/project_name/run_name). For each of its processes (trainer, ranks,
engines), the command prints what the main thread waits for, its Python stack, and the last lines of its log. It covers
this host. If RAY_ADDRESS is set to the run's cluster, it covers every host of that cluster. Reading stacks needs the
rights of a debugger: the same user, and the capability SYS_PTRACE in containers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_megatron.command import run_command
from skyrl_megatron.errors import LaunchError

LOG_LINES = 5
HOST_S = 120.0
"""How long a host may take to inspect its processes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a running run")
    parser.add_argument("--lines", type=int, default=LOG_LINES, help=f"lines of each log (default {LOG_LINES})")
    args = parser.parse_args(argv)

    def work() -> int:
        run = args.run.expanduser().resolve()
        if address := os.environ.get("RAY_ADDRESS"):
            return _on_every_host(address, run, args.lines)
        print("\n".join(of_this_host(run, args.lines)))
        return 0

    return run_command(work)


def of_this_host(run: Path, lines: int) -> list[str]:
    """Return the report about a run's processes on this host. Raises LaunchError if there are none."""
    from skyrl_megatron_observe.hang import diagnose, report

    return report(diagnose(run), run, lines)


def _on_every_host(address: str, run: Path, lines: int) -> int:
    """Print the report of every host of a cluster, or why a host has none. Return 1 if no host has processes."""
    import ray

    from skyrl_megatron.workers.nodes import start_on_nodes
    from skyrl_megatron.workers.ray_setup import join
    from skyrl_megatron.workers.runtime_env import joined_environment

    join(address, joined_environment())
    try:
        answered = 0
        reports = start_on_nodes([node for node in ray.nodes() if node["Alive"]], of_this_host, run, lines)
        for node, answer in reports.items():
            print(f"━━ host {node}")
            try:
                print("\n".join(ray.get(answer, timeout=HOST_S)))
                answered += 1
            except ray.exceptions.RayTaskError as error:
                print(error.cause if isinstance(error.cause, LaunchError) else error)
            except ray.exceptions.GetTimeoutError:
                print(f"no answer within {HOST_S:.0f} s: the host is down, or Ray hangs on it")
            except ray.exceptions.RayError as error:
                print(f"no answer: {str(error).splitlines()[0]}")
        return int(not answered)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
