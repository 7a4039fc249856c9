"""Real Megatron ranks as ``TrainerRank`` (``workers/sync_calls.py``), in the processes of the rank pool."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, ClassVar

from tests.support.rank_pool import RankFailure
from tests.weight_sync.trainer_process import FaultySender

ANSWER_S = 120.0


def serve(kind: type[Rank], folder: Path, world: int, layout: dict[str, Any], sockets: str, bucket_bytes: int) -> None:
    """Body of a rank: build the model in ``layout``, then answer (method, arguments) until None comes."""
    import torch.distributed as dist

    rank = kind(folder, world, layout, bucket_bytes)
    with Listener(f"{sockets}/{dist.get_rank()}") as listener, listener.accept() as pipe:
        while (call := pipe.recv()) is not None:
            method, *arguments = call
            try:
                pipe.send(getattr(rank, method)(*arguments))
            except Exception as error:
                pipe.send(error)


class Rank:
    """One rank's policy, with folders read into it and written from it."""

    overrides: ClassVar[dict[str, Any]] = {}
    """Of its configuration, where a layout brings none."""
    transport: ClassVar[str | None] = None
    """What carries its weights, where that is not the usual."""

    def __init__(self, folder: Path, world: int, layout: dict[str, Any], bucket_bytes: int) -> None:
        from skyrl_megatron.runtime.engine import MegatronEngine
        from tests.training.bodies import config

        self.engine = MegatronEngine(config(folder, world=world, **{"overrides": self.overrides, **layout}))
        self.bucket_bytes = bucket_bytes

    def load(self, folder: Path) -> None:
        from skyrl_megatron.runtime.hf_weights import load_hf

        load_hf(self.engine.model, folder, self.engine.groups)

    def export(self, folder: Path) -> None:
        from skyrl_megatron.runtime.hf_weights import save_hf

        save_hf(self.engine.model, self.engine.groups, folder)

    def source(self):
        from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource

        return MegatronWeightSource(self.engine.model, self.engine.groups)

    def weight_metadata(self):
        self.sender = FaultySender(self.source(), self.bucket_bytes, transport=self.transport)
        return list(self.sender.metadata())

    def plant(self, fault: str) -> None:
        self.sender.fault = fault

    def listen_for_engines(self):
        self.address = self.sender.listen("127.0.0.1")
        return self.address

    def connect_engines(self, receivers, timeout_s):
        self.sender.connect(*self.address, receivers, timeout_s)

    def join_engines(self, *arguments):
        return self.sender.join(*arguments)

    def weight_source_map(self):
        return self.sender.source_map()

    def set_transfers(self, *arguments):
        self.sender.set_transfers(*arguments)

    def send_weights(self):
        return self.sender.send()

    def score(self, token_ids, perturbation):
        from skyrl_megatron.runtime.scoring import score_tokens

        return score_tokens(self.engine, token_ids, perturbation=perturbation)


class SharingRank(Rank):
    """A rank that shares its device with a worker of an engine."""

    transport = "ipc"


class MegatronRanks:
    """A model in a layout, until the ``with`` block ends. ``handles``: one ``TrainerRank`` per rank; ``kind``: of the
    ranks; ``timeout_s``: how long the block may take."""

    def __init__(
        self,
        pool,
        folder: Path,
        world: int,
        layout: dict[str, Any],
        bucket_bytes: int,
        *,
        kind: type[Rank] = Rank,
        timeout_s: float = 180.0,
    ) -> None:
        self._sockets = tempfile.mkdtemp(prefix="ranks")
        self._thread = ThreadPoolExecutor(1)
        self._run = self._thread.submit(
            pool, world, serve, kind, folder, world, layout, self._sockets, bucket_bytes, timeout_s=timeout_s
        )
        self._world, self.folder = world, folder
        self.may_die = False
        """Whether it is no failure of the test when a rank's process ends."""

    def __enter__(self) -> MegatronRanks:
        self.handles = [Handle(self._pipe(rank)) for rank in range(self._world)]
        return self

    def __exit__(self, *exception) -> None:
        for handle in self.handles:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                handle.pipe.send(None)
        with contextlib.suppress(RankFailure) if self.may_die else contextlib.nullcontext():
            self._run.result(60)
        self._thread.shutdown()
        shutil.rmtree(self._sockets)

    def together(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks at once."""

        async def call():
            return await asyncio.gather(*(handle(method, *arguments) for handle in self.handles))

        return asyncio.run(call())

    def _pipe(self, rank: int):
        path, deadline = Path(self._sockets) / str(rank), time.monotonic() + ANSWER_S
        while True:
            try:
                return Client(str(path))
            except (FileNotFoundError, ConnectionRefusedError):  # no socket yet, or one that does not listen yet
                if self._run.done():
                    self._run.result()
                assert time.monotonic() < deadline, f"rank {rank} did not build its model"
                time.sleep(0.02)


class Handle:
    """One rank as the weight sync calls it."""

    def __init__(self, pipe) -> None:
        self.pipe = pipe

    async def __call__(self, method: str, *arguments: Any) -> Any:
        answer = await asyncio.to_thread(self._ask, method, *arguments)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def weight_metadata(self):
        return await self("weight_metadata")

    async def listen_for_engines(self):
        return await self("listen_for_engines")

    async def connect_engines(self, receivers, timeout_s):
        await self("connect_engines", receivers, timeout_s)

    async def join_engines(self, *arguments):
        return await self("join_engines", *arguments)

    async def weight_source_map(self):
        return await self("weight_source_map")

    async def set_transfers(self, *arguments):
        await self("set_transfers", *arguments)

    async def send_weights(self, *adapters):
        return await self("send_weights", *adapters)

    async def score(self, token_ids, *, perturbation=0.0, **adapter):
        return await self("score", list(token_ids), perturbation, *adapter.values())

    async def offload(self, parts):
        raise AssertionError("nobody shares a GPU")

    def _ask(self, *call: Any) -> Any:
        from skyrl_megatron.errors import DistributedError

        try:
            self.pipe.send(call)
            assert self.pipe.poll(ANSWER_S), f"a rank does not answer {call[0]}"
            return self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise DistributedError("the process of a rank is gone") from error
