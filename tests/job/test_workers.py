"""Actor groups, dispatch and placement on a real Ray: results in order, failures and hangs that end in seconds."""

import contextlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import is_alive


@pytest.fixture(scope="module")
def ray_slots(session_ray):
    """The number of slots of the session's Ray, which this module joins."""
    with session_ray.joined():
        yield session_ray.slots


class OddError(Exception):
    """Its constructor does not take its ``args``, so it cannot be unpickled."""

    def __init__(self, number, text):
        super().__init__(f"{text} {number}")


class Body:
    """What the actors run: a real gloo group and a sum over it."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def address(self):
        from skyrl_megatron.workers.runtime_env import LOOPBACK, free_port

        return LOOPBACK, free_port()

    def join(self, address):
        import datetime

        import torch.distributed as dist

        timeout = datetime.timedelta(seconds=60)
        store = dist.TCPStore(*address, self.world, self.rank == 0, timeout)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world, timeout=timeout)
        return os.getpid()

    def sum(self, mine):
        import torch
        import torch.distributed as dist

        total = torch.tensor([float(mine)])
        dist.all_reduce(total)
        return total.item()

    def sum_unless(self, bad, kind):
        from skyrl_megatron.errors import CheckpointError

        if self.rank in bad:
            if kind == "die":
                os._exit(3)
            if kind == "hang":
                time.sleep(600)
            if kind == "value":
                raise ValueError("a row is too long")
            if kind == "odd":
                raise OddError(3, "the plugin's own")
            raise CheckpointError("the disk is full")
        return self.sum(1.0)


@contextlib.contextmanager
def group(timeout_s=300.0):
    import ray

    from skyrl_megatron.workers.actor_group import ActorGroup

    actors = [ray.remote(num_cpus=1)(Body).remote(rank, 2) for rank in range(2)]
    made = ActorGroup("policy", actors, timeout_s)
    address = ray.get(actors[0].address.remote())
    made.call("join", address)
    try:
        yield made
    finally:
        made.kill()


def test_results_by_rank_and_errors_of_all_leave_the_group_alive(ray_slots):
    from skyrl_megatron.errors import CheckpointError, DistributedError

    with group() as made:
        assert made.call("sum", each=[(1,), (2,)]) == [3.0, 3.0]
        with pytest.raises(CheckpointError, match="the disk is full"):
            made.call("sum_unless", (0, 1), "own")
        with pytest.raises(DistributedError, match=r"policy rank 0, phase train: a row is too long"):
            made.call("sum_unless", (0, 1), "value", phase="train")
        assert made.call("sum", 5) == [10.0, 10.0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("die", r"policy rank 1, phase train: the process died"),
        ("value", r"policy rank 1, phase train: a row is too long"),
        ("odd", r"policy rank 1, phase train: .*OddError: the plugin's own 3"),
        (
            "hang",
            r"phase train: no answer within 3 s \(trainer.phase_timeout_s\) from policy rank 0, policy rank 1"
            r"; 0 of 2 had finished; looked at 2 of them",
        ),
    ],
)
def test_one_rank_fails_the_call_and_ends_the_group(ray_slots, kind, message):
    """Rank 0 waits in an all-reduce for rank 1; nobody waits for its timeout of minutes."""
    from skyrl_megatron.errors import DistributedError

    with group() as made:
        timeout = 3.0 if kind == "hang" else 300.0
        made.look = lambda: f"; looked at {len(made.actors)} of them"
        with pytest.raises(DistributedError, match=message):
            made.call("sum_unless", (1,), kind, phase="train", timeout_s=timeout)
        assert made.actors == []
        with pytest.raises(DistributedError, match=rf"policy ranks have been ended \(.*{message}"):
            made.call("sum", 1)


def test_a_rank_that_is_called_alone_is_told_of_like_all(ray_slots):
    from skyrl_megatron.errors import DistributedError

    with group() as made:
        assert len(made.call("address", ranks=[1])) == 1
        with pytest.raises(DistributedError, match="policy rank 0, phase start: the process died"):
            made.call("sum_unless", (0,), "die", phase="start", ranks=[0])


def test_warnings_of_ranks_are_given_where_the_user_sees_them(ray_slots):
    """One that all ranks give once, and each only once."""
    import warnings

    import ray

    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.workers.actor_group import ActorGroup
    from skyrl_megatron.workers.megatron_worker import RankProcess

    class Warns(RankProcess):
        def warn(self):
            warnings.warn("of all ranks", SkyRLMegatronWarning, stacklevel=1)
            warnings.warn(f"of rank {self.rank}", SkyRLMegatronWarning, stacklevel=1)
            warnings.warn("of a library", UserWarning, stacklevel=1)

    made = ActorGroup("policy", [ray.remote(num_cpus=1)(Warns).remote(rank, 2) for rank in range(2)], 300.0)
    try:
        made.call("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made.repeat_warnings()
            made.repeat_warnings()
        assert [str(each.message) for each in caught] == ["of all ranks", "of rank 0", "of rank 1"]
        assert {each.category for each in caught} == {SkyRLMegatronWarning}
    finally:
        made.kill()


def batch_of(lengths, width=12, response=6):
    import torch

    from skyrl_megatron.types import PaddedBatch

    rows = len(lengths)
    sequences = torch.arange(rows * width).reshape(rows, width)
    columns = torch.arange(width)
    attention = columns >= width - torch.tensor(lengths)[:, None]
    response_mask = attention[:, -response:].float()
    uids = [f"p{row // 2}" for row in range(rows)]
    return PaddedBatch(sequences, attention, response_mask, response_mask.clone(), uids)


@pytest.mark.parametrize(("rows", "dp", "ranks_per_replica"), [(7, 3, 2), (8, 2, 1), (2, 4, 1), (5, 1, 2)])
def test_a_batch_goes_out_once_a_replica_and_comes_back_in_order(ray_slots, rows, dp, ranks_per_replica):
    """Also fewer rows than replicas: the others get a blank row, whose result is dropped."""
    import torch

    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.workers.dispatch import RankInfo, dispatch

    lengths = np.random.default_rng(rows).integers(1, 13, rows).tolist()
    batch = batch_of(lengths)
    flat = batch.flat()
    sharded = dispatch(flat, dp, ModelFlops(1.0, 0.1, 0.0, 0))
    assert len(sharded.shares) == dp
    places = [
        RankInfo(r // ranks_per_replica, dp, r % ranks_per_replica == 0, 0, "") for r in range(dp * ranks_per_replica)
    ]
    results = []
    for place, (share,) in zip(places, sharded.arguments(places), strict=True):
        part = share.batch()
        assert len(part), "a rank without rows takes part in collectives"
        results.append(part.response_tokens().numpy() if place.collects else None)
    expected = batch.sequences[:, -6:] * batch.response_mask
    assert torch.equal(flat.responses.padded(sharded.collect(places, results), width=6), expected.int())


def test_rows_of_an_adapter_are_cut_as_if_there_were_no_others(ray_slots):
    """The share of a replica has what it would have got of each adapter alone, blank rows included."""
    import dataclasses

    import torch

    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.workers.dispatch import RankInfo, dispatch

    flops, names = ModelFlops(1.0, 0.1, 0.0, 0), ["a", "b", "a", "a", "a", "b", "a", "c"]
    batch = dataclasses.replace(batch_of(np.random.default_rng(3).integers(1, 13, 8).tolist()).flat(), adapters=names)
    together = dispatch(batch, 2, flops)
    parts = [share.batch() for share in together.shares]
    for name in "abc":
        mine = [row for row, each in enumerate(names) if each == name]
        alone = dispatch(dataclasses.replace(batch.select(mine), adapters=[]), 2, flops)
        for part, share in zip(parts, alone.shares, strict=True):
            own, expected = part.select([r for r, each in enumerate(part.adapters) if each == name]), share.batch()
            assert torch.equal(own.tokens, expected.tokens)
            assert own.lengths.tolist() == expected.lengths.tolist()
            assert own.uids == expected.uids
    places = [RankInfo(r, 2, True, 0, "") for r in range(2)]
    results = [part.response_tokens().numpy() for part in parts]
    assert torch.equal(together.collect(places, results), batch.response_tokens())


def ragged_batch(seed, lengths, *, names=(), uids=None):
    """A batch with every field; ``lengths``: of prompts and responses. Some rows have no routes, or no support."""
    import torch

    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.types import TokenSupport

    rng, rows = np.random.default_rng(seed), len(lengths)
    responses = [rng.integers(0, 70_000, n) for _, n in lengths]
    supports = [[{int(token), int(token) + 1} if token % 3 else () for token in response] for response in responses]
    routes = [rng.integers(0, 300, (p + n - 1, 2, 3)) if row % 3 else None for row, (p, n) in enumerate(lengths)]
    batch = collate(
        [rng.integers(0, 70_000, p) for p, _ in lengths],
        responses,
        uids=uids or [f"p{row // 2}" for row in range(rows)],
        rewards=[rng.random(n) for _, n in lengths],
        loss_masks=[rng.integers(0, 2, n) for _, n in lengths],
        rollout_logprobs=[-rng.random(n) for _, n in lengths],
        rollout_routes=routes,
        rollout_support=[None if row % 4 == 2 else TokenSupport.of(each) for row, each in enumerate(supports)],
        is_last_step=[row % 2 == 1 for row in range(rows)],
    )
    size = len(batch.loss_mask)
    for name in ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "advantages", "returns"):
        setattr(batch, name, torch.from_numpy(rng.random(size, np.float32)))
    batch.teacher_top_logprobs = torch.from_numpy(rng.random((size, 4), np.float32))
    batch.teacher_top_ids = torch.from_numpy(rng.integers(0, 99, (size, 4)).astype(np.int32))
    batch.observation_mask, batch.truncated = ~batch.loss_mask, ~batch.is_last_step
    batch.reward_parts = torch.from_numpy(rng.random((rows, 2), np.float32))
    batch.preferences = torch.from_numpy(rng.random((rows, 3)))
    batch.adapters = [names[row % len(names)] for row in range(rows)] if names else []
    return batch


def assert_same_rows(part, expected, fields):
    """Every one of ``fields``, with dtypes; the supports by value, as rows from one block have one dtype."""
    import torch

    for name in fields:
        one, other = getattr(part, name), getattr(expected, name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), name
        elif name == "rollout_support":
            pairs = [(each.ids.tolist(), each.counts.tolist()) for each in one]
            assert pairs == [(each.ids.tolist(), each.counts.tolist()) for each in other]
        elif name == "rollout_routes":
            assert [each is None for each in one] == [each is None for each in other]
            for mine, wanted in zip(one, other, strict=True):
                np.testing.assert_array_equal(mine, wanted)
                assert mine is None or mine.dtype == wanted.dtype == np.uint16
        else:
            np.testing.assert_array_equal(one, other, err_msg=name)


RAGGED = [(1, 5), (7, 2), (3, 9), (4, 1), (2, 2), (9, 14), (1, 1), (6, 3)]
SHAPES = {
    "ragged": (RAGGED, {}),
    "adapters": (RAGGED, {"names": ("math", "code", "math")}),
    "fewer rows of an adapter than replicas": (RAGGED, {"names": ("a", "a", "a", "b", "a", "a", "a", "a")}),
    "fewer rows than replicas": (RAGGED[:2], {}),
    "fewer rows than replicas, adapters": (RAGGED[:2], {"names": ("math", "code")}),
    "equal": ([(3, 4)] * 6, {}),
    "without responses": ([(3, 0), (2, 5), (4, 0), (1, 0), (2, 1), (5, 0)], {}),
    "one row": ([(3, 4)], {}),
    "one row without a response": ([(3, 0)], {}),
    "together": (RAGGED, {"uids": ["a", "b", "a", "c", "b", "a", "d", "d"]}),
    "fewer groups than replicas": (RAGGED[:4], {"uids": ["a", "b", "a", "b"]}),
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_replica_gets_its_rows_with_all_that_is_theirs(ray_slots, shape, trains):
    """Of the whole batch and of some rows, cut by mini-batches; blank rows have no tokens, and results come back to
    the rows that they are of."""
    import torch

    from skyrl_megatron.data.splitting import MINI_BATCH_PROMPTS, PROMPT_UIDS, TOGETHER
    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.types import LISTS, OF_RESPONSES, OF_ROWS
    from skyrl_megatron.workers.dispatch import RankInfo, dispatch

    lengths, more = SHAPES[shape]
    flops, together = ModelFlops(1.0, 0.1, 0.0, 0), "together" in shape or "groups" in shape
    whole = ("tokens", "lengths", "response_lengths", "response_mask", "loss_mask", *LISTS)
    unread = ("rewards", "is_last_step", "truncated", "reward_parts")  # advantages were made of them
    fields = tuple(name for name in (*whole, *(OF_RESPONSES + OF_ROWS) * trains) if name not in unread)
    for dp in (1, 2, 3):
        batch = ragged_batch(dp, lengths, **more)
        batch.metadata = {"a": 1, PROMPT_UIDS: batch.uids} | ({TOGETHER: True} if together else {})
        if not together:
            batch.metadata[MINI_BATCH_PROMPTS] = 2
        some = np.arange(len(batch))[:: 2 if trains and not together else 1]
        for rows in (None, some) if trains else (None,):
            sharded = dispatch(batch, dp, flops, rows, trains=trains)
            asked = np.arange(len(batch)) if rows is None else rows
            assert sorted(row for share in sharded.rows for row in share.tolist()) == asked.tolist()
            results, holders = [], {}
            for replica, (share, of_share) in enumerate(zip(sharded.shares, sharded.rows, strict=True)):
                part = share.batch()
                real = len(of_share)
                assert len(part), "every replica takes part in collectives"
                assert_same_rows(part.select(range(real)), batch.select(of_share), fields)
                assert not part.lengths[real:].any() and not part.response_lengths[real:].any()
                assert part.uids[real:] == [""] * (len(part) - real)
                assert all(getattr(part, name) is None for name in (*OF_RESPONSES, *OF_ROWS) if name not in fields)
                assert part.metadata == {"a": 1} | ({TOGETHER: True} if together else {})
                if batch.adapters:
                    assert set(part.adapters) == {batch.adapters[row] for row in asked}, "all adapters on each"
                for row in of_share.tolist():
                    holders.setdefault(batch.uids[row], set()).add(replica)
                tokens = part.response_tokens()
                results.append(torch.stack([tokens, -tokens], 1).numpy())
            if together:
                assert all(len(replicas) == 1 for replicas in holders.values())
            ranks = [RankInfo(replica, dp, True, 0, "") for replica in range(dp)]
            taken = torch.isin(batch.responses.numbers(), torch.from_numpy(asked))
            expected = batch.response_tokens() * taken
            assert torch.equal(sharded.collect(ranks, results), torch.stack([expected, -expected], 1))


class Passes:
    """A batch of two mini-batches, and what each pass of two replicas over it puts into the object store."""

    def __init__(self):
        from skyrl_megatron.data.splitting import MINI_BATCH_PROMPTS, PROMPT_UIDS, mini_batches
        from skyrl_megatron.runtime.flops import ModelFlops

        self.batch, self.dp, self.flops = ragged_batch(0, RAGGED), 2, ModelFlops(1.0, 0.1, 0.0, 0)
        self.batch.metadata = {PROMPT_UIDS: self.batch.uids, MINI_BATCH_PROMPTS: 2}
        self.parts = mini_batches(self.batch, 2)

    def score(self):
        """Return (bytes that were put, what was dispatched)."""
        return self._put(lambda: self._dispatch(trains=False))

    def train(self):
        return self._put(lambda: [self._dispatch(rows) for rows in self.parts])

    def _dispatch(self, *args, **options):
        from skyrl_megatron.workers.dispatch import dispatch

        return dispatch(self.batch, self.dp, self.flops, *args, **options)

    def _put(self, work):
        before = 0 if self.batch.carried is None else self.batch.carried.put
        result = work()
        return self.batch.carried.put - before, result

    def arrives(self, passes, name):
        """Whether all ranks together have the batch's field."""
        import torch

        batch = self.batch
        expected = getattr(batch, name)
        seen = torch.zeros_like(expected)
        for sharded in passes:
            for share, rows in zip(sharded.shares, sharded.rows, strict=True):
                part = share.batch()
                for number, row in enumerate(rows.tolist()):
                    seen[batch.responses.of(row)] = getattr(part, name)[part.responses.of(number)]
        return torch.equal(seen, expected)


