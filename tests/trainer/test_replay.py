"""Rollouts of a run that is over, handed out again: the same groups in the same steps."""

import asyncio
import random

import pytest

from skyrl_megatron.errors import CheckpointError, ConfigError, JournalError
from tests.trainer.store_runner import group_of
from tests.trainer.test_durable import BATCH, STEPS, Life, config, prompt


def recorded(folder, seed=3):
    """Step → (group, its tokens), of a run in a folder that lived several times."""
    rng, taken, checkpoint = random.Random(seed), {}, (0, {"oldest": 0, "ahead": []})
    while checkpoint[0] < STEPS:
        life = Life(folder, "wait", rng, keep_rollouts=True)
        checkpoint = asyncio.run(life.live(checkpoint, taken, rng.randrange(2, 8)))
    return taken, checkpoint[1]


def replay_config(folder, **changes):
    cfg = config(folder / "replay", replay_from=str(folder / "rollouts"), **changes)
    cfg.trainer.train_batch_size = BATCH
    return cfg


def replayed(cfg):
    from skyrl_megatron.sources.replayed import ReplayedRollouts

    return ReplayedRollouts(cfg, prompt)


async def replay(stream, step, place):
    taken = {}
    stream.start(step, **place)
    for version in range(step, stream.last_step):
        batch = await stream.take()
        taken[version] = [(group.number, group.output["response_ids"]) for group in batch]
        assert 0 <= min(stream.staleness(batch))
        assert stream.trained(batch) == []
        stream.advance(version + 1)
    await stream.close()
    return taken, stream.state()


def test_each_step_takes_what_it_took(tmp_path):
    """Over lives that were cut off: what came to nothing does not count. The place in the data is the run's too."""
    taken, place = recorded(tmp_path)
    stream = replayed(replay_config(tmp_path))
    stream.check(0)
    assert stream.last_step == STEPS
    again, end = asyncio.run(replay(stream, 0, {"oldest": 0, "ahead": []}))
    assert again == taken and end == place


def freed(folder):
    """Rollouts of twelve steps, of which checkpoints have freed all but the last ones."""
    from skyrl_megatron.sources.store import GroupStore

    async def run():
        store = GroupStore(folder, segment_bytes=600)
        for step in range(1, STEPS + 1):
            numbers = range(BATCH * (step - 1), BATCH * step)
            for number in numbers:
                await store.finished(group_of(number))
            await store.trained(step, numbers)
            await store.checkpoints([step - 3, step] if step > 3 else [step])
        store.close()

    asyncio.run(run())


def test_from_a_checkpoint_what_it_needs_is_there(tmp_path):
    """Without ``keep_rollouts`` only the steps behind the last checkpoints are; asking for others says so."""
    freed(tmp_path / "rollouts")
    stream = replayed(replay_config(tmp_path))
    stream.recall = lambda number, uid: {"uid": f"uid-{number}"}
    with pytest.raises(ConfigError, match=r"no longer has 3 groups of step 1: .* or record with .*keep_rollouts=true"):
        stream.check(0)
    stream.check(STEPS - 3)
    stream.start(STEPS - 3, oldest=BATCH * (STEPS - 3))
    for step in range(STEPS - 3, STEPS):
        stream.advance(step)
        assert [group.number for group in asyncio.run(stream.take())] == [BATCH * step + i for i in range(BATCH)]
    stream.store.close()


def test_what_cannot_be_replayed_is_told(tmp_path):
    from skyrl_megatron.sources.store import DurableGroups

    recorded(tmp_path)
    for folder, said in (
        ("nowhere", "has no folder groups: set it to the rollouts"),
        ("rollouts", "is where this run"),
    ):
        cfg = config(tmp_path, replay_from=str(tmp_path / folder))
        with pytest.raises(ConfigError, match=f"trainer.fully_async.replay_from={tmp_path}/{folder}: {said}"):
            replayed(cfg)
    stream = replayed(replay_config(tmp_path))
    with pytest.raises(ConfigError, match="ends with step 12, but this run continues after step 12"):
        stream.check(12)
    with pytest.raises(CheckpointError, match="is already being written by this process"):
        replayed(replay_config(tmp_path))
    stream.recall = lambda number, uid: {"uid": "other"}
    with pytest.raises(JournalError, match=r"group \d+ is of prompt \d+, but the data has other there: replay with"):
        asyncio.run(replay(stream, 0, {}))
    stream.store.close()

    other = replay_config(tmp_path)
    other.generator.n_samples_per_prompt += 1
    stream = replayed(other)
    with pytest.raises(
        ConfigError, match=r"n_samples_per_prompt=\d: .* was recorded with \d: set generator.n_samples"
    ):
        stream.check(0)
    stream.store.close()

    changed = replay_config(tmp_path)
    changed.trainer.policy.optimizer_config.lr = 0.5
    changed.trainer.eval_interval = 77
    stream = replayed(changed)
    stream.check(0)
    different = {key: here for key, _, here in stream.differences()}
    assert different == {"trainer.policy.optimizer_config.lr": 0.5}, "what leaves the numbers alone is not told"
    stream.store.close()

    empty = config(tmp_path / "empty")
    DurableGroups(empty, lambda number: 0, fresh=True).store.close()
    cfg = config(tmp_path / "replay", replay_from=str(tmp_path / "empty/rollouts"))
    with pytest.raises(ConfigError, match="ends with step 0"):
        replayed(cfg).check(0)


@pytest.mark.around
def test_the_check_tells_it_before_the_run(tmp_path):
    from skyrl_megatron.checks import PlannedRun
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron_observe.preflight.machine_checks import replay as check

    freed(tmp_path / "rollouts")
    cfg = replay_config(tmp_path, enabled=True)
    (problem,) = check(PlannedRun(cfg, Hardware(0)))
    assert problem.key == "trainer.fully_async.replay_from" and "of step 1" in problem.fix
    cfg.trainer.fully_async.replay_from = None
    assert not list(check(PlannedRun(cfg, Hardware(0))))
