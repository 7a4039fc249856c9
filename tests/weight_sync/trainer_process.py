"""A trainer rank in a process of its own: a real sender of a folder's tensors, with mistakes that can be planted."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from tests.support import forked

BUCKET_BYTES = 1 << 17  # smaller than the largest tensor of the tiny models


def serve(connection, transport: str | None) -> None:
    """Answer (method, arguments) until the pipe closes; an error is sent back as it is."""
    import torch
    from safetensors.torch import load_file

    from skyrl_megatron.device import set_local_device
    from tests.support.state_source import StateSource

    torch.set_num_threads(1)
    where = "cpu" if transport is None else str(set_local_device(torch.cuda.device_count() - 1))
    sender, address = None, ("", 0)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            if method == "load":
                folder, fault = arguments
                tensors = load_file(f"{folder}/model.safetensors", device=where)
                if sender is not None:
                    sender.close()
                sender = FaultySender(StateSource(with_fault(tensors, fault)), BUCKET_BYTES, transport)
                sender.fault, answer = fault, None
            elif method == "metadata":
                answer = list(sender.metadata())
            elif method == "listen":
                answer = address = sender.listen("127.0.0.1")
            elif method == "connect":
                answer = sender.connect(*address, *arguments)
            elif method == "join":
                answer = sender.join(*arguments)
            elif method == "holdings":
                answer = sender.source_map()
            elif method == "route":
                answer = sender.set_transfers(*arguments)
            elif method == "send":
                answer = sender.send()
            connection.send(answer)
        except Exception as error:
            connection.send(error)


def with_fault(tensors: dict, fault: str | None) -> dict:
    """Mistakes in what is sent."""
    if fault == "a tensor is missing":
        tensors.pop("model.layers.2.mlp.experts.5.down_proj.weight")
    if fault == "a tensor is misnamed":
        tensors["model.layers.1.mlp.experts.3.gate.weight"] = tensors.pop(
            "model.layers.1.mlp.experts.3.gate_proj.weight"
        )
    if fault == "two experts are swapped":
        for kind in ("gate_proj", "up_proj", "down_proj"):
            one, two = (f"model.layers.1.mlp.experts.{expert}.{kind}.weight" for expert in (2, 3))
            tensors[one], tensors[two] = tensors[two], tensors[one]
    if fault == "a tensor has another shape":
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name][:-32].clone()
    return tensors


def FaultySender(source, bucket_bytes, transport=None):
    """A sender whose ``fault`` can be set."""
    from dataclasses import replace

    import numpy as np

    from skyrl_megatron.weight_sync.sender import WeightSender

    class Sender(WeightSender):
        """Mistakes on the way."""

        fault: str | None = None

        def source_map(self):
            found = super().source_map()
            largest = int(found.slices[:, 2].argmax())
            if self.fault == "a row without an owner":
                found.slices[largest, 2] -= 1
            if self.fault == "a row with two owners":
                extra = found.slices[largest].copy()
                extra[1:3] = 1, 2
                found = replace(found, slices=np.concatenate([found.slices, extra[None]]))
            return found

        def _send(self, transport):
            if transport is None:
                return super()._send(transport)
            return self._faulty(super()._send, transport, "broadcast", len(self._current_plan().buckets))

        def _send_slices(self, transport):
            if transport is None:
                return super()._send_slices(transport)
            return self._faulty(super()._send_slices, transport, "send", len(self._transfers[0].buckets))

        def _faulty(self, sending, transport, method, last):
            really, sent = getattr(transport, method), 0

            def faulty(buffer, *rest):
                nonlocal sent
                sent += 1
                if sent == 3 and self.fault == "a byte flips on the way":
                    buffer[len(buffer) // 2] ^= 0x40  # after its checksum was taken
                if sent == 3 and self.fault == "the trainer dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if sent == 3 and self.fault and self.fault.startswith("signal"):
                    _, number, process = self.fault.split()
                    os.kill(int(process), int(number))
                    self.fault = None
                if sent == last and self.fault == "the last bucket is skipped":
                    return lambda: None
                return really(buffer, *rest)

            setattr(transport, method, faulty)
            try:
                return sending(transport)
            finally:
                setattr(transport, method, really)

    return Sender(source, bucket_bytes=bucket_bytes, transport=transport)


class TrainerProcess:
    """A ``TrainerRank`` (``workers/sync_calls.py``) in a process. :meth:`load` chooses what it sends.

    ``transport``: of GPUs, where it then has its weights, on the last one.
    """

    def __init__(self, transport: str | None = None) -> None:
        self.folder: Any = None
        self.transport = transport
        self.start()

    def start(self) -> None:
        """The process; a new one, if there was one before."""
        context = forked.context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.transport), daemon=True)
        self.process.start()
        theirs.close()

    def load(self, folder, fault: str | None = None) -> None:
        self.folder = folder
        self._ask("load", str(folder), fault)

    def close(self) -> None:
        self._pipe.close()
        self.process.join(10)
        self.process.kill()

    async def weight_metadata(self):
        return await asyncio.to_thread(self._ask, "metadata")

    async def listen_for_engines(self):
        return await asyncio.to_thread(self._ask, "listen")

    async def connect_engines(self, receivers, timeout_s):
        await asyncio.to_thread(self._ask, "connect", receivers, timeout_s)

    async def join_engines(self, *arguments):
        return await asyncio.to_thread(self._ask, "join", *arguments)

    async def weight_source_map(self):
        return await asyncio.to_thread(self._ask, "holdings")

    async def set_transfers(self, *arguments):
        await asyncio.to_thread(self._ask, "route", *arguments)

    async def send_weights(self):
        return await asyncio.to_thread(self._ask, "send")

    async def score(self, token_ids, *, perturbation=0.0):
        # the perturbed scores are the plain ones: rounding counts as none, and the limit is the fixed one
        from tests.support.engines import reference_logprobs

        return await asyncio.to_thread(reference_logprobs, self.folder, token_ids)

    async def offload(self, parts):
        raise AssertionError("nobody shares a GPU")

    def _ask(self, method, *arguments):
        from skyrl_megatron.errors import DistributedError

        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(120):
                raise TimeoutError(f"the trainer process does not answer {method}")
            answer = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise DistributedError("the trainer process is gone") from error
        if isinstance(answer, Exception):
            raise answer
        return answer