def test_what_a_batch_holds_is_put_once_for_all_passes(ray_slots):
    """Scoring puts what it reads, training the rest of what it reads, and a second pass of either nothing."""
    passes = Passes()
    batch, dp = passes.batch, passes.dp
    batch.advantages = None
    tokens, responses = len(batch.tokens), len(batch.loss_mask)
    routes = sum(each.nbytes for each in batch.rollout_routes if each is not None)
    supports = sum(each.ids.nbytes + each.counts.nbytes for each in batch.rollout_support)
    first, scored = passes.score()
    blocks, bits = 2 * dp, responses // 8 + 2 * dp  # a mask is a bit for each token
    assert len(batch.carried.blocks) == blocks
    per_row = 4 * 8 * len(batch)  # lengths of rows, responses, routes and supports
    # ids of narrow supports are widened where a row of their block is wide
    assert 4 * tokens + routes < first <= 4 * tokens + routes + 2 * supports + per_row + 2 * bits
    assert passes.score()[0] == 0
    extra, trained = passes.train()
    assert len(batch.carried.blocks) == blocks, "replicas train on the rows that they scored"
    for part, rows in zip(trained, passes.parts, strict=True):
        for of_scoring, of_training in zip(scored.rows, part.rows, strict=True):
            assert np.intersect1d(of_scoring, rows).tolist() == of_training.tolist()
    floats = 6 + 2 * 4  # six fields, four of the teacher's tokens and their ids
    assert 4 * floats * responses < extra <= 4 * floats * responses + bits + 3 * 8 * len(batch)
    assert passes.train()[0] == 0 and passes.score()[0] == 0, "another epoch"


