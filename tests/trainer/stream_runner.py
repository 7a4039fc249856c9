"""A run in small: the stream, its groups on disk and checkpoints are real, sampling and training are not. It kills
itself at a place that it is told."""

import asyncio
import os
import random
import signal
from pathlib import Path

BATCH, STEPS, BOUND, SAMPLES, TURNS, EVERY = 2, 6, 2, 2, 2, 2


class Killer:
    """Kills this process when it comes to ``point`` for the ``hit``-th time."""

    def __init__(self, point, hit):
        self.point, self.left = point, hit

    def due(self, point):
        self.left -= point == self.point
        return point == self.point and not self.left

    def __call__(self, point):
        if self.due(point):
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self):
        """Come by in the middle of writes, of a checkpoint's parts, and before a segment goes."""
        from skyrl_megatron.sources.store import GroupStore
        from tests.checkpoint import places_of_a_save

        places_of_a_save.watch(self)
        GroupStore.__init__.__kwdefaults__["segment_bytes"] = 3000  # so that there is something to free
        write, unlink = os.writev, Path.unlink

        def half(descriptor, parts):
            if self.due(f"writing {Path(os.readlink(f'/proc/self/fd/{descriptor}')).parent.name}"):
                whole = b"".join(bytes(part) for part in parts)
                os.write(descriptor, whole[: len(whole) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return write(descriptor, parts)

        def gone(path, *args, **kwargs):
            if path.suffix == ".seg":
                self("freeing")
            return unlink(path, *args, **kwargs)

        os.writev, Path.unlink = half, gone


def prompt(number, uid=None):
    return {"uid": f"uid-{number}"}


class Run:
    """One life; ``said`` gets what happens, once it is true."""

    def __init__(self, folder, seed, kill, said):
        from skyrl_megatron.config import SkyRLTrainConfig
        from skyrl_megatron.runtime.checkpoint.store import TRAINER_STATE, CheckpointStore, resume_candidates
        from skyrl_megatron.sources.store import DurableGroups

        cfg = SkyRLTrainConfig()
        cfg.trainer.ckpt_path, cfg.trainer.fully_async.max_staleness_steps = str(folder), BOUND
        self.rng, self.kill, self.said, self.version = random.Random(seed), kill, said, 0
        self.checkpoints = CheckpointStore(folder, keep=2)
        found = next(resume_candidates(self.checkpoints, "latest", None), None)
        self.state = {"place": {"oldest": 0, "ahead": []}, "trained": []}
        if found is not None:
            self.version, self.state = found.step, self.checkpoints.read_json(found, TRAINER_STATE)
        self.groups = DurableGroups(cfg, lambda number: 0, fresh=False)

    async def finished(self, group):
        """As a ``GroupLog``."""
        await self.groups.finished(group)
        self.said.send(("finished", group.number))
        self.kill("recorded")

    async def sample(self, group):
        from skyrl_megatron.rollout.interface import TrajectoryID

        log = await self.groups.trajectories(group, SAMPLES)
        ids = [TrajectoryID(group.uid, sample) for sample in range(SAMPLES)]
        rows = await asyncio.gather(*(self.trajectory(group, log, id) for id in ids))
        ids, spans = [row.response_ids.tolist() for row in rows], [row.versions for row in rows]
        return {"response_ids": ids, "rollout_versions": spans, "loss_masks": [[1] * TURNS] * SAMPLES}

    async def trajectory(self, group, log, id):
        """Two turns of a token each."""
        import numpy as np

        from skyrl_megatron.inference.protocol import Generation
        from skyrl_megatron.rollout.conversation import TrajectoryOutput
        from skyrl_megatron.rollout.episode import Trajectory
        from skyrl_megatron.rollout.interface import RecordedTurn

        known = log.stored(id)
        if known.trajectory is not None:
            return known.trajectory.rows[0]
        turns = list(known.turns)
        for place in range(len(turns), TURNS):
            await asyncio.sleep(self.rng.choice([0.0, 0.001, 0.01]))
            generation = Generation(
                [self.rng.randrange(9999)], [-0.5], "stop", [(str(self.version), place, place + 1)]
            )
            self.said.send(("sampled", group.number, id.repetition_id, place))
            self.kill("sampling")
            turns.append(RecordedTurn(0, np.zeros(1, np.int32), generation, {}))
            if place + 1 < TURNS:
                await log.turn(id, place, turns[-1])
                self.said.send(("kept", group.number, id.repetition_id, place))
        tokens = np.asarray([turn.generation.token_ids[0] for turn in turns], np.int32)
        spans = [span for turn in turns for span in turn.generation.versions]
        row = TrajectoryOutput(
            np.zeros(1, np.int32), tokens, np.ones(TURNS, np.uint8), [0.5], "stop", np.zeros(TURNS, np.float32)
        )
        row.versions = spans
        await log.finished(id, Trajectory([row], TURNS))
        return row

    async def live(self):
        from skyrl_megatron.sources.rollout_stream import RolloutStream, StreamLimits

        kept = await self.groups.recover(self.version, prompt)
        stream = RolloutStream(self.sample, prompt, StreamLimits(BATCH, STEPS, BOUND, 8), group_log=self)
        stream.restore(kept.finished, kept.planned, kept.begun)
        stream.start(self.version, **self.state["place"])
        for step in range(self.version + 1, STEPS + 1):
            batch = await stream.take()
            self.kill("training")
            taken = [[group.number, group.output["response_ids"]] for group in batch]
            ages = stream.staleness(batch)
            given_up, trained = stream.trained(batch), [*self.state["trained"], [step, taken]]
            self.state = {"place": stream.state(), "trained": trained}
            await self.groups.trained(step, [group.number for group in batch], (), given_up)
            self.said.send(("took", step, taken, ages))
            self.kill("scheduled")
            if step % EVERY == 0:
                await self.save(step)
            self.kill("sync")
            self.version = step
            stream.advance(step)
        await stream.close()
        await self.groups.close()
        self.said.send(("over", self.state["trained"]))

    async def save(self, step):
        from skyrl_megatron.runtime.checkpoint.store import DATA, TRAINER_STATE, json_bytes

        Path(self.checkpoints.begin(step, {})).mkdir()  # no rank makes a part of it
        extras = {DATA: json_bytes({}, DATA), TRAINER_STATE: json_bytes(self.state, TRAINER_STATE)}
        self.checkpoints.commit(step, {}, extras, timeout_s=10)
        self.kill("saved")
        await self.groups.checkpoints(self.checkpoints.complete_steps())
        self.kill("freed")


def run(folder, seed, point, hit, said):
    """A life that ends at a point, or with the run."""
    kill = Killer(point, hit)
    kill.watch()
    asyncio.run(Run(Path(folder), seed, kill, said).live())
