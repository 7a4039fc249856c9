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
        from skyrl_megatron.types import TokenSupport

        count = sampling["max_tokens"]
        if sampling.get("routes", True):
            seeded = np.random.default_rng(int(request_id))
            routes = seeded.integers(0, 128, (len(prompt) + count - 1, *SHAPE), np.uint8)
        else:
            routes = None
        support = None
        if entries := sampling.get("support"):
            ids = [[token, *seeded.integers(70_000, 99_000, entries - 1).tolist()] for token in range(count)]
            support = TokenSupport.of(ids)
        return Generation(list(range(count)), [0.0] * count, "stop", routed_experts=routes, support=support)

    async def generate_batch(self, requests):
        return [
            await self.generate(request.request_id, request.prompt_token_ids, request.sampling) for request in requests
        ]


class Rank:
    def read(self, share, layers, last_stage):
        """Sums of what this rank reads, and the bytes that it fetched of each object in the store."""
        import ray

        sizes, get = {}, ray.get

        def counted(references, **options):
            objects = get(references, **options)
            for reference, value in zip(references, objects, strict=True):
                if isinstance(value, np.ndarray):
                    sizes[reference.hex()] = value.nbytes
            return objects

        ray.get = counted
        try:
            batch = share.batch(layers, last_stage=last_stage)
            routed = [routes[: len(routes), layers] for routes in batch.rollout_routes]
        finally:
            ray.get = get
        assert all(type(support.ids) is np.ndarray for support in batch.rollout_support)
        supports = [(int(support.ids.sum()), int(support.counts.sum())) for support in batch.rollout_support]
        top = batch.teacher_top_ids
        return [int(routes.sum()) for routes in routed], supports, None if top is None else top, sum(sizes.values())

    def taught(self, share, k):
        """What a teacher's rank returns: log-probs, and numbers in place of its likeliest tokens."""
        import torch

        batch = share.batch([], last_stage=True)
        ids = batch.response_tokens()[:, None] + torch.arange(k, dtype=torch.int32)
        logprobs = -ids.float()
        return (logprobs[:, 0].numpy(), *share.split(batch, logprobs), *share.split(batch, ids))

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
    return collated(*samples)


def collated(*samples):
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
        rollout_support=[row.rollout_support for row in rows],
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


STAGES = [(1, 2, 5), (6, 7, 9)]
"""Layers whose routers two pipeline stages have; others have none."""


def sampled(stages, rows, tokens, entries=0):
    from skyrl_megatron.workers.engines import RayEngine

    async def use():
        settings = SimpleNamespace(enable_return_routed_experts=True, return_support=bool(entries))
        engine = RayEngine(settings, kind=Router, stages=stages)
        await engine.start()
        asked = [{"max_tokens": tokens, "support": entries} for _ in range(rows)]
        samples = await asyncio.gather(*(engine.generate(str(row), [7], keys) for row, keys in enumerate(asked)))
        await engine.kill()
        return samples

    return asyncio.run(use())


@pytest.mark.parametrize("from_engine", [True, False], ids=["engine", "driver"])
def test_a_stage_fetches_the_routes_of_its_layers(ray_slots, from_engine):
    """Two stages: each rank fetches its part of the bytes, and the last one supports; also when the driver has the
    routes, as those of an engine behind HTTP. The driver still reads what the engine sampled."""
    import ray

    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.workers.dispatch import RankInfo, dispatch

    rows, tokens, entries = 3, 4000, 7
    samples = sampled(STAGES if from_engine else [], rows, tokens, entries)
    drawn = [np.random.default_rng(row).integers(0, 128, (tokens, *SHAPE), np.uint8) for row in range(rows)]
    batch = made(samples)
    pieces = [piece for routes in batch.rollout_routes for piece in routes.pieces]
    assert len(pieces) == rows and all((type(p).__name__ == "ByLayer") is from_engine for p, _, _ in pieces)
    if not from_engine:
        batch.rollout_routes = drawn
    assert all(np.array_equal(np.asarray(a), b) for a, b in zip(batch.rollout_routes, drawn, strict=True))
    [share] = dispatch(batch, 1, ModelFlops(1.0, 0.0, 0.0, 0), stages=STAGES).shares
    rank = ray.remote(num_cpus=0)(Rank).remote()
    of_ids = sum(support.ids.nbytes for support in batch.rollout_support)
    for number, layers in enumerate(STAGES):
        sums, supports, _, size = ray.get(rank.read.remote(share, list(layers), number == 1), timeout=120)
        assert sums == [int(routes[:, list(layers)].sum()) for routes in drawn]
        # the first stage has what is of no stage, so that the routes can be read whole
        stored = SHAPE[0] - len(STAGES[1]) if number == 0 else len(layers)
        assert size == rows * tokens * stored * SHAPE[1] + number * of_ids
        wanted = [(int(np.asarray(s.ids).sum()), tokens * entries) for s in batch.rollout_support]
        assert supports == (wanted if number else [])
    ranks = [RankInfo(0, 1, False, 0, "", routed=layers) for layers in STAGES]
    assert sorted({info.routed for info in ranks}) == STAGES


def test_one_stage_gets_one_array(ray_slots):
    [sample] = sampled([tuple(range(SHAPE[0]))], 1, 100)
    [(source, first, end)] = sample.routed_experts.pieces
    assert type(source).__name__ == "RayArray" and (first, end) == (0, 100)


