"""One group of trainer ranks and engine workers: several send at once, point to point, and measure what size of
buckets is fast."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from tests.support.engines import tiny_settings
from tests.weight_sync.test_slices import EXTENDED

KIB = 1 << 10


@pytest.mark.parametrize("senders, workers", [(1, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_ranks_and_workers_are_peers(transport, senders, workers):
    """Each worker gets what each rank sends to it, in the order of its buckets, while other ranks send."""
    import torch

    from skyrl_megatron.weight_sync.transport import measure

    sizes = (8 * KIB, 64 * KIB)

    def work(transport, member):
        rates = measure(transport, member, sizes) if transport.sends_any_memory else []
        if member.number < senders:
            buffers = [torch.full((KIB,), 10 * member.number + worker, dtype=torch.uint8) for worker in range(workers)]
            for wait in [transport.send(buffer, senders + worker) for worker, buffer in enumerate(buffers)]:
                wait()
            return rates
        buffers = [torch.empty(KIB, dtype=torch.uint8) for _ in range(senders)]
        for wait in [transport.receive(buffer, rank) for rank, buffer in enumerate(buffers)]:
            wait()
        return [buffer.unique().tolist() for buffer in buffers]

    found = in_a_group(transport, senders, workers, work)
    assert found[senders:] == [[[10 * rank + worker] for rank in range(senders)] for worker in range(workers)]
    if transport == "gloo":
        assert all(len(rates) == len(sizes) and min(rates) > 0 for rates in found[:senders])


def in_a_group(name, senders, workers, work):
    """What ``work(transport, member)`` returns for each member, all at once."""
    from concurrent.futures import ThreadPoolExecutor

    from skyrl_megatron.weight_sync.transport import GroupMember, listen, open_transport

    size, listener = senders + workers, listen("127.0.0.1")
    address, done = listener.getsockname(), threading.Barrier(senders + workers)

    def member(number):
        own = None if number else listener
        transport = open_transport(name, *address, number, size, 30.0, own)
        try:
            found = work(transport, GroupMember(address, number, senders, size))
            done.wait(60)
            return found
        finally:
            transport.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


@pytest.mark.parametrize(
    "rates, chosen",
    [({1: 10.0, 4: 10.2, 16: 10.3}, 1), ({1: 5.0, 4: 9.0, 16: 10.0}, 16), ({1: 5.0, 4: 10.0, 16: 9.0}, 4)],
)
def test_the_smallest_fast_size_is_chosen(rates, chosen):
    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

    synchronizer = WeightSynchronizer(None, [], hf_config={}, dtype="bfloat16", bucket_sizes=(1, 4, 16))
    assert synchronizer._choose_bucket_size(rates) == (chosen != 16)
    assert synchronizer.planner.bucket_bytes == chosen and synchronizer._unmeasured == ()
    assert synchronizer.options["bucket_bytes"] == 16  # of buckets for all, which senders and workers cut alike


@pytest.mark.vllm
@pytest.mark.engines("extended")
def test_the_first_sync_measures(engines, models, sync, loop, caplog, pool):
    """And says so; the weights that arrive are those of any other size."""
    caplog.set_level(logging.INFO)
    sync("B", "B", bucket_sizes=(64 * KIB,))
    expected = engines.answers(pool.slots[0].engine)
    assert not re.search("buckets of", caplog.text)
    sync("A", "A", bucket_sizes=(64 * KIB,))
    sync("B again", "B", bucket_sizes=(1 << 20, 2 << 20))
    assert engines.answers(pool.slots[0].engine) == expected
    assert re.search(
        r"weights are sent in buckets of [12] MiB \(1 MiB: \d+\.\d\d GB/s, 2 MiB: [\d.]+ GB/s\)", caplog.text
    )


@pytest.fixture(scope="module")
def pool(engines, models):
    with engines.pool(tiny_settings(models["A"], extra=EXTENDED), wait_s=20) as pool:
        yield pool
