"""``launch/ray_cluster.sh``: start, show or stop a Ray cluster, or run one command in it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from skyrl_megatron import progress as start_times
from skyrl_megatron.command import run_command
from skyrl_megatron.errors import LaunchError
from skyrl_megatron_tools.cluster.hosts import (
    FIRST_PORT,
    ClusterFolder,
    Ports,
    await_end,
    end_cluster,
    is_here,
    last_line,
    read_hosts,
    running,
    start_member,
)
from skyrl_megatron_tools.cluster.member import HostConfig, collected_signals, run_member, run_until_signalled

DEFAULT_FOLDER = Path("runs/cluster")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    return run_command(lambda: options.work(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="skyrl-megatron cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="{up,down,status,run}")
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("--dir", type=Path, default=DEFAULT_FOLDER, help="cluster folder, shared by all hosts")
    start = argparse.ArgumentParser(add_help=False)
    start.add_argument("--port", type=int, help=f"first of the cluster's 1000 ports (default {FIRST_PORT})")
    start.add_argument("--interface", help="network interface on every host (default: that of the host name)")
    start.add_argument(
        "--rails", metavar="NAMES", help="InfiniBand devices for NCCL: mlx5_0,mlx5_1 (default: NCCL's choice)"
    )
    start.add_argument(
        "--within", type=float, default=300.0, metavar="S", help="deadline for all hosts to join, in seconds"
    )
    start.add_argument(
        "--ray", action="append", default=[], metavar="OPTION", help="option for 'ray start', may be repeated"
    )
    hosts = argparse.ArgumentParser(add_help=False)
    hosts.add_argument(
        "--hosts", type=Path, metavar="FILE", help="file of ssh hosts, one per line (default: this host)"
    )
    up = commands.add_parser("up", parents=[folder, start, hosts], help="start Ray on every host")
    up.set_defaults(work=_up)
    run = commands.add_parser("run", parents=[folder, start, hosts], help="start Ray, run a command, stop Ray")
    run.add_argument("command", nargs=argparse.REMAINDER)
    run.set_defaults(work=_up_run_down)
    down = commands.add_parser("down", parents=[folder], help="stop the processes that 'up' started")
    down.set_defaults(work=_down)
    status = commands.add_parser("status", parents=[folder], help="list the hosts of the cluster")
    status.set_defaults(work=_status)
    member = commands.add_parser("member", parents=[folder, start], help="run one host of the cluster, for SLURM")
    member.add_argument("--number", type=int, default=os.environ.get("SLURM_PROCID", 0))
    member.add_argument("--of", type=int, default=os.environ.get("SLURM_NTASKS", 1))
    member.add_argument("command", nargs=argparse.REMAINDER)
    member.set_defaults(work=_member)
    return parser


def _member(options: argparse.Namespace) -> int:
    host = HostConfig(
        options.number,
        options.of,
        options.dir.absolute(),
        _ports(options),
        options.interface,
        options.within,
        tuple(options.ray),
        tuple(filter(None, (options.rails or "").split(","))),
    )
    return run_member(host, [word for word in options.command if word != "--"])


def _ports(options: argparse.Namespace) -> Ports:
    if options.port is not None:
        if not 1024 <= options.port <= 64535:
            raise LaunchError(f"--port {options.port}: give a port from 1024 to 64535")
        return Ports(options.port)
    return Ports.of_job(int(os.environ.get("SLURM_JOB_ID", 0)))


def _up(options: argparse.Namespace) -> int:
    folder = _bring_up(options)
    print("unset RAY_AUTH_TOKEN")
    print("\n".join(f"export {name}={value}" for name, value in folder.variables().items()))
    return 0


def _up_run_down(options: argparse.Namespace) -> int:
    command = [word for number, word in enumerate(options.command) if number or word != "--"]
    if not command:
        raise LaunchError("run: give a command after --, for example: run -- skyrl-megatron train key=value")
    folder = _bring_up(options)
    try:
        with collected_signals() as signals:
            environment = folder.environment() | start_times.marks_for_command("cluster")
            return run_until_signalled(command, environment, lambda: len(signals))
    finally:
        end_cluster(folder)


def _bring_up(options: argparse.Namespace) -> ClusterFolder:
    """Start the cluster on every host and wait until all have joined. On an error, stop all and raise LaunchError."""
    hosts = read_hosts(options.hosts) if options.hosts else ["localhost"]
    folder = ClusterFolder.make(options.dir.absolute())
    arguments = [f"--dir={folder.path}", f"--port={_ports(options).first}", f"--within={options.within}"]
    arguments += [f"--interface={options.interface}"] if options.interface else []
    arguments += [f"--rails={options.rails}"] if options.rails else []
    arguments += [f"--ray={option}" for option in options.ray]
    logs = [folder.path / f"member-{number}.log" for number in range(len(hosts))]
    started = [
        start_member(host, [*arguments, f"--number={number}", f"--of={len(hosts)}"], log)
        for number, (host, log) in enumerate(zip(hosts, logs, strict=True))
    ]
    begun = printed = time.monotonic()
    try:
        while len(folder.ready()) < len(hosts):
            for host, process, log in zip(hosts, started, logs, strict=True):
                if process.poll() is not None:
                    raise LaunchError(f"{host}: Ray did not start: {last_line(log)}; the whole log is {log}")
            now = time.monotonic()
            if now - begun > options.within + 10:
                raise LaunchError(f"not all hosts joined within {options.within:g} s; see the logs in {folder.path}")
            if now - printed > 20:
                printed = now
                print(f"… {len(folder.ready())} of {len(hosts)} hosts have joined", file=sys.stderr, flush=True)
            time.sleep(0.3)
    except BaseException:
        end_cluster(folder)
        await_end(started)
        raise
    return folder


def _down(options: argparse.Namespace) -> int:
    folder = ClusterFolder(options.dir.absolute())
    if not (folder.path / "token").exists():
        raise LaunchError(f"{folder.path}: no cluster was started in this folder; give its folder with --dir")
    if left := end_cluster(folder):
        raise LaunchError(f"still running: {', '.join(f'{each.host} (process {each.process})' for each in left)}")
    print("cluster: stopped")
    return 0


def _status(options: argparse.Namespace) -> int:
    folder = ClusterFolder(options.dir.absolute())
    head = folder.head()
    if head is None or folder.ended:
        print(f"{folder.path}: no cluster")
        return 1
    print(f"head: {head.host} at {head.ray_address}")
    for member in folder.members():
        gone = is_here(member.host) and running(member) is None
        state = "dead" if gone else f"process {member.process}"
        print(f"  {member.number}  {member.host}  {member.address}  {state}")
    for why in folder.failures():
        print(f"  {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
