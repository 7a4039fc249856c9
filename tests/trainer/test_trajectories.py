"""Trajectories that are cut off go on in the next life, behind their recorded turns: real generator, environments and
store, with an engine whose tokens are known."""

import asyncio

import pytest

from tests.rollout.scripted import ScriptedEngine, generator_of
from tests.rollout.test_replayed_episodes import assert_same, words
from tests.trainer.test_durable import config

UID, NUMBER = "5", 5
PROMPT = [{"role": "user", "content": "What is 3 + 4?"}]
EXTRAS = {"reward_spec": {"method": "rule", "ground_truth": "7"}}
SAID = {
    f"{UID}_0": ["hm", "#### 6", "#### 8", "#### 7"],
    f"{UID}_1": ["#### 7"],
    f"{UID}_2": ["well", "#### 5", "#### 7"],
}


class Cut(ScriptedEngine):
    """Answers so many requests, and then none: ``stuck`` is set when one waits."""

    def __init__(self, answers):
        said = {session: [words(text, versions=[("3", 0, 2)]) for text in texts] for session, texts in SAID.items()}
        super().__init__(lambda session: said[session])
        self.left, self.stuck = answers, asyncio.Event()

    async def generate(self, prompt_token_ids, sampling_params, session_ids=None):
        if not self.left:
            self.stuck.set()
            await asyncio.Event().wait()
        self.left -= 1
        return await super().generate(prompt_token_ids, sampling_params, session_ids)


class Life:
    """A process in small: it samples the group until it is done or cut off."""

    def __init__(self, folder, answers=99, env_class="gsm8k_multi_turn", version=3, **changes):
        from skyrl_megatron.sources.store import DurableGroups

        self.engine, self.env_class, self.version, self.kept = Cut(answers), env_class, version, 0
        self.groups = DurableGroups(config(folder, **changes), lambda number: 0, fresh=False)

    def counted(self, method):
        async def call(*arguments):
            await method(*arguments)
            self.kept += 1

        return call

    async def live(self):
        """Returns the output, or None where it was cut off."""
        from skyrl_megatron.rollout.interface import TrajectoryID
        from skyrl_megatron.sources.group import Group

        entry = {"uid": UID, "prompt": PROMPT}
        kept = await self.groups.recover(self.version, lambda number, uid: entry)
        self.begun = dict(kept.begun)
        partial = self.groups._begun[NUMBER].samples if self.begun else {}
        self.known = {f"{UID}_{sample}": each for sample, each in partial.items()}
        self.engine.turns = {session: len(each.turns) - 1 for session, each in self.known.items()}
        group = Group(NUMBER, entry, min(kept.begun.get(NUMBER, self.version), self.version))
        log = await self.groups.trajectories(group, 3)
        log.turn, log.finished = self.counted(log.turn), self.counted(log.finished)
        batch = {
            "prompts": [PROMPT] * 3,
            "env_classes": [self.env_class] * 3,
            "env_extras": [EXTRAS] * 3,
            "sampling_params": None,
            "trajectory_ids": [TrajectoryID(UID, sample) for sample in range(3)],
            "batch_metadata": None,
            "trajectory_log": log,
        }
        work = asyncio.create_task(generator_of("chatml", self.engine).generate(batch, disable_tqdm=True))
        stuck = asyncio.create_task(self.engine.stuck.wait())
        await asyncio.wait({work, stuck}, return_when=asyncio.FIRST_COMPLETED)
        stuck.cancel()
        if not work.done():
            async with asyncio.timeout(60):  # until what was answered is kept
                while self.kept < sum(map(len, self.engine.calls)):
                    await asyncio.sleep(0.01)
            work.cancel()
            await asyncio.wait({work})
        await self.groups.close()
        return None if work.cancelled() else work.result()


async def lives(folder, cuts, **options):
    """Lives that are cut off after so many answers each, and one that is not; returns all of them and the output."""
    made, output = [], None
    for answers in [*cuts, 99]:
        made.append(Life(folder, answers, **options))
        output = await made[-1].live()
    return made, output


def rows(output):
    names = ("response_ids", "loss_masks", "rollout_logprobs", "rewards", "stop_reasons", "rollout_versions", "errors")
    return [dict(zip(names, row, strict=True)) for row in zip(*(output[name] for name in names), strict=True)]


@pytest.mark.parametrize("cuts", [[1], [2], [5], [7], [1, 1, 1, 1], [3, 0, 2]], ids=str)
def test_no_turn_is_sampled_twice(tmp_path, cuts):
    async def body():
        _, whole = await lives(tmp_path / "whole", [])
        made, output = await lives(tmp_path / "cut", cuts)
        assert_same(rows(output), rows(whole))
        requests = [session for life in made for call in life.engine.calls for session in call]
        assert sorted(requests) == sorted(session for session, said in SAID.items() for _ in said)
        going_on = sum(bool(each.turns) and each.trajectory is None for each in made[-1].known.values())
        assert made[-1].groups.metrics() == {
            "async/resumed_trajectories": float(going_on),
            "async/restarted_trajectories": 0.0,
        }

    asyncio.run(body())


def test_the_oldest_version_stays_that_of_the_first_turn(tmp_path):
    async def body():
        await Life(tmp_path, 2, version=3).live()
        later = Life(tmp_path, 0, version=3, max_staleness_steps=2)
        await later.live()
        assert later.begun == {NUMBER: 3}

    asyncio.run(body())


def test_turns_too_old_for_the_bound_are_sampled_again(tmp_path):
    async def body():
        from skyrl_megatron.sources.records import ScheduledStep

        first = Life(tmp_path, 4, version=0)
        await first.live()
        moved = Life(tmp_path, 99, version=0)
        for step in (1, 2, 3):
            await moved.groups.store.schedule.record(ScheduledStep(step, []))
        await moved.groups.close()
        again = Life(tmp_path, 99, version=3, max_staleness_steps=2)
        output = await again.live()
        assert not again.begun and not again.known
        assert sum(map(len, again.engine.calls)) == sum(map(len, SAID.values()))
        assert len(output["response_ids"]) == 3
        later = Life(tmp_path, 0, version=3)
        await later.live()
        assert later.begun == {NUMBER: 3}, "what was too old is gone"

    asyncio.run(body())


@pytest.mark.parametrize("env_class, why", [("counting", "answers otherwise"), ("ordering", "is not replayable")])
def test_what_cannot_go_on_is_counted(tmp_path, env_class, why):
    """Environments that answer otherwise, or declare that they are not replayable, restart."""

    async def body():
        await Life(tmp_path, 2, env_class).live()
        second = Life(tmp_path, 3, env_class)
        second.engine.script = [words(str(i)) for i in range(9)]
        await second.live()
        begun = sum(bool(each.turns) for each in second.known.values())
        assert begun == 2, why
        assert second.groups.metrics()["async/restarted_trajectories"] == float(begun)

    asyncio.run(body())


def test_another_prompt_in_its_place_is_refused(tmp_path):
    from skyrl_megatron.errors import JournalError

    async def body():
        await Life(tmp_path, 2).live()
        other = Life(tmp_path)
        with pytest.raises(JournalError, match="group 5 is of prompt 5, but the data has 6 there"):
            await other.groups.recover(3, lambda number, uid: {"uid": "6"})
        await other.groups.close()

    asyncio.run(body())
