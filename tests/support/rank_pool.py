"""A pool of rank processes for multi-process tests, forked from a server that has paid the imports; process groups are
made anew for each test.

A test body is a module-level function whose imports of torch, megatron, … are inside it::

    def tp2_body(path):            # runs on every rank, after torch.distributed is initialised
        import torch.distributed as dist
        return dist.get_rank()

    def test_tp2(ranks, path):
        assert ranks(2, tp2_body, path) == [0, 1]

When one rank raises, the others may be waiting in a collective: they are killed, and the error carries the traceback
of the first rank that failed. Nothing waits without a deadline.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support import forked

POOL_SIZE = 4
MOST_THREADS = 300
"""Of a rank between two tests. Process groups have some that wake every 10 ms; hundreds take a third of a core for as
long as the suite runs."""


class RankFailure(AssertionError):
    """A rank of a test body raised, died, or did not answer in time."""


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def lasting_port() -> int:
    """A free TCP port of the loopback interface below those that Linux gives out by itself: it stays free for long."""
    for port in random.sample(range(32000, 32768), 768):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port from 32000 to 32767 is free")


def _serve(connection: Connection) -> None:
    """Run test bodies one after the other in this rank process, until the pipe closes."""
    import faulthandler

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    for name in forked.IMPORTED:
        importlib.import_module(name)  # there already, except for GPUs
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # the million objects of the imports: else each collection between two tests takes half a second
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", _run_job(*job)))
        except BaseException:
            connection.send(("error", traceback.format_exc()))


def _run_job(
    rank: int, world_size: int, port: int, timeout_s: float, body: Callable[..., Any], args: tuple, kwargs: dict
) -> Any:
    import datetime

    import torch
    import torch.distributed as dist

    from skyrl_megatron import device

    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    device.set_local_device(rank)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, datetime.timedelta(seconds=timeout_s))
    dist.init_process_group(
        device.collective_backend(),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    result = body(*args, **kwargs)
    dist.barrier()
    # Only now: after an error the process is killed, and its groups stay open until its own report is out.
    _end_groups(world=True)
    gc.collect()
    return result


def end_layout() -> None:
    """End the groups of a layout within a test body that makes several. Every rank calls it.

    Megatron only forgets them: each would keep its threads, and hundreds of groups keep the cores busy with waking.
    """
    import torch.distributed as dist

    dist.barrier()
    _end_groups()


def _end_groups(**options: bool) -> None:
    """Call the runtime's ``end_groups``, and free all groups at once.

    The thread of a gloo group looks every 10 ms whether it is to end. One by one, the 20 groups of a layout take as
    long as the rest of a small test.
    """
    import torch.distributed as dist

    from skyrl_megatron.runtime.parallel_state import end_groups

    groups = list(dist.distributed_c10d._world.pg_map)
    end_groups(**options)
    threads = [threading.Thread(target=groups.pop) for _ in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _threads(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


class RankPool:
    """Up to :data:`POOL_SIZE` persistent rank processes. ``pool(world_size, body, *args)`` → one result per rank."""

    def __init__(self) -> None:
        self._context = forked.context()
        self._ranks: list[tuple[Any, Connection]] = []

    def __call__(
        self, world_size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 180.0, **kwargs: Any
    ) -> list[Any]:
        if not 1 <= world_size <= POOL_SIZE:
            raise ValueError(f"world_size={world_size}: the pool has {POOL_SIZE} ranks")
        self._grow(world_size)
        port = lasting_port()  # a free one of Linux's own may be given to a connection before rank 0 listens
        pipes = [connection for _, connection in self._ranks[:world_size]]
        for rank, pipe in enumerate(pipes):
            pipe.send((rank, world_size, port, timeout_s, body, args, kwargs))
        results = self._collect(pipes, body, timeout_s + 60.0)
        if any(_threads(process.pid) > MOST_THREADS for process, _ in self._ranks):
            self._kill()
        return results

    def close(self) -> None:
        """End every rank process."""
        for process, connection in self._ranks:
            connection.close()
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks.clear()

    def _grow(self, count: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        while len(self._ranks) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, pipes: list[Connection], body: Callable[..., Any], timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
        name = f"{body.__module__}.{body.__qualname__}"
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                for rank in late:  # each writes its stacks to stderr
                    os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
                time.sleep(1.0)
                self._kill()
                raise RankFailure(f"{name}: ranks {late} did not answer within {timeout_s:.0f} s (stacks above)")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    status, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    status, value = "error", "the process died (see stderr above)"
                if status == "error":
                    self._kill()
                    raise RankFailure(f"{name} failed on rank {rank} of {len(pipes)}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(pipes))]

    def _kill(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks.clear()
