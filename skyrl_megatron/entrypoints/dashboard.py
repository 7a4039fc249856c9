"""Look at runs, while they go and afterwards: ``python -m skyrl_megatron.dashboard RUN [RUN …]``

RUN is the folder of a run (log_path/project_name/run_name). Serves a page on the loopback interface and prints its
address, which holds a token; --export writes the same as one file that needs nothing else. Several runs are drawn in
the same curves, with what differs in their configurations. From another machine: ``ssh -L 8265:127.0.0.1:8265 HOST``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.entrypoints.command import run_command
from skyrl_megatron.errors import LaunchError

if TYPE_CHECKING:
    from skyrl_megatron.trainer.dashboard.reading import RunReader


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: any that is free)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one file instead of serving")
    args = parser.parse_args(argv)

    def work() -> int:
        from skyrl_megatron.trainer.dashboard.reading import RunReader

        runs = [RunReader(folder) for folder in args.run]
        for run in runs:
            run.refresh()
        return _export(runs, args.export) if args.export else _serve(runs, args.port)

    return run_command(work)


def _export(runs: Sequence[RunReader], path: Path) -> int:
    from skyrl_megatron.trainer.dashboard.page import write_page

    try:
        size = write_page(runs, path)
    except OSError as error:
        raise LaunchError(f"--export={path}: cannot be written ({error}); choose another file") from error
    print(f"{path}: {size / 1e6:.1f} MB, {sum(run.columns.rows for run in runs)} lines of metrics")
    return 0


def _serve(runs: Sequence[RunReader], port: int) -> int:
    from skyrl_megatron.trainer.dashboard.server import DashboardServer

    with DashboardServer(runs, port) as server:
        print(f"dashboard: {server.url}\nCtrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
