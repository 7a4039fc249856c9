"""Weights over CUDA IPC to one worker each, with the real group that says what lies where. What is not real is the
memory that processes share: here it is that of threads, as there is no GPU (``tests/gpu/test_50_transports.py``)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

BYTES, WORKERS, BUCKETS = 1 << 12, 2, 12


@pytest.fixture
def kind(monkeypatch):
    """The transport, with memory of this process."""
    import torch

    from skyrl_megatron.weight_sync.transport_ipc import IpcTransport

    buffers = {}

    class Ipc(IpcTransport):
        def _export(self, buffer):
            place = buffer.untyped_storage().data_ptr(), buffer.untyped_storage().nbytes()
            number = self._exported.setdefault(place, len(self._exported))
            buffers[number] = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
            return number

        def _open(self, number):
            return buffers[number]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Ipc


def groups(kind, work):
    """What ``work(transport)`` of each member returns, all at once."""
    from skyrl_megatron.weight_sync.transport import listen

    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]

    def member(rank):
        transport = kind("127.0.0.1", port, rank, WORKERS + 1, 60.0, None if rank else listener)
        try:
            return work(transport)
        finally:
            transport.close()

    with ThreadPoolExecutor(WORKERS + 1) as pool:
        return list(pool.map(member, range(WORKERS + 1)))


def test_each_worker_reads_its_own(kind):
    """In order, and before a buffer is filled again."""
    import torch

    def work(transport):
        if transport.rank:
            received = [torch.empty(BYTES, dtype=torch.uint8) for _ in range(BUCKETS)]
            for wait in [transport.receive(each) for each in received]:  # asked for ahead
                wait()
            return [int(each[0]) if each.eq(each[0]).all() else -1 for each in received]
        buffers, waits = [torch.empty(BYTES, dtype=torch.uint8) for _ in range(2)], []
        for number in range(BUCKETS * WORKERS):
            if len(waits) == len(buffers):
                waits.pop(0)()
            waits.append(transport.send(buffers[number % 2].fill_(number), 1 + number % WORKERS))
        for wait in waits:
            wait()
        return len(transport._exported)

    numbers = range(BUCKETS * WORKERS)
    assert groups(kind, work) == [2, *(list(numbers[rank::WORKERS]) for rank in range(WORKERS))]


def test_all_workers_read_the_same(kind):
    import torch

    def work(transport):
        found, buffer = [], torch.empty(BYTES, dtype=torch.uint8)
        for number in range(BUCKETS):
            transport.broadcast(buffer.fill_(0 if transport.rank else number))()
            found.append(int(buffer[0]))
        return found

    assert groups(kind, work) == [list(range(BUCKETS))] * (WORKERS + 1)


def test_nothing_is_sent_from_where_it_lies():
    """Memory of weights moves when GPUs are shared, and is not exported."""
    import numpy as np
    import torch

    from skyrl_megatron.weight_sync.bucket import TensorMeta
    from skyrl_megatron.weight_sync.parcel_sender import ParcelSender
    from skyrl_megatron.weight_sync.parcels import Parcels
    from skyrl_megatron.weight_sync.source import RowRange, TensorShard
    from skyrl_megatron.weight_sync.transport_ipc import IpcTransport

    assert not IpcTransport.sends_any_memory
    weight = torch.randn(64, 64)
    shard = TensorShard(TensorMeta("w", "float32", (64, 64)), weight, [RowRange(0, 0, 64, 0)])
    parcels = Parcels(np.array([[0, weight.nbytes, 1, 0, 1, 0]]), np.array([[0, 0, 64, 64, 0, 0, 1, 0]]))

    class Takes:
        def send(self, buffer, rank):
            self.sent = buffer
            return lambda: None

    for in_place in (True, False):
        takes = Takes()
        sums = ParcelSender(parcels, [shard], {0: 1}, torch.device("cpu"), in_place=in_place).send(
            takes, lambda _: True
        )
        assert (takes.sent.data_ptr() == weight.data_ptr()) == in_place
        assert torch.equal(takes.sent, weight.flatten().view(torch.uint8)) and len(sums) == 1