def test_supports_stay_in_the_store(ray_slots):
    """Ids of sampling supports do not come into the driver; a token outside of its support does, and is named."""
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.inference.protocol import Generation
    from skyrl_megatron.types import StoredArray, TokenSupport
    from skyrl_megatron.workers.engines import Apart

    [first, second] = sampled([], 2, 50, 9)
    assert isinstance(first.support.ids, StoredArray) and first.support.first(3).ids.shape == (27,)
    joined = TokenSupport.joined([TokenSupport.none(2), first.support.last(10), second.support])
    assert isinstance(joined.ids, StoredArray) and len(joined) == 62 and joined.counts.sum() == 540
    read = np.concatenate([np.asarray(first.support.ids)[40 * 9 :], np.asarray(second.support.ids)])
    assert np.array_equal(np.asarray(joined.ids), read) and read[0] == 40
    wrong = Generation([3, 4], [0.0] * 2, "stop", support=TokenSupport.of([[3], [5]]))
    kept, array = Apart((), True).split(wrong)
    assert array is None and isinstance(kept.support.ids, np.ndarray)
    with pytest.raises(DataError, match="token 4 at position 1 of the response is not in the support"):
        collated(kept)


def test_likeliest_tokens_go_from_teacher_to_policy(ray_slots):
    """Blocks of the same split are the objects that a rank reads, those of another split are found; the driver reads
    them as a tensor, and a change there reaches the ranks."""
    import ray
    import torch

    from skyrl_megatron.data.splitting import MINI_BATCH_PROMPTS, PROMPT_UIDS, mini_batches
    from skyrl_megatron.inference.protocol import Generation
    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.types import TensorElsewhere
    from skyrl_megatron.workers.dispatch import RankInfo, dispatch, top_tensors

    lengths, k = [30_000, 20_000, 0, 25_000, 10_000, 15_000, 1, 40_000], 4
    batch = made([Generation([row] * n, [0.0] * n, "stop") for row, n in enumerate(lengths)])
    batch.metadata |= {MINI_BATCH_PROMPTS: 4, PROMPT_UIDS: batch.uids}
    flops, fractions = ModelFlops(1.0, 0.0, 0.0, 0), {}
    for teachers in (2, 1):
        ranks = [RankInfo(number, teachers, True, 0, "") for number in range(teachers)]
        sharded = dispatch(batch, teachers, flops, np.arange(len(batch)), trains=False)
        actors = [ray.remote(num_cpus=0)(Rank).remote() for _ in ranks]
        further = [
            actor.taught.options(num_returns=1 + 2 * len(share.references)).remote(share, k)[1:]
            for actor, share in zip(actors, sharded.shares, strict=True)
        ]
        top = top_tensors(sharded.places(ranks, further), batch.responses, k)
        assert all(isinstance(tensor, TensorElsewhere) and tensor.stored is not None for tensor in top)
        batch.teacher_top_logprobs, batch.teacher_top_ids = top
        expected = batch.response_tokens()[:, None] + torch.arange(k, dtype=torch.int32)
        fetched = 0
        for rows in mini_batches(batch, 4):
            dispatched = dispatch(batch, 2, flops, rows)
            for number, share in enumerate(dispatched.shares):
                _, _, read, size = ray.get(actors[0].read.remote(share, [], True), timeout=120)
                wanted = [expected[batch.responses.of(row)] for row in dispatched.rows[number].tolist()]
                assert torch.equal(read, torch.cat(wanted))
                assert ray.get(actors[0].read.remote(share, [], False), timeout=120)[2] is None
                fetched += size
        fractions[teachers] = fetched / sum(tensor.stored.nbytes for tensor in top)
        assert torch.equal(top[1], expected) and top[1].stored is None, "the driver reads the same"
    assert fractions[2] == 1.0 <= fractions[1], "a block has the rows of one rank"
    batch.teacher_top_ids += 1
    [share, _] = dispatch(batch, 2, flops, mini_batches(batch, 4)[0]).shares
    _, _, read, _ = ray.get(actors[0].read.remote(share, [], True), timeout=120)
    assert read.min() == 1


def test_experts_that_ranks_recorded_stay_in_the_store(ray_slots):
    """Two replicas of two stages: each row's experts are those of its replica's stages, 0 in layers of none."""
    import ray

    from skyrl_megatron.inference.protocol import Generation
    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.types import fetched
    from skyrl_megatron.workers.dispatch import RankInfo, dispatch

    batch = made([Generation([row] * n, [0.0] * n, "stop") for row, n in enumerate([40, 7, 0, 90])])
    drawn = [np.random.default_rng(row).integers(0, 9, (n, 10, 2), np.uint8) for row, n in enumerate(batch.lengths)]
    sharded = dispatch(batch, 2, ModelFlops(1.0, 0.0, 0.0, 0), trains=False)
    ranks = [
        RankInfo(n, 2, False, 0, "", "", layers, tp == 0) for n in range(2) for layers in STAGES for tp in range(2)
    ]
    results = []
    for rank in ranks:
        blocks = sharded.shares[rank.dp_rank].rows_of_blocks() if rank.records else []
        of_blocks = [np.concatenate([drawn[sharded.rows[rank.dp_rank][row]] for row in rows]) for rows in blocks]
        results.append([ray.put(np.ascontiguousarray(array[:, list(rank.routed)])) for array in of_blocks])
    routes = sharded.routes(ranks, results, batch.lengths, np.zeros((0, 10, 2), np.uint8))
    staged = [layer for layers in STAGES for layer in layers]
    for of_row, expected in zip(fetched(routes), drawn, strict=True):
        assert np.array_equal(of_row[:, staged], expected[:, staged])
        assert not np.delete(of_row, staged, 1).any() and of_row.shape == expected.shape


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