def test_what_changed_is_put_again_and_nothing_else(ray_slots):
    """A field that was added, replaced, removed or changed in place."""
    import torch

    from skyrl_megatron.types import TokenSupport

    passes = Passes()
    batch = passes.batch
    advantages, batch.advantages = batch.advantages, None
    responses, bits = len(batch.loss_mask), len(batch.loss_mask) // 8 + 4
    passes.train()
    batch.advantages = advantages
    assert passes.train()[0] == 4 * responses, "added"
    kept = batch.carried.bytes
    batch.advantages = advantages.clone()
    assert passes.train()[0] == 4 * responses, "replaced"
    assert batch.carried.bytes == kept < batch.carried.put, "what was replaced is not there any more"
    batch.returns[3] = -7.0
    extra, trained = passes.train()
    assert extra == 4 * responses and passes.arrives(trained, "returns"), "changed in place"
    batch.advantages = batch.returns = advantages.clone()
    extra, trained = passes.train()
    assert extra == 4 * responses, "one tensor for both"
    assert passes.arrives(trained, "advantages") and passes.arrives(trained, "returns")
    batch.returns = advantages + 1.0
    extra, trained = passes.train()
    assert extra == 4 * responses, "no longer the same"
    assert passes.arrives(trained, "advantages") and passes.arrives(trained, "returns")
    batch.rewards += 1.0
    assert passes.train()[0] == 0, "no rank reads them"
    batch.loss_mask &= torch.arange(responses) % 2 == 0
    extra, trained = passes.train()
    assert 0 < extra <= bits and passes.arrives(trained, "loss_mask")
    routes = sum(each.nbytes for each in batch.rollout_routes if each is not None)
    batch.rollout_routes[1] = batch.rollout_routes[1] + np.uint16(1)
    extra, trained = passes.train()
    assert routes <= extra <= routes + 8 * len(batch), "an entry of a list"
    for part in trained:
        for share, rows in zip(part.shares, part.rows, strict=True):
            assert_same_rows(share.batch(), batch.select(rows), ["rollout_routes"])
    supports = sum(each.ids.nbytes + each.counts.nbytes for each in batch.rollout_support)
    support = batch.rollout_support[5]
    batch.rollout_support[5] = TokenSupport(support.ids, support.counts)
    assert supports <= passes.score()[0] <= 2 * supports + 8 * len(batch)
    earlier = passes.train()[1]
    batch.values = None
    extra, trained = passes.train()
    assert extra == 0 and all(share.batch().values is None for part in trained for share in part.shares), "removed"
    for part in earlier:  # a share has what was there when it was made
        assert all(share.batch().values is not None for share in part.shares)


