"""Weights through memory that processes share, to one worker each and to all: by descriptors on CPU, as by handles of
CUDA IPC on GPUs (``tests/gpu/test_50_transports.py``)."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.processes import abandoned_memory, shared_memory

BYTES, WORKERS, BUCKETS = 1 << 12, 2, 12


@pytest.fixture
def kind():
    from skyrl_megatron.weight_sync.transport import IpcTransport

    return IpcTransport


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


def test_buffers_of_one_address_are_told_apart(kind):
    """A buffer that was freed gives its address to the next one, which is other memory."""
    import torch

    def work(transport):
        found = []
        for number in range(BUCKETS):
            buffer = torch.full((1 << 22,), 0 if transport.rank else number, dtype=torch.uint8)
            transport.broadcast(buffer)()
            found.append(int(buffer[-1]))
            del buffer
        return found

    assert groups(kind, work) == [list(range(BUCKETS))] * (WORKERS + 1)


def receive_in_a_process(port, got):
    """A member that ends without closing anything once it has what was sent."""
    import torch

    from skyrl_megatron.weight_sync.transport import IpcTransport

    transport = IpcTransport("127.0.0.1", port, 1, 2, 60.0)
    buffer = torch.empty(BYTES, dtype=torch.uint8)
    transport.broadcast(buffer)()
    got.send(int(buffer[0]))
    got.recv()  # the sender knows that it was read
    os._exit(1)


@pytest.mark.process
def test_another_process_reads_the_memory_and_leaves_nothing(kind):
    import torch

    from skyrl_megatron.weight_sync.transport import listen

    before = shared_memory()
    listener = listen("127.0.0.1")
    ours, theirs = multiprocessing.Pipe()
    arguments = (listener.getsockname()[1], theirs)
    process = multiprocessing.get_context("spawn").Process(target=receive_in_a_process, args=arguments)
    process.start()
    transport = kind("127.0.0.1", 0, 0, 2, 60.0, listener)
    buffer = torch.full((BYTES,), 7, dtype=torch.uint8)  # stays until it was read
    transport.broadcast(buffer)()
    assert ours.poll(60) and ours.recv() == 7
    ours.send(None)
    process.join(60)
    transport.close()
    assert not {name for name in abandoned_memory(before) if name.startswith("torch_")}


def test_nothing_is_sent_from_where_it_lies():
    """Memory of weights moves when GPUs are shared, and is not exported."""
    import numpy as np
    import torch

    from skyrl_megatron.weight_sync.buckets import TensorMeta
    from skyrl_megatron.weight_sync.point_to_point import SliceSender
    from skyrl_megatron.weight_sync.slices import TransferList
    from skyrl_megatron.weight_sync.tensors import RowRange, TensorShard
    from skyrl_megatron.weight_sync.transport import IpcTransport

    assert not IpcTransport.sends_any_memory
    weight = torch.randn(64, 64)
    shard = TensorShard(TensorMeta("w", "float32", (64, 64)), weight, [RowRange(0, 0, 64, 0)])
    transfers = TransferList(np.array([[0, weight.nbytes, 1, 0, 1, 0]]), np.array([[0, 0, 64, 64, 0, 0, 1, 0]]))

    class Takes:
        def send(self, buffer, rank):
            self.sent = buffer
            return lambda: None

    for in_place in (True, False):
        takes = Takes()
        sums = SliceSender(transfers, [shard], {0: 1}, torch.device("cpu"), in_place=in_place).send(
            takes, lambda _: True
        )
        assert (takes.sent.data_ptr() == weight.data_ptr()) == in_place
        assert torch.equal(takes.sent, weight.flatten().view(torch.uint8)) and len(sums) == 1
