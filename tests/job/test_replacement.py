"""Ranks that are lost while others wait for them, on a real Ray: they are named, the others leave, new ones join."""

import contextlib
import os
import signal

import pytest

from tests.job.test_workers import Body

pytestmark = [pytest.mark.process, pytest.mark.full_matrix]
RANKS = 4


class Chain(Body):
    """Each rank waits for the one behind it, so that one that is lost frees its neighbour alone."""

    def alive(self):
        return os.getpid()

    def wait_for_next(self):
        import torch
        import torch.distributed as dist

        got = torch.zeros(1)
        if self.rank + 1 < self.world:
            dist.recv(got, self.rank + 1)
        if self.rank:
            dist.send(got + 1, self.rank - 1)
        return got.item()

    def stand_still(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def leave(self):
        import torch.distributed as dist

        dist.destroy_process_group()


@contextlib.contextmanager
def chain():
    import ray

    from skyrl_megatron.workers.actor_group import WATCH, ActorGroup
    from skyrl_megatron.workers.ray_setup import local_ray

    actor = ray.remote(num_cpus=1, concurrency_groups={WATCH: 1})(Chain)
    with local_ray(RANKS, object_store_bytes=100 << 20):
        made = ActorGroup("policy", [actor.remote(rank, RANKS) for rank in range(RANKS)], 60.0)
        made.replaceable = True
        join(made)
        yield made, lambda rank: actor.remote(rank, RANKS)
        made.kill()


def join(made):
    import ray

    address = ray.get(made.actors[0].address.remote())
    return made.call("join", address, timeout_s=120)


@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_is_named_and_replaced(what):
    from skyrl_megatron.errors import DistributedError, RankLostError

    with chain() as (made, make):
        pids = made.call("alive")
        first, last = made.actors[0], made.actors[-1]
        assert made.call("wait_for_next") == [3.0, 2.0, 1.0, 0.0] and made.lost() == []
        if what == "SIGKILL":
            os.kill(pids[-1], signal.SIGKILL)
        else:
            last.stand_still.remote()
        with pytest.raises(
            RankLostError, match=r"policy rank 3, phase wait_for_next: (the process died|no answer)"
        ) as told:
            made.call("wait_for_next", timeout_s=20 if what == "SIGSTOP" else 60)
        assert told.value.role == "policy" and made.lost() == [3]
        made.end_waiting(told.value)
        assert made.replace([3], make) == [3]
        assert made.actors[0] is first and made.actors[-1] is not last
        join(made)
        assert made.call("wait_for_next") == [3.0, 2.0, 1.0, 0.0]
        assert made.call("alive")[:-1] == pids[:-1]
        made.end_waiting(told.value)
        assert made.actors == []
        with pytest.raises(
            DistributedError, match=r"ranks have been ended \(policy rank 3, phase .*\): start the run again"
        ):
            made.call("alive")