def test_what_was_put_is_freed_with_the_batch(ray_slots):
    """Also what a changed field replaced, and the parts that were dispatched on their own."""
    import copy
    import gc

    import ray

    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.workers.dispatch import TRAINED, dispatch

    def counted():
        gc.collect()
        worker = ray._private.worker.global_worker.core_worker
        return {name.decode() for name in worker.get_all_reference_counts()}

    def references(sharded):
        return {each.hex() for share in sharded.shares for block in share.references for each, _ in block.values()}

    flops, before = ModelFlops(1.0, 0.1, 0.0, 0), counted()
    batch = ragged_batch(0, [(400, 3000)] * 4)  # as large as objects of their own in the store
    sharded = dispatch(batch, 2, flops)
    held = references(sharded)
    assert held and held <= counted() and not held & before
    for name in TRAINED:
        setattr(batch, name, copy.copy(getattr(batch, name)))
    again = dispatch(batch, 2, flops)
    assert not references(again) & held
    del sharded
    assert not counted() & held, "nobody reads what was replaced"
    part = batch.select([0, 2])
    alone = references(dispatch(part, 2, flops))
    held = references(again) | alone
    assert alone <= counted() and len(held) > len(alone)
    del part
    assert not counted() & alone
    del again, batch
    assert not counted() & held and counted() <= before


