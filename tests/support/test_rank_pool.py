"""The pool itself: results by rank, failure of one rank, reuse afterwards, and what ranks have before they start."""

import os
import sys
import time

import pytest

from skyrl_megatron import device
from tests.support import forked
from tests.support.rank_pool import MOST_THREADS, RankFailure


def sum_of_ranks():
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return os.getpid(), value.item()


def rank_one_fails():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


def rank_zero_dies():
    import torch.distributed as dist

    if dist.get_rank() == 0:
        os._exit(9)
    dist.barrier()


def test_results_come_by_rank_and_processes_are_reused(ranks):
    first = ranks(2, sum_of_ranks)
    assert [total for _, total in first] == [3.0, 3.0]
    second = ranks(3, sum_of_ranks)
    assert [total for _, total in second] == [6.0, 6.0, 6.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second][:2]


@pytest.mark.parametrize("body, says", [(rank_one_fails, "planted"), (rank_zero_dies, "rank")])
def test_a_failing_rank_takes_the_others_down_within_seconds(ranks, body, says):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=says):
        ranks(2, body)
    assert time.monotonic() - start < 60
    assert [total for _, total in ranks(2, sum_of_ranks)] == [3.0, 3.0]


def what_the_collector_sees():
    import gc

    return len(gc.get_objects()), gc.get_freeze_count()


def test_the_collector_passes_over_what_the_imports_made(ranks):
    ranks.close()  # the next one is new: those before have imported other tests
    ((seen, frozen),) = ranks(1, what_the_collector_sees)
    assert frozen > 200_000 and seen < frozen / 10


def begin(pipe):
    """Report what this process has before it imports anything, and how many threads its parent runs."""
    found = {"torch", "megatron.core.parallel_state", "skyrl_megatron.runtime.engine"} & sys.modules.keys()
    pipe.send((len(found), len(os.listdir(f"/proc/{os.getppid()}/task"))))


@pytest.mark.process
def test_a_process_is_forked_with_its_imports_from_a_server_of_one_thread():
    """A lock that another thread of the server held at that moment would never be released in the child."""
    if device.driver_gpu_count():
        pytest.skip("next to GPUs each process is spawned")
    ours, theirs = forked.context().Pipe()
    process = forked.context().Process(target=begin, args=(theirs,))
    process.start()
    assert ours.poll(120) and ours.recv() == (3, 1)
    process.join(60)
    assert process.exitcode == 0


def leaves_threads():
    import threading

    for _ in range(MOST_THREADS):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return os.getpid()


def test_a_rank_full_of_threads_is_replaced(ranks):
    (crowded,) = ranks(1, leaves_threads)
    ((fresh, _),) = ranks(1, sum_of_ranks)
    assert fresh != crowded
