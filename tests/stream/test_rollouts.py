"""The stream of groups alone, in simulated time: no group is trained too late, twice, or lost, whatever happens."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.stream.clock import simulate

ROWS = 2


def limits_of(**changes):
    from skyrl_megatron.sources.rollout_stream import StreamLimits

    return replace(StreamLimits(batch=3, steps=8, bound=2, workers=64, timeout_s=500.0), **changes)


class World:
    """Engines that take as long as ``seconds`` says, a number and an attempt → seconds or an exception, and a trainer
    that takes ``train_s`` for each step."""

    def __init__(self, limits, seconds, *, train_s=1.0, useful=lambda number: True, **options):
        from skyrl_megatron.sources.rollout_stream import RolloutStream

        self.limits, self.seconds, self.train_s, self.published = limits, seconds, train_s, 0
        self.trained, self.ages, self.attempts, self.told, self.taken_at = [], [], {}, [], []
        self.most, self.sampling = 0, 0
        self.counts = {}
        self.stream = RolloutStream(
            self.sample,
            lambda number: {"uid": str(number)},
            limits,
            useful=lambda output: useful(output["number"]),
            say=self.told.append,
            **options,
        )

    async def sample(self, group):
        attempt = self.attempts[group.number] = self.attempts.get(group.number, -1) + 1
        begun = self.published
        assert group.started <= begun
        self.sampling += 1
        self.most = max(self.most, self.sampling)
        try:
            seconds = self.seconds(group.number, attempt)
            if isinstance(seconds, Exception):
                await asyncio.sleep(0.5)
                raise seconds
            await asyncio.sleep(seconds)
        finally:
            self.sampling -= 1
        spans = [(str(begun), 0, 2), (str(self.published), 2, 4)]
        return {"number": group.number, "loss_masks": [[1] * 4] * ROWS, "rollout_versions": [spans] * ROWS}

    async def train(self, steps, first=0, **state):
        """Take the steps, each with a sync at its end; returns the stream's last state."""
        self.published = first
        self.stream.start(first, **state)
        for version in range(first, first + steps):
            groups = await self.stream.take()
            self.taken_at.append(asyncio.get_running_loop().time())
            self.ages += self.stream.staleness(groups)
            self.trained.append([group.number for group in groups])
            await asyncio.sleep(self.train_s)
            for name, value in self.stream.metrics().items():
                self.counts[name] = self.counts.get(name, 0) + value
            self.stream.trained(groups)
            self.published = version + 1
            await asyncio.sleep(0.01)
            self.stream.advance(version + 1)
        state = self.stream.state()
        await self.stream.close()
        return state


DELAYS = st.one_of(st.floats(0.0, 3.0), st.floats(0.0, 40.0), st.just(None))


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 5),
    bound=st.integers(1, 4),
    workers=st.integers(1, 12),
    ahead=st.sampled_from([None, 1.0, 1.5]),
    policy=st.sampled_from(["wait", "drop", "retry"]),
    train_s=st.floats(0.0, 5.0),
    delays=st.lists(DELAYS, min_size=4, max_size=40),
    useless=st.sets(st.integers(0, 60)),
)
def test_the_bound_holds_and_no_prompt_is_lost(batch, bound, workers, ahead, policy, train_s, delays, useless):
    """None among the delays is a group that fails. The oldest token of each is as old as it can be: of the version
    that was published when it began."""
    steps = 8
    limits = limits_of(batch=batch, steps=steps, bound=bound, workers=workers, ahead=ahead, stale_policy=policy)

    def seconds(number, attempt):
        delay = delays[(number + 7 * attempt) % len(delays)]
        return ValueError("broken") if delay is None else delay

    world = World(limits, seconds, train_s=train_s, useful=lambda number: number not in useless)
    failing = delays.count(None)
    assume(failing == len(delays) or 2 * failing < len(delays))  # 32 in a row end the run: a test of its own
    if failing == len(delays):
        from skyrl_megatron.errors import DataError

        with pytest.raises(DataError, match="failed one after another"):
            simulate(world.train(steps))
        return
    state, _ = simulate(world.train(steps))
    assert max(world.ages) <= bound and min(world.ages) >= 0
    assert world.most <= workers
    trained = [number for numbers in world.trained for number in numbers]
    assert len(trained) == len(set(trained)) == batch * steps, "each step has a whole batch, and no group comes twice"
    assert set(trained).isdisjoint(useless)
    given_up = world.counts["async/dropped_groups"] + world.counts["async/failed_groups"]
    given_up += world.counts["async/filtered_groups"]
    done = set(range(state["oldest"])) | set(state["ahead"])
    assert set(trained) <= done, "what was trained is done"
    assert len(done) == len(trained) + given_up, "what is done was trained, or is counted"
    if policy == "wait":
        assert world.counts["async/dropped_groups"] == world.counts["async/retried_groups"] == 0