class Echo:
    """An engine class with nothing behind it."""

    def __init__(self, settings):
        self.settings = settings

    async def start(self):
        pass

    async def version(self):
        return self.settings, os.environ["CUDA_VISIBLE_DEVICES"]

    async def health(self):
        from skyrl_megatron.errors import RequestError

        raise RequestError("ill")

    async def openai(self, path, body):
        yield 200, path
        yield body


def test_an_engine_of_any_class_is_an_actor(ray_slots):
    import asyncio

    from skyrl_megatron.errors import EngineGoneError, RequestError
    from skyrl_megatron.workers.engines import RayEngine

    async def use():
        engine = RayEngine("settings", kind=Echo, environment={"CUDA_VISIBLE_DEVICES": "3,1"})
        await engine.start()
        assert await engine.version() == ("settings", "3,1")
        with pytest.raises(RequestError, match="ill"):
            await engine.health()
        assert [piece async for piece in engine.openai("/v1", b"body")] == [(200, "/v1"), b"body"]
        await engine.kill()
        with pytest.raises(EngineGoneError, match="the engine's actor died"):
            await engine.version()

    asyncio.run(use())


class Waiting(Echo):
    """An engine class that never answers, and counts who waits."""

    waiting = 0

    async def generate(self, request_id, prompt, sampling, adapter=""):
        import asyncio

        self.waiting += 1
        try:
            await asyncio.sleep(3600)
        finally:
            self.waiting -= 1

    async def openai(self, path, body):
        await self.generate("", (), {})
        yield 200, path

    async def worker_count(self):
        return self.waiting


