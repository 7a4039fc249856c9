"""A run in small: it samples, trains, saves a checkpoint, and does so until it is killed."""

import asyncio
import json
import os
import random
from pathlib import Path

import numpy as np

BATCH = 3


def group_of(number):
    """A group whose tokens are its number."""
    from skyrl_megatron.sources.records import FinishedGroup

    output = {
        "prompt_token_ids": [np.zeros(3, np.int32)],
        "response_ids": [np.full(5, number, np.int32)],
        "rewards": [0.5],
        "loss_masks": [np.ones(5, np.uint8)],
        "rollout_logprobs": [np.full(5, -0.1, np.float32)],
        "rollout_versions": [[(str(number), 0, 5)]],
    }
    return FinishedGroup(number, f"uid-{number}", 0, output)


def checkpoint(folder):
    """Return (step, numbers of all groups that its weights learned from)."""
    path = Path(folder) / "checkpoint.json"
    return json.loads(path.read_text()) if path.exists() else [0, []]


def save(folder, step, trained):
    """Put a checkpoint in place at once."""
    path = Path(folder) / "checkpoint.json"
    with path.with_suffix(".new").open("w") as file:
        json.dump([step, trained], file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".new").replace(path)


def run(folder, seed, said):
    """Live until killed; ``said`` gets each group that is finished, once that is durable."""
    asyncio.run(_run(Path(folder), random.Random(seed), said))


async def _run(folder, rng, said):
    from skyrl_megatron.sources.store import GroupStore

    store = GroupStore(folder / "store", segment_bytes=3000)
    step, trained = checkpoint(folder)
    recovered = await store.recover(step)
    assert recovered.consumed == set(trained), (sorted(recovered.consumed), sorted(trained))
    waiting = list(recovered.finished)
    assert not set(waiting) & set(trained)
    said.send(("started", step))
    number = max([-1, *trained, *waiting]) + 1

    async def sample(mine):
        await asyncio.sleep(rng.random() / 500)
        await store.finished(group_of(mine))
        waiting.append(mine)
        said.send(("finished", mine))

    while True:
        count = rng.randrange(1, 6)
        await asyncio.gather(*(sample(number + i) for i in range(count)))
        number += count
        while len(waiting) >= BATCH:
            taken, waiting[:] = waiting[:BATCH], waiting[BATCH:]
            step += 1
            await store.trained(step, taken)
            trained += taken
            if rng.random() < 0.5:
                save(folder, step, trained)
                await store.checkpoints([step])
                said.send(("saved", step))
