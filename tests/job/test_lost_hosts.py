"""Two hosts, each with a Ray daemon and an object store: what is lost between sampling and training."""

import asyncio
import contextlib
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.job.test_stored_routes import SHAPE, STAGES, Rank, Router, collated

pytestmark = [pytest.mark.process, pytest.mark.slow]
TOKENS, ENTRIES, K = 3000, 20, 16
NOTICED_S = 60


@contextlib.contextmanager
def hosts():
    """Two hosts: that of driver and ranks, and that of engine and teacher, which Ray misses within seconds."""
    import ray
    from ray.cluster_utils import Cluster

    heartbeats = {
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 3,
        "health_check_initial_delay_ms": 0,
    }
    memory = {"object_store_memory": 100 << 20, "num_cpus": 1}
    cluster = Cluster(
        initialize_head=True, head_node_args=memory | {"_system_config": heartbeats, "resources": {"near": 8}}
    )
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster.add_node(**memory, resources={"far": 8})
    finally:
        ray.shutdown()
        cluster.shutdown()


class Step:
    """The rows of a step that an engine on the far host sampled, and a teacher there scored."""

    def __init__(self):
        import ray

        from skyrl_megatron.runtime.flops import ModelFlops
        from skyrl_megatron.workers.dispatch import RankInfo, dispatch, top_tensors
        from skyrl_megatron.workers.engines import RayEngine

        async def sampled():
            settings = SimpleNamespace(enable_return_routed_experts=True, return_support=True)
            self.engine = RayEngine(settings, kind=Router, stages=STAGES, num_cpus=0, resources={"far": 1})
            await self.engine.start()
            asked = {"max_tokens": TOKENS, "support": ENTRIES}
            return [await self.engine.generate(str(row), [7], asked) for row in range(3)]

        self.batch = collated(*asyncio.run(sampled()))
        self.near = ray.remote(num_cpus=0, resources={"near": 1})(Rank)
        self.teacher = ray.remote(num_cpus=0, resources={"far": 1})(Rank).remote()
        infos, flops = [RankInfo(0, 1, True, 0, "")], ModelFlops(1.0, 0.0, 0.0, 0)
        sharded = dispatch(self.batch, 1, flops, trains=False)
        [share] = sharded.shares
        first, *further = self.teacher.taught.options(num_returns=3).remote(share, K)
        ray.get(first)
        top = top_tensors(sharded.places(infos, [further]), self.batch.responses, K)
        self.batch.teacher_top_logprobs, self.batch.teacher_top_ids = top
        [self.share] = dispatch(self.batch, 1, flops).shares

    def trained(self, rank, layers=STAGES[1], *, last_stage=True):
        """What a rank reads of the step."""
        import ray

        sums, supports, top, _ = ray.get(rank.read.remote(self.share, list(layers), last_stage), timeout=NOTICED_S)
        drawn = [np.random.default_rng(row).integers(0, 128, (TOKENS, *SHAPE), np.uint8) for row in range(3)]
        assert sums == [int(routes[:, list(layers)].sum()) for routes in drawn]
        if last_stage:
            assert [count for _, count in supports] == [TOKENS * ENTRIES] * 3 and top.shape == (3 * TOKENS, K)


def gone(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_what_a_killed_process_leaves():
    """kill -9 of engine, teacher and rank between sampling and training: their hosts have the step's rows. Of the host
    itself: the run ends with one line, and resumes; a row that no host lost is still there."""
    import ray

    from skyrl_megatron.errors import RowsLostError
    from skyrl_megatron.types import fetched

    with hosts() as far:
        step = Step()
        pids = [ray.get(actor.__ray_call__.remote(lambda self: os.getpid())) for actor in (step.teacher,)]
        pids += asyncio.run(step.engine.process_ids())[:1]
        for pid in pids:
            gone(pid)
        rank = step.near.remote()
        gone(ray.get(rank.__ray_call__.remote(lambda self: os.getpid())))
        with pytest.raises(ray.exceptions.RayActorError):
            step.trained(rank)
        rank = step.near.remote()  # that replaces it
        step.trained(rank)
        step.trained(rank, STAGES[0], last_stage=False)

        lost = Step()
        far.kill_raylet()  # SIGKILL, and its store with it
        with pytest.raises(
            RowsLostError, match=r"in the memory of a host that was lost .*resume the run, which samples"
        ):
            for _ in range(NOTICED_S * 2):  # until Ray has noticed
                try:
                    lost.trained(step.near.remote())
                except ray.exceptions.RayTaskError as error:
                    assert len(str(error.cause).splitlines()) == 1
                    raise error.cause from None
                time.sleep(0.5)
        with pytest.raises(RowsLostError):  # also where the driver records what it sampled
            fetched([lost.batch.rollout_support[0].ids, *lost.batch.rollout_routes])