@pytest.mark.parametrize("way", ["generate", "openai"])
def test_a_request_that_nobody_waits_for_ends_in_the_actor(ray_slots, way):
    import asyncio

    from skyrl_megatron.workers.engines import RayEngine

    async def use():
        engine = RayEngine("settings", kind=Waiting)
        await engine.start()

        async def until(count):
            async with asyncio.timeout(120):
                while await engine.worker_count() != count:
                    await asyncio.sleep(0.05)

        asks = engine.generate("one", [5], {}) if way == "generate" else anext(engine.openai("/v1", b"body"))
        asked = asyncio.ensure_future(asks)
        await until(1)
        asked.cancel()
        await until(0)
        await engine.kill()

    asyncio.run(use())


class Holder(Echo):
    """An engine class that starts a process, and holds memory which others may map."""

    async def start(self):
        import subprocess
        from multiprocessing.shared_memory import SharedMemory

        self.memory = SharedMemory(create=True, size=4096)
        self.child = subprocess.Popen(["sleep", "600"])

    async def version(self):
        return self.memory.name

    def process_ids(self):
        return [self.child.pid]


@pytest.mark.parametrize("how", ["engine", "Ray", "signal"])
def test_a_killed_engine_leaves_no_process_and_no_shared_memory(ray_slots, how):
    import asyncio

    import psutil
    import ray

    from skyrl_megatron.workers.engines import RayEngine

    async def use():
        engine = RayEngine("settings", kind=Holder)
        await engine.start()
        memory = Path("/dev/shm") / await engine.version()
        processes = [psutil.Process(pid) for pid in await engine.process_ids()]
        assert memory.exists() and len(processes) == 2
        if how == "engine":
            await engine.kill()
        elif how == "Ray":
            ray.kill(engine.actor)
        else:
            processes[0].kill()
            processes[1].kill()  # vLLM's processes see that their parent is gone
        async with asyncio.timeout(300):
            while memory.exists() or any(map(is_alive, processes)):
                await asyncio.sleep(0.1)

    asyncio.run(use())