def test_groups_that_became_due_together_do_not_break_the_bound():
    """Eight slow groups of version 0, four of which must be trained before the others are the only ones left."""
    world = World(limits_of(batch=4, bound=2), lambda number, _: 20.0 if 4 <= number < 12 else 0.1)
    simulate(world.train(8))
    assert max(world.ages) == 2
    world = World(
        limits_of(batch=4, bound=2, stale_policy="retry"), lambda number, n: 20.0 if 4 <= number < 12 else 0.1
    )
    simulate(world.train(4))
    assert max(world.ages) <= 2 and world.counts["async/retried_groups"] > 0


def test_a_straggler_delays_its_group_alone():
    """One group in each batch takes eight times as long, which is within the bound: no step waits for it."""
    fast, steps = 1.0, 24

    def run(slow):
        limits = limits_of(batch=4, bound=4, steps=steps + 8)
        world = World(limits, lambda number, _: slow if number % 4 == 0 else fast, train_s=3.0)
        simulate(world.train(steps))
        return world.taken_at[-1] - world.taken_at[8]

    assert run(8 * fast) == run(fast)


def test_sampling_and_training_overlap():
    limits = limits_of(batch=4, bound=1, steps=20)
    world = World(limits, lambda *_: 1.0, train_s=1.0)
    simulate(world.train(20))
    apart = [later - before for before, later in zip(world.taken_at[2:], world.taken_at[3:], strict=False)]
    assert max(apart) < 1.1, "a step takes as long as the longer of the two"


@pytest.mark.parametrize(("sample_s", "ahead", "ages"), [(0.2, None, {4}), (0.2, 1.0, {1}), (0.2, 2.0, {2})])
def test_samples_are_no_older_than_they_have_to_be(sample_s, ahead, ages):
    """With fast engines every bound fills up, unless the groups are started for a batch or two ahead only."""
    world = World(limits_of(steps=12, bound=4, ahead=ahead), lambda number, attempt: sample_s, train_s=2.0)
    _, seconds = simulate(world.train(12))
    assert set(world.ages[-18:]) == ages
    assert seconds == pytest.approx(12 * 2.01 + sample_s, abs=0.2), "training waits for the first batch alone"


def test_slow_groups_leave_room_for_others():
    """A group of many steps does not count: the batches ahead are sampled beside it."""
    world = World(
        limits_of(steps=12, bound=4, ahead=2.0), lambda number, attempt: 7.0 if number % 10 == 4 else 0.2, train_s=2.0
    )
    _, seconds = simulate(world.train(12))
    assert seconds < 12 * 2.01 + 6.0
    assert sorted(world.ages)[len(world.ages) // 2] == 2 and max(world.ages) <= 4
    assert sorted(number for step in world.trained for number in step) == list(range(36))


def test_a_run_that_goes_on_trains_every_prompt_once():
    """From the state that a checkpoint has, in which younger prompts are trained and an older one is not."""
    slow = lambda number, _: 10.0 if number == 0 else 1.0  # noqa: E731
    first = World(limits_of(steps=6), slow)
    state, _ = simulate(first.train(2))
    assert state == {"oldest": 0, "ahead": [1, 2, 3, 4, 5, 6]}
    second = World(limits_of(steps=6), lambda *_: 1.0)
    simulate(second.train(4, first=2, **state))
    trained = [number for numbers in first.trained + second.trained for number in numbers]
    assert sorted(trained) == list(range(18))
    assert set(second.attempts) == set(trained) - set(range(1, 7)), "nothing that is trained is sampled again"


def test_finished_groups_of_a_log_are_not_sampled_again():
    """A group is told before it can be taken, and one that is not safe ends the run."""
    kept = []

    class Log:
        async def finished(self, group):
            await asyncio.sleep(0.2)
            kept.append(group)

    world = World(limits_of(steps=4), lambda *_: 1.0, group_log=Log())
    state, _ = simulate(world.train(1))
    later = World(limits_of(steps=4), lambda *_: 1.0)
    later.stream.restore(kept)
    simulate(later.train(3, first=1, **state))
    assert {group.number for group in kept} > {0, 1, 2}, "some were finished that are not trained"
    assert not set(later.attempts) & {group.number for group in kept}
    assert sorted(n for numbers in world.trained + later.trained for n in numbers) == list(range(12))

    class Full:
        async def finished(self, group):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        simulate(World(limits_of(), lambda *_: 1.0, group_log=Full()).train(1))


def test_a_group_that_was_lost_with_its_host_is_sampled_again():
    """What an engine sampled is in the memory of its host until it is recorded."""
    from skyrl_megatron.errors import RowsLostError

    lost = RowsLostError("in the memory of a host that was lost")

    left = {1, 4}

    class Log:
        async def finished(self, group):
            if group.number in left:
                left.remove(group.number)
                raise lost

    world = World(limits_of(steps=4), lambda number, n: lost if (number, n) == (5, 0) else 1.0, group_log=Log())
    simulate(world.train(4))
    assert sorted(n for numbers in world.trained for n in numbers) == list(range(12))
    assert {number for number, attempt in world.attempts.items() if attempt} == {1, 4, 5}
    assert world.counts["async/retried_groups"] == 3 and world.counts["async/failed_groups"] == 0
    assert "prompt 1 is sampled again: RowsLostError: in the memory of a host that was lost" in world.told


def test_failures_cost_their_groups_until_nothing_else_happens():
    from skyrl_megatron.errors import DataError, DistributedError, EngineError

    broken = ValueError("the environment broke")
    world = World(limits_of(), lambda number, _: broken if number % 2 else 1.0)
    simulate(world.train(8))
    assert world.counts["async/failed_groups"] >= 22
    assert world.told[0] == "prompt 1 is skipped: ValueError: the environment broke"
    with pytest.raises(DataError, match="32 groups failed one after another, the last one: ValueError: the env"):
        simulate(World(limits_of(), lambda *_: broken).train(1))
    with pytest.raises(EngineError, match="no engine is left"):
        simulate(World(limits_of(), lambda *_: EngineError("no engine is left")).train(1))
    hangs = World(limits_of(), lambda number, _: 1e9 if number == 1 else 1.0)
    simulate(hangs.train(8))
    assert hangs.told == ["prompt 1 is skipped: not sampled within trainer.phase_timeout_s"]
    deaf = World(limits_of(), lambda *_: 1.0)

    async def never(group):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1e9)
        await asyncio.sleep(1e9)

    deaf.stream.sample = never
    with pytest.raises(DistributedError, match="no group finished within 500 s"):
        simulate(deaf.train(1))


