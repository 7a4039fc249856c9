"""The store of groups: nothing lost, nothing twice, whatever ends the process."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_megatron.errors import DataError, JournalError
from tests.trainer import store_runner
from tests.trainer.lives import killed
from tests.trainer.store_runner import group_of

LIVES = 8


def store_in(folder, **options):
    from skyrl_megatron.sources.store import GroupStore

    return GroupStore(folder, **options)


def turn_of(token):
    from skyrl_megatron.inference.protocol import Generation
    from skyrl_megatron.rollout.interface import RecordedTurn

    generation = Generation([token, 1], [-0.5, -0.25], "stop", [("2", 0, 2)])
    answer = {"observations": [{"role": "user", "content": "on"}], "reward": 0.0, "done": False}
    return RecordedTurn(0, np.asarray([5, 6], np.int32), generation, answer)


def test_finished_groups_come_back_until_a_checkpoint_has_them(tmp_path):
    async def first():
        store = store_in(tmp_path)
        for number in (1, 0, 2, 3, 4, 5):
            await store.finished(group_of(number))
        await store.trained(1, [0, 1])
        await store.trained(2, [3, 2], left_out=[2])
        store.close()

    async def second(step, expected):
        store = store_in(tmp_path)
        recovered = await store.recover(step)
        assert (sorted(recovered.consumed), recovered.finished, recovered.partial) == expected
        groups = [store.read(number).output["response_ids"][0].tolist() for number in recovered.finished]
        assert groups == [[number] * 5 for number in recovered.finished]
        store.close()

    asyncio.run(first())
    asyncio.run(second(2, ([0, 1, 2, 3], [4, 5], {})))
    asyncio.run(second(1, ([0, 1], [3, 2, 4, 5], {})))
    asyncio.run(second(1, ([0, 1], [3, 2, 4, 5], {})))  # also when it is lost twice


def test_what_checkpoints_could_need_stays(tmp_path):
    async def body():
        store = store_in(tmp_path, segment_bytes=2000)
        for step in range(1, 21):
            await store.finished(group_of(step))
            await store.trained(step, [step])
            if step % 5 == 0:
                await store.checkpoints([step - 5, step] if step > 5 else [step])
        held = sum(store.journal.log.sizes.values())
        store.close()
        store = store_in(tmp_path)
        recovered = await store.recover(15)
        assert recovered.finished == [16, 17, 18, 19, 20] and sorted(recovered.consumed) == list(range(1, 16))
        store.close()
        store = store_in(tmp_path)
        with pytest.raises(JournalError, match=r"groups that were trained after step 5 are gone \(the first is"):
            await store.recover(5)
        assert held < 20_000
        store.close()

    asyncio.run(body())


def test_a_store_that_is_older_than_the_checkpoint(tmp_path):
    async def body():
        store = store_in(tmp_path)
        await store.finished(group_of(0))
        await store.trained(1, [0])
        with pytest.raises(JournalError, match="ends with step 1, but the run resumes from step 2"):
            await store.recover(2)
        store.close()

    asyncio.run(body())


def test_turns_and_trajectories_of_unfinished_groups(tmp_path):
    from skyrl_megatron.rollout.conversation import TrajectoryOutput
    from skyrl_megatron.rollout.episode import Trajectory
    from skyrl_megatron.sources.records import FinishedTrajectory, PartialTurn

    row = TrajectoryOutput(np.ones(2, np.int32), np.ones(3, np.int32), np.ones(3, np.uint8), [0.0, 0.0, 1.0], "stop")

    def piece(number, repetition, place, token, started=4):
        return PartialTurn(number, f"uid-{number}", started, repetition, place, turn_of(token))

    async def first():
        store = store_in(tmp_path)
        await store.add(piece(7, 0, 0, 10))
        await store.add(piece(7, 1, 0, 20))
        await store.add(piece(7, 0, 1, 11, started=3))
        await store.add(piece(7, 1, 0, 30))  # begun anew
        await store.add(piece(8, 0, 0, 40))
        await store.add(FinishedTrajectory(8, "uid-8", 2, 0, Trajectory([row], 1)))
        await store.add(piece(9, 0, 0, 50))
        await store.finished(group_of(9))
        await store.add(piece(10, 0, 0, 60))
        await store.discard(10)
        await store.add(piece(10, 0, 1, 61))  # was being written when the attempt ended
        await store.add(piece(10, 0, 0, 70))
        await store.finished(group_of(11))
        await store.discard(11)
        store.close()

    async def second():
        store = store_in(tmp_path)
        recovered = await store.recover(0)
        assert recovered.finished == [9] and sorted(recovered.partial) == [7, 8, 10]
        assert {number: (group.uid, group.started) for number, group in recovered.partial.items()} == {
            7: ("uid-7", 3), 8: ("uid-8", 2), 10: ("uid-10", 4)
        }  # fmt: skip
        said = {
            (number, repetition): [turn.generation.token_ids[0] for turn in partial.turns]
            for number, group in recovered.partial.items()
            for repetition, partial in group.samples.items()
        }
        assert said == {(7, 0): [10, 11], (7, 1): [30], (8, 0): [40], (10, 0): [70]}
        assert recovered.partial[7].samples[0].turns[0].generation == turn_of(10).generation
        trajectory = recovered.partial[8].samples[0].trajectory
        assert trajectory.rows[0].reward == [0.0, 0.0, 1.0] and recovered.partial[7].samples[0].trajectory is None
        await store.add(piece(7, 0, 2, 12))
        await store.finished(group_of(11))
        store.close()
        store = store_in(tmp_path)
        turns = (await store.recover(0)).partial[7].samples[0].turns
        assert [turn.generation.token_ids[0] for turn in turns] == [10, 11, 12]
        assert store.read(11).number == 11
        store.close()

    asyncio.run(first())
    asyncio.run(second())


def test_what_cannot_be_recorded_costs_its_group_alone(tmp_path):
    async def body():
        store, broken = store_in(tmp_path), group_of(1)
        broken.output["env_metrics"] = [{"when": object()}]
        made = await asyncio.gather(*map(store.finished, (group_of(0), broken, group_of(2))), return_exceptions=True)
        assert made[0] is made[2] is None and not store.holds(1)
        assert isinstance(made[1], DataError) and "env_metrics[0].when is a builtins.object" in str(made[1])
        store.close()

    asyncio.run(body())


def test_the_schedule_is_read_back_for_a_replay(tmp_path):
    from skyrl_megatron.sources.records import Schedule

    async def body():
        store = store_in(tmp_path, keep_consumed=True, segment_bytes=1000)
        for number in range(6):
            await store.finished(group_of(number))
        for step, numbers in enumerate([[1, 0], [2, 4], [5, 3]], start=1):
            await store.trained(step, numbers, left_out=[4])
            await store.checkpoints([step])
        store.close()
        store = store_in(tmp_path, keep_consumed=True)
        await store.recover(2)
        await store.trained(3, [3, 5])
        store.close()

    asyncio.run(body())
    schedule = Schedule(tmp_path / "schedule")
    schedule.close()
    steps = [schedule.steps[step] for step in sorted(schedule.steps)]
    trained = [[group.number for group in step.groups if group.trained] for step in steps]
    assert trained == [[1, 0], [2], [3, 5]]
    assert steps[0].groups[0].versions == group_of(1).output["rollout_versions"]
    store = store_in(tmp_path)
    assert [store.read(number).number for step in trained for number in step] == [1, 0, 2, 3, 5]
    store.close()


@pytest.mark.process
def test_killed_at_any_time_no_group_is_lost_or_trained_twice(tmp_path):
    """A run's life: sample, train, save, and be killed. The checkpoint is a file that holds the numbers of all groups
    that were trained, as weights would. After every kill the next life goes on from it."""
    rng = random.Random(1)
    sampled: list[int] = []
    for life in range(LIVES):
        said = killed(store_runner.run, str(tmp_path), life, after=rng.randrange(5, 80))
        sampled += [what[1] for what in said if what[0] == "finished"]
    assert len(sampled) == len(set(sampled)) > 5 * LIVES  # nothing that was finished is sampled again
    trained = store_runner.checkpoint(tmp_path)[1]
    assert len(trained) == len(set(trained)) > LIVES
    store = store_in(tmp_path / "store")
    recovered = asyncio.run(store.recover(store_runner.checkpoint(tmp_path)[0]))
    store.close()
    assert recovered.consumed == set(trained)
    assert set(sampled) <= recovered.consumed | set(recovered.finished)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_life_against_a_model(data, tmp_path_factory):
    """Finishing, training, saving and resuming from any checkpoint that is kept, against sets in memory."""
    folder = tmp_path_factory.mktemp("store")

    async def live():
        store = store_in(folder, segment_bytes=1500)
        number, step, finished, consumed, planned = 0, 0, [], {}, []
        saved = {0: 0}
        for _ in range(data.draw(st.integers(1, 20))):
            action = data.draw(st.sampled_from(["finish", "finish", "train", "save", "resume"]))
            waiting = [each for each in finished if each not in consumed]
            if action == "finish":
                await store.finished(group_of(number))
                finished.append(number)
                number += 1
            elif action == "train" and waiting:
                step += 1
                taken = data.draw(st.lists(st.sampled_from(waiting), unique=True, min_size=1, max_size=3))
                consumed |= dict.fromkeys(taken, step)
                await store.trained(step, taken)
                planned = [each for each in planned if each not in taken]
            elif action == "save" and step:
                saved[step] = step
                saved = {each: each for each in sorted(saved)[-2:]}
                await store.checkpoints(saved)
            elif action == "resume":
                step = data.draw(st.sampled_from(sorted(saved)))
                saved = {each: each for each in saved if each <= step}
                store.close()
                store = store_in(folder, segment_bytes=1500)
                recovered = await store.recover(step)
                lost = [each for each, at in consumed.items() if at > step]
                lost.sort(key=lambda each: consumed[each])
                consumed = {each: at for each, at in consumed.items() if at <= step}
                assert recovered.consumed == set(consumed)
                planned = lost + planned
                others = [each for each in finished if each not in consumed and each not in planned]
                assert recovered.lost == len(planned) and recovered.finished == planned + others
        store.close()

    asyncio.run(live())
