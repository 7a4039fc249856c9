"""The stream and its groups on disk together: lives that end anywhere between two checkpoints."""

import asyncio
import random

import pytest

from skyrl_megatron.errors import CheckpointError, JournalError

BATCH, STEPS, BOUND = 3, 12, 2


def config(folder, **changes):
    from skyrl_megatron.config import SkyRLTrainConfig

    cfg = SkyRLTrainConfig()
    cfg.trainer.ckpt_path = str(folder)
    for name, value in changes.items():
        setattr(cfg.trainer.fully_async, name, value)
    return cfg


def durable(folder, *, fresh=False, **changes):
    from skyrl_megatron.sources.store import DurableGroups

    cfg = config(folder, **changes)
    cfg.trainer.train_batch_size = BATCH
    return DurableGroups(cfg, lambda number: number // 60, fresh=fresh)


def prompt(number, uid=None):
    return {"uid": str(number % 60)}


class Life:
    """A process in small: it goes on from (step, place of its stream) and trains until it is cut off."""

    def __init__(self, folder, policy, rng, **changes):
        from skyrl_megatron.sources.rollout_stream import RolloutStream, StreamLimits

        self.rng, self.published = rng, 0
        self.sampled, self.ages, self.recovered = [], [], []
        self.groups = durable(folder, **changes)
        limits = StreamLimits(batch=BATCH, steps=STEPS, bound=BOUND, workers=8, stale_policy=policy)
        self.stream = RolloutStream(self.sample, prompt, limits, group_log=self.groups, say=lambda text: None)

    async def sample(self, group):
        self.sampled.append(group.number)
        await asyncio.sleep(self.rng.choice([0.0, 0.002, 0.03]))
        if self.rng.random() < 0.1:
            raise ValueError("broken")
        spans = [(str(self.published), 0, 2)]
        return {
            "prompt_token_ids": [[1, 2]],
            "response_ids": [[group.number, self.rng.randrange(99)]],
            "rewards": [0.5],
            "loss_masks": [[1, 1]],
            "stop_reasons": None,
            "rollout_metrics": None,
            "rollout_logprobs": [[-0.5, -0.5]],
            "rollout_versions": [spans],
        }

    async def live(self, checkpoint, taken, steps):
        """Take some steps; return the last checkpoint, which may be older. ``taken``: step → rows, filled in."""
        first, place = checkpoint
        self.published = first
        kept = await self.groups.recover(first, prompt)
        self.recovered = [group.number for group in kept.finished]
        self.stream.restore(kept.finished, kept.planned)
        self.stream.start(first, **place)
        for step in range(first, min(first + steps, STEPS)):
            batch = await self.stream.take()
            self.ages += self.stream.staleness(batch)
            taken[step] = [(group.number, group.output["response_ids"]) for group in batch]
            await asyncio.sleep(0.002)
            given_up = self.stream.trained(batch)
            place = self.stream.state()
            await self.groups.trained(step + 1, [group.number for group in batch], (), given_up)
            if step % 3 == 2 or step == STEPS - 1:
                checkpoint = step + 1, place
                await self.groups.checkpoints([step - 2, step + 1] if step > 2 else [step + 1])
            self.published = step + 1
            self.stream.advance(step + 1)
        await asyncio.sleep(self.rng.choice([0.0, 0.01]))
        await self.stream.close()
        await self.groups.close()
        return checkpoint


@pytest.mark.parametrize("policy", ["wait", "drop", "retry"])
@pytest.mark.parametrize("seed", range(3))
def test_lives_add_up_to_one_run(tmp_path, seed, policy):
    """Nothing that was finished is sampled again, lost steps come about as they were, the bound holds in each life,
    and every group is trained or given up once."""
    rng = random.Random(seed)
    checkpoint, taken, lives = (0, {"oldest": 0, "ahead": []}), {}, 0
    while checkpoint[0] < STEPS:
        before, start = dict(taken), checkpoint[0]
        life = Life(tmp_path, policy, rng)
        checkpoint = asyncio.run(life.live(checkpoint, taken, rng.randrange(1, 6)))
        lives += 1
        for step in set(range(start, STEPS)) & set(before) & set(taken):
            assert taken[step] == before[step], "a lost step is taken as it was"
        assert 0 <= min(life.ages) and max(life.ages) <= BOUND
        if policy != "retry":
            assert set(life.sampled).isdisjoint(life.recovered)
    assert lives > 1
    numbers = [number for step in range(STEPS) for number, _ in taken[step]]
    assert len(numbers) == len(set(numbers)) == BATCH * STEPS
    groups = durable(tmp_path)
    recorded = groups.store.consumed()
    assert recorded == set(range(checkpoint[1]["oldest"])) | set(checkpoint[1]["ahead"])
    groups.store.close()


def test_a_store_is_of_one_run(tmp_path):
    """Of its checkpoints, its data and one process; a run that begins anew removes it."""
    life = Life(tmp_path, "wait", random.Random(1))
    asyncio.run(life.live((0, {"oldest": 0, "ahead": []}), {}, 2))
    with pytest.raises(JournalError, match="ends with step 2, but the run resumes from step 9"):
        asyncio.run(recover(tmp_path, 9, prompt))
    with pytest.raises(JournalError, match=r"is of prompt \d+, but the data has other there"):
        asyncio.run(recover(tmp_path, 0, lambda number, uid: {"uid": "other"}))
    kept = asyncio.run(recover(tmp_path, 0, prompt))
    assert len(kept.planned) == 2 * BATCH and kept.planned == [group.number for group in kept.finished][: 2 * BATCH]
    held = durable(tmp_path)
    with pytest.raises(CheckpointError, match="is already being written by this process"):
        durable(tmp_path, fresh=True)
    held.store.close()
    durable(tmp_path, fresh=True).store.close()
    kept = asyncio.run(recover(tmp_path, 9, prompt))  # an empty one fits any checkpoint
    assert not kept.finished and [each.name for each in tmp_path.iterdir()] == ["rollouts"]


async def recover(folder, step, prompt):
    groups = durable(folder)
    try:
        return await groups.recover(step, prompt)
    finally:
        await groups.close()


def test_checkpoints_elsewhere_need_a_folder_for_groups():
    from skyrl_megatron.config.rules.training_rules import fully_async_problems

    def problems(**changes):
        cfg = config("s3://bucket/run", enabled=True, **changes)
        return {problem.key: problem.value for problem in fully_async_problems(cfg)}

    assert problems()["trainer.ckpt_path"] == "s3://bucket/run"
    assert problems(rollouts_path="gs://b/r")["trainer.fully_async.rollouts_path"] == "gs://b/r"
    assert not {"trainer.ckpt_path", "trainer.fully_async.rollouts_path"} & set(
        problems(rollouts_path="/disk/rollouts")
    )