def test_filtering_has_a_limit():
    from skyrl_megatron.errors import DataError

    with pytest.raises(DataError, match="max_sample_batches=2"):
        simulate(World(limits_of(sample_batches=2), lambda *_: 1.0, useful=lambda number: False).train(1))


@pytest.mark.parametrize("adaptive", [False, True])
def test_no_more_is_sampled_than_engines_have_places_for(adaptive):
    """Twelve places and groups of three: without a limit groups wait in the engine, and are older when they are
    trained; with one the engine is as busy, and they are younger. It finds the limit from far below and far above."""
    from skyrl_megatron.sources.staleness import Concurrency

    places, samples, held = 12, 3, []
    limits = limits_of(batch=4, bound=4, steps=12)
    engine = asyncio.Semaphore(places)

    async def sample(group):
        held.append(group.number)
        try:

            async def one():
                async with engine:
                    await asyncio.sleep(0.8 + 0.1 * (group.number * 7 % 5))

            await asyncio.gather(*(one() for _ in range(samples)))
        finally:
            held.remove(group.number)
        return {"number": group.number, "loss_masks": [[1] * 4] * ROWS, "rollout_versions": None}

    def run():
        free = (lambda: places - samples * len(held)) if adaptive else None
        world = World(limits, None, train_s=1.0, concurrency=Concurrency(limits.workers, free, samples))
        world.stream.sample = sample
        simulate(world.train(12))
        return world

    world = run()
    assert len([n for numbers in world.trained for n in numbers]) == 48
    late = world.ages[4 * 4 :]
    assert world.taken_at[-1] == pytest.approx(12.0, abs=1.5), "the engine is never idle"
    assert (sum(late) / len(late) < 2.5) is adaptive
    if adaptive:
        assert world.stream.concurrency.limit <= places // samples + 1


def test_the_limit_is_found_from_both_sides():
    from skyrl_megatron.sources.staleness import Concurrency

    running, free = 0, 0
    limit = Concurrency(20, lambda: free, 2)
    free = 7
    limit.start()
    assert limit.limit == 3
    running = 3
    for _ in range(30):  # places of ten groups turn up
        free = 20 - 2 * (running - 1)
        limit.measure(running - 1)
        running = limit.limit
    assert limit.limit in (10, 11)
    for _ in range(30):  # and all but four groups' go
        free = 8 - 2 * (running - 1)
        limit.measure(running - 1)
        running = limit.limit
    assert limit.limit in (4, 5)
    free = -99
    for _ in range(9):
        limit.measure(0)
    assert limit.limit == 1
