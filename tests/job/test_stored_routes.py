"""Routed experts go from the engine's host to the ranks: the driver has references, which outlive the engine."""

import asyncio
import gc
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]
TOKENS, SHAPE = 60_000, (48, 8)
"""Of each row: 22 MiB of routes."""


@pytest.fixture(scope="module")
def ray_slots(session_ray):
    """The number of slots of the session's Ray, which this module joins."""
    with session_ray.joined():
        yield session_ray.slots


class Router:
    """An engine class that answers with as many tokens as it is asked for, and their experts."""

    def __init__(self, settings):
        self.settings = settings

    async def start(self):
        pass

    async def generate(self, request_id, prompt, sampling, adapter=""):
        from skyrl_megatron.inference.protocol import Generation

        count = sampling["max_tokens"]
        if sampling.get("routes", True):
            seeded = np.random.default_rng(int(request_id))
            routes = seeded.integers(0, 128, (len(prompt) + count - 1, *SHAPE), np.uint8)
        else:
            routes = None
        return Generation(list(range(count)), [0.0] * count, "stop", routed_experts=routes)

    async def generate_batch(self, requests):
        return [
            await self.generate(request.request_id, request.prompt_token_ids, request.sampling) for request in requests
        ]


class Rank:
    def summed(self, share):
        batch = share.batch()
        assert all(type(routes) in (np.ndarray, type(None)) for routes in batch.rollout_routes)
        return [None if routes is None else int(routes.sum(dtype=np.int64)) for routes in batch.rollout_routes]


def expected(row, tokens):
    return int(np.random.default_rng(row).integers(0, 128, (tokens, *SHAPE), np.uint8).sum(dtype=np.int64))


def heap():
    """Bytes of this process's own memory, without what it maps of the object store."""
    gc.collect()
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def made(samples):
    """The batch of single-turn rows, as the generator makes it."""
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.rollout.conversation import Turn, sequence_of

    rows = [
        sequence_of([7, *sample.token_ids], 1, [Turn(1, sample, len(sample.token_ids), 0, 1.0)], "stop")
        for sample in samples
    ]
    return collate(
        [row.prompt_ids for row in rows],
        [row.response_ids for row in rows],
        uids=[str(row) for row in range(len(rows))],
        rewards=[1.0] * len(rows),
        rollout_routes=[row.rollout_expert_indices for row in rows],
    )


@pytest.mark.parametrize("way", ["one by one", "together"])
def test_routes_outlive_the_engine_and_do_not_pass_the_driver(ray_slots, way):
    import ray

    from skyrl_megatron.inference.protocol import SampleRequest
    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.types import StoredArray
    from skyrl_megatron.workers.dispatch import dispatch
    from skyrl_megatron.workers.engines import RayEngine

    rows = 6

    async def sample(engine, asked):
        if way == "together":
            requests = [SampleRequest(str(row), [7], keys) for row, keys in enumerate(asked)]
            return await engine.generate_batch(requests)
        return await asyncio.gather(*(engine.generate(str(row), [7], keys) for row, keys in enumerate(asked)))

    async def use(tokens):
        engine = RayEngine(SimpleNamespace(enable_return_routed_experts=True), kind=Router)
        await engine.start()
        asked = [{"max_tokens": tokens + 1 if row else 1, "routes": row != 2} for row in range(rows)]
        samples = await sample(engine, asked)
        pid, *_ = await engine.process_ids()
        os.kill(pid, signal.SIGKILL)
        return samples

    made(asyncio.run(use(4)))  # imports
    before = heap()
    samples = asyncio.run(use(TOKENS))
    assert [type(sample.routed_experts) for sample in samples] == [*[StoredArray] * 2, type(None), *[StoredArray] * 3]
    batch = made(samples)
    size = sum(routes.nbytes for routes in batch.rollout_routes if routes is not None)
    sharded = dispatch(batch, 2, ModelFlops(1.0, 0.0, 0.0, 0))
    assert batch.carried.bytes < 6 * len(batch.tokens) < size / 50, "tokens and masks were put, no routes"
    ranks = [ray.remote(num_cpus=0)(Rank).remote() for _ in range(2)]
    sums = ray.get([rank.summed.remote(share) for rank, share in zip(ranks, sharded.shares, strict=True)], timeout=120)
    of_rows = dict(
        zip(np.concatenate(sharded.rows).tolist(), [number for part in sums for number in part], strict=True)
    )
    wanted = {row: None if row == 2 else expected(row, TOKENS + 1 if row else 1) for row in range(rows)}
    assert of_rows == wanted
    grown, tokens = heap() - before, sum(len(sample.token_ids) for sample in samples)
    assert grown < 150 * tokens + size / 4, "lists of tokens are in the driver, their routes are not"

    held = {piece[0].name for routes in batch.rollout_routes if routes is not None for piece in routes.pieces}
    del samples, batch, sharded
    gc.collect()
    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    assert held and not held & {name.decode() if isinstance(name, bytes) else name for name in counts}


def test_rows_of_a_lost_host_are_named(ray_slots):
    import ray

    from skyrl_megatron.errors import DistributedError
    from skyrl_megatron.inference.protocol import Generation
    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.types import StoredArray
    from skyrl_megatron.workers.dispatch import RayArray, dispatch

    @ray.remote(num_cpus=0)
    class Owner:
        def put(self):
            return [ray.put(np.zeros((300, *SHAPE), np.uint8))]

    owner = Owner.remote()
    [reference] = ray.get(owner.put.remote())
    routes = StoredArray([(RayArray(reference), 0, 300)], SHAPE, np.dtype(np.uint8))
    batch = made([Generation(list(range(300)), [0.0] * 300, "stop", routed_experts=routes)])
    [share] = dispatch(batch, 1, ModelFlops(1.0, 0.0, 0.0, 0)).shares
    assert share.batch().rollout_routes[0].shape == (300, *SHAPE)
    ray.kill(owner)  # what it put is lost with it, as with a host
    with pytest.raises(DistributedError, match="were in the memory of a host that was lost"):
        for _ in range(300):  # until Ray has noticed
            share.batch()
            time.sleep(0.2)


def test_without_routes_a_sample_is_one_result(ray_slots):
    from skyrl_megatron.workers.engines import RayEngine

    async def use():
        engine = RayEngine(SimpleNamespace(enable_return_routed_experts=False), kind=Router)
        await engine.start()
        sample = await engine.generate("3", [7], {"max_tokens": 4})
        await engine.kill()
        return sample

    assert type(asyncio.run(use()).routed_experts) is np.ndarray