def test_processes_of_another_host_are_killed_there(ray_slots):
    import asyncio
    import subprocess

    import ray

    from skyrl_megatron.workers.engines import _kill_on

    async def kill_one():
        await _kill_on(ray.get_runtime_context().get_node_id(), [victim.pid])

    with subprocess.Popen(["sleep", "600"]) as victim:
        asyncio.run(kill_one())
        assert victim.wait(300) == -9


def test_an_impossible_placement_says_what_is_missing(ray_slots):
    from skyrl_megatron.errors import LaunchError
    from skyrl_megatron.workers.placement import reserve

    with pytest.raises(LaunchError, match=r"no resources for the policy within 1 s: 9 CPU needed, 4 in the cluster"):
        reserve("the policy", [{"CPU": 1.0}] * 9, timeout_s=1.0)


def test_places_of_a_run(ray_slots, tmp_path):
    """Policy, reference and engine each have slots of their own on a CPU machine."""
    import ray

    from skyrl_megatron.config import SkyRLTrainConfig

    cfg = SkyRLTrainConfig.from_cli_overrides(
        {
            "trainer.placement.policy_num_gpus_per_node": 2,
            "trainer.placement.ref_num_gpus_per_node": 1,
            "trainer.placement.colocate_all": False,
            "trainer.placement.colocate_policy_ref": False,
        }
    )
    from skyrl_megatron.workers.placement import create_placement

    placement = create_placement(cfg)
    assert {who: len(each.bundles) for who, each in placement.allocations.items()} == {
        "policy": 2,
        "ref": 1,
        "engines": 1,
    }
    assert len({each.group.id for each in placement.allocations.values()}) == 3
    placement.remove()
    deadline = time.monotonic() + 300
    while ray.available_resources().get("CPU") != ray_slots and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == ray_slots


@pytest.mark.process
def test_an_address_without_a_cluster_is_one_message():
    import subprocess
    import sys

    code = (
        "from skyrl_megatron.config import SkyRLTrainConfig\n"
        "from skyrl_megatron.workers.ray_setup import initialize_ray\n"
        "from skyrl_megatron.command import run_command\n"
        "raise SystemExit(run_command(lambda: 0 * len(initialize_ray(SkyRLTrainConfig()))))\n"
    )
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=environment)
    assert result.returncode == 1
    assert "RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_actor_that_the_memory_monitor_ends_is_lost():
    """Ray's error for it is none of those of dead actors: engines and ranks are replaced all the same."""
    from ray.exceptions import OutOfMemoryError

    from skyrl_megatron.errors import DistributedError, EngineGoneError
    from skyrl_megatron.workers.actor_group import raise_rank_error
    from skyrl_megatron.workers.engines import _lost_actors

    ray_says = (
        "Task was killed due to the node running low on memory.\nMemory on the node (IP: 127.0.0.1, ID: 7f) where the "
        "lease (actor ID: 1, name=EngineActor.__init__, pid=8) was running was 22.91GB / 23.50GB (0.974894), which "
        "exceeds the memory usage threshold of 0.95."
    )
    with pytest.raises(EngineGoneError, match=r"ran out of memory: 22.91GB / 23.50GB in use; lower "):
        with _lost_actors():
            raise OutOfMemoryError(ray_says)
    with pytest.raises(DistributedError, match=r"policy rank 0, phase x: the process died \(Ray killed it because"):
        raise_rank_error(OutOfMemoryError(ray_says), "policy rank 0", "x")
