"""Weights of two trainer ranks for the two engine workers on their devices: on one host, and on two joined by a link.

    python benchmarks/run.py exchange [--rounds 5] [--gbits 10]

The ranks hold a 425 M-parameter MoE (850 MB bf16) with its experts split between them (ep=2); each worker needs all of
it. On one host a worker opens the memory of both ranks. On two hosts (network namespaces, joined by a link of
``--gbits`` in each direction) the ranks exchange what is not theirs first (``weight_sync/point_to_point.py``). Both in
one run: medians of the rounds, from the first byte until every worker has everything with its checksums, and what the
link carried, counted by the kernel, against what has to cross it. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.weight_sync import LARGE  # noqa: E402  # the model of the other figures

HOSTS = {"skyrl-x1": "10.77.42.1", "skyrl-x2": "10.77.42.2"}
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 120.0


# ----------------------------------------------------------------------------------------------- ranks and workers
class Rank:
    """A trainer rank with a shard of the model."""

    def __init__(self, number: int, address: str, folder: str, store: tuple[str, int]) -> None:
        import torch
        import torch.distributed as dist

        from skyrl_megatron.config.layout import ParallelConfig
        from skyrl_megatron.runtime import parallel_state
        from skyrl_megatron.runtime.model.build import build_model
        from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource
        from skyrl_megatron.weight_sync.sender import WeightSender

        self.address = address
        # what gloo binds to
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if address == LOOPBACK else "eth0"
        dist.init_process_group("gloo", store=dist.TCPStore(*store, 2, number == 0), rank=number, world_size=2)
        groups = parallel_state.initialize(ParallelConfig(world_size=2, ep=2))
        self.sender = WeightSender(
            MegatronWeightSource(build_model(folder, groups, dtype=torch.bfloat16), groups), transport="ipc"
        )

    def source_map(self) -> Any:
        return self.sender.source_map()

    def listen(self) -> Any:
        return self.sender.listen(self.address)

    def join(self, *arguments: Any) -> Any:
        return self.sender.join(*arguments)

    def send_by_plan(self, *arguments: Any) -> None:
        self.sender.set_transfers(*arguments)

    def run(self) -> list[list[int]]:
        return self.sender.send()


class Worker:
    """An engine worker whose memory is that of the tensors, one after the other."""

    def __init__(self, number: int, *_: Any) -> None:
        self.number = number

    def join(
        self, transfers: Any, memories: list[tuple[str, int]], numbers: dict[int, int], at: Any, size: int
    ) -> None:
        import torch

        from skyrl_megatron.weight_sync.point_to_point import SliceReceiver
        from skyrl_megatron.weight_sync.transport import open_transport

        self.memories = [torch.empty(elements, dtype=getattr(torch, dtype)) for dtype, elements in memories]
        dtypes = [memory.dtype for memory in self.memories]
        host, port = at.address
        transport = open_transport("ipc", host, port, at.number, at.size, TIMEOUT_S)
        self.receiver = SliceReceiver(transfers, transport, numbers, dtypes, size, torch.device("cpu"))

    def memory(self, target: int) -> Any:
        return self.memories[target]

    def complete(self, target: int) -> None:
        """Leave it as it is: no kernel packs it."""

    def run(self) -> list[list[int]]:
        self.receiver.receive(self)
        return self.receiver.checksums


def member(path: str, kind: str, number: int, address: str, folder: str, host: str, port: int) -> None:
    """Answer the calls of the main process."""
    with Client(path) as calls:
        calls.send((kind, number))
        role = (Rank if kind == "rank" else Worker)(number, address, folder, (host, port))
        calls.send(None)
        while (call := calls.recv()) is not None:
            method, *arguments = call
            try:
                calls.send(getattr(role, method)(*arguments))
            except Exception as error:
                calls.send(error)


class Members:
    """Ranks and workers on hosts (an address each): started, called side by side, and ended."""

    def __init__(self, folder: Path, hosts: Sequence[tuple[str, str]]) -> None:
        self.hosts = hosts
        with tempfile.TemporaryDirectory() as short, Listener(f"{short}/s") as listener:
            port = str(free_port())
            self._started = [
                subprocess.Popen(
                    [*(["ip", "netns", "exec", name] if name else []), sys.executable, __file__, "--member",
                     f"{short}/s", kind, str(number), address, str(folder), hosts[0][1], port]
                )
                for number, (name, address) in enumerate(hosts)
                for kind in ("rank", "worker")
            ]  # fmt: skip
            self.calls: dict[tuple[str, int], Connection] = {}
            for _ in self._started:
                connection = listener.accept()
                self.calls[connection.recv()] = connection
        for connection in self.calls.values():
            answer(connection)

    def call(self, calls: dict[tuple[str, int], tuple[Any, ...]]) -> dict[tuple[str, int], Any]:
        """Make these calls at once; return their answers."""
        for who, call in calls.items():
            self.calls[who].send(call)
        return {who: answer(self.calls[who]) for who in calls}

    def processor_seconds(self) -> dict[str, float]:
        """Seconds that all of them have computed so far, in user space and in the kernel (copies, TCP)."""
        import psutil

        times = [psutil.Process(process.pid).cpu_times() for process in self._started]
        return {"user": sum(each.user for each in times), "kernel": sum(each.system for each in times)}

    def end(self) -> None:
        for connection in self.calls.values():
            with contextlib.suppress(BrokenPipeError):
                connection.send(None)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def answer(connection: Connection) -> Any:
    if not connection.poll(TIMEOUT_S):
        raise SystemExit("a rank or worker does not answer")
    found = connection.recv()
    if isinstance(found, Exception):
        raise found
    return found


def free_port() -> int:
    import socket

    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


# ------------------------------------------------------------------------------------------------------ the two ways
def connected(members: Members, bucket_bytes: int, *, exchange: bool) -> tuple[int, int]:
    """Plan a sync and open its groups; return the bytes that workers get, and those that cross between the hosts."""
    from skyrl_megatron.weight_sync.point_to_point import plan_exchange
    from skyrl_megatron.weight_sync.reshard_plan import Colocation, plan_reshard
    from skyrl_megatron.weight_sync.slices import TargetMap, rows_of, tensors_of, width_of
    from skyrl_megatron.weight_sync.transport import GroupMember
    from skyrl_megatron.workers.sync_calls import WorkerPlan

    numbers = range(len(members.hosts))
    source_maps = list(members.call({("rank", n): ("source_map",) for n in numbers}).values())
    tensors = tensors_of(source_maps)
    shapes = [(rows_of(meta), width_of(meta.shape)) for meta in tensors]
    sizes = [rows * columns for rows, columns in shapes]
    memories = [(meta.dtype, size) for meta, size in zip(tensors, sizes, strict=True)]
    targets = [(meta.name, "weight", meta.dtype, size, -1) for meta, size in zip(tensors, sizes, strict=True)]
    rows = [(n, n, 0, rows, 0, columns, 0, columns, 1) for n, (rows, columns) in enumerate(shapes)]
    colocation = Colocation(numbers, 1) if exchange else None
    plan = plan_reshard(tensors, source_maps, [TargetMap.of(targets, rows)] * len(numbers), bucket_bytes, colocation)
    parts = plan_exchange(plan, tensors, numbers) if exchange else None
    addresses = members.call({("rank", n): ("listen",) for n in numbers})
    calls: dict[tuple[str, int], tuple[Any, ...]] = {}
    sends: dict[tuple[str, int], tuple[Any, ...]] = {}
    # workers are named by their number here, where the product has engines
    for ranks, workers in WorkerPlan(tensors, plan, [(None, n) for n in numbers], colocation).groups():  # type: ignore[misc]
        address, size = addresses["rank", ranks[0]], len(ranks) + len(workers)
        places = {worker: place for place, worker in enumerate(workers, start=len(ranks))}
        for number, rank in enumerate(ranks):
            calls["rank", rank] = ("join", GroupMember(address, number, len(ranks), size), TIMEOUT_S)
            part = () if parts is None else (parts[rank],)
            sends["rank", rank] = ("send_by_plan", *plan.ranks[rank].wire, places, *part)
        for worker, place in places.items():
            of_rank = {rank: 0 if exchange else ranks.index(rank) for rank in plan.workers[worker].peers}
            where = GroupMember(address, place, len(ranks), size)
            calls["worker", worker] = ("join", plan.workers[worker], memories, of_rank, where, bucket_bytes)
    members.call(calls)
    members.call(sends)
    crossing = sum(
        int(nbytes) for worker, each in enumerate(plan.workers) for rank, nbytes, *_ in each.buckets if rank != worker
    )
    return sum(each.nbytes for each in plan.workers), crossing


def synced(members: Members) -> float:
    """Seconds of one sync. Raises SystemExit when a worker has not got what was sent."""
    began = time.perf_counter()
    answers = members.call({who: ("run",) for who in members.calls})
    seconds = time.perf_counter() - began
    for (kind, worker), got in answers.items():
        if kind == "worker":
            for rank in {rank for rank, _ in got}:
                sent = [total for to, total in answers["rank", rank] if to == worker]
                if sent != [total for source, total in got if source == rank]:
                    raise SystemExit(f"worker {worker} has not got what rank {rank} sent")
    return seconds


@contextlib.contextmanager
def two_hosts(gbits: float) -> Iterator[None]:
    """Two network namespaces with a link of ``gbits`` in each direction."""
    one, other = HOSTS
    remove_hosts()
    try:
        for name in HOSTS:
            command("ip", "netns", "add", name)
        command("ip", "-n", one, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other)
        for name, address in HOSTS.items():
            command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                command("ip", "-n", name, "link", "set", link, "up")
            shaping = f"tc qdisc add dev eth0 root tbf rate {gbits}gbit burst 4mb latency 50ms"
            command("ip", "netns", "exec", name, *shaping.split())
        yield
    finally:
        remove_hosts()


def remove_hosts() -> None:
    for name in HOSTS:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def carried() -> int:
    """Bytes that the link has carried so far, both directions."""
    links = [json.loads(command("ip", "-n", name, "-j", "-s", "link", "show", "eth0"))[0] for name in HOSTS]
    return sum(int(link["stats64"]["tx"]["bytes"]) for link in links)


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gbits", type=float, default=10.0, help="of the link, in each direction")
    parser.add_argument("--bucket-mib", type=int, default=16)
    args = parse(parser, rounds=1)
    if os.getuid() != 0 or not shutil.which("ip"):
        raise SystemExit("network namespaces need root and iproute2")
    from tests.support.tiny_models import write_tiny_model

    bucket_bytes, found, link, crossing = args.bucket_mib << 20, {}, 0.0, 0
    busy: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as root, two_hosts(args.gbits):
        folder = write_tiny_model("qwen3_moe", Path(root) / "model", dtype="bfloat16", **({} if args.smoke else LARGE))
        for way, hosts in {"one host": [("", LOOPBACK)] * 2, "two hosts": list(HOSTS.items())}.items():
            members = Members(folder, hosts)
            try:
                nbytes, away = connected(members, bucket_bytes, exchange=way == "two hosts")
                synced(members)  # buckets are made
                before, began = carried(), members.processor_seconds()
                found[way] = statistics.median(synced(members) for _ in range(args.rounds))
                ended = members.processor_seconds()
                busy[way] = {kind: (ended[kind] - began[kind]) / args.rounds for kind in ended}
                if way == "two hosts":
                    link, crossing = (carried() - before) / args.rounds, away
            finally:
                members.end()
    print(f"{nbytes / 1e6:.0f} MB for two workers, in buckets of {args.bucket_mib} MiB")
    for way, seconds in found.items():
        used = busy[way]
        print(
            f"{way:33s} {seconds * 1e3:7.0f} ms   {nbytes / seconds / 1e6:6.0f} MB/s   processors "
            f"{used['user'] * 1e3:.0f} ms + kernel {used['kernel'] * 1e3:.0f} ms, at least "
            f"{sum(used.values()) / os.cpu_count() * 1e3:.0f} ms on {os.cpu_count()} cores"  # type: ignore[operator]
        )
    print(f"two hosts against one             {found['two hosts'] / found['one host']:7.2f} × (wanted: at most 1.15)")
    print(f"what has to cross the link        {crossing / 1e6:7.1f} MB = {crossing / nbytes:.2f} of all")
    print(f"what it carried                   {link / crossing:7.3f} × (wanted: at most 1.05, headers included)")
    wire = crossing / 2 / (args.gbits / 8 * 1e9)
    print(f"the link alone, both directions   {wire * 1e3:7.0f} ms at {args.gbits:g} Gbit/s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        path, kind, number, *rest = sys.argv[2:]
        *words, port = rest
        member(path, kind, int(number), *words, int(port))  # type: ignore[call-arg, arg-type]
    else:
        main()
