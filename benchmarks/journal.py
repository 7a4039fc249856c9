"""What it costs to have every finished group on disk before it is trained on.

    python benchmarks/run.py journal [--groups 768] [--tokens 1024] [--folder FOLDER]

Groups of eight samples with ids, log-probs, masks and versions, all finished at the same time, as those of as many
workers can be. One flush for all that wait, against one group after the other, each with its flush: seconds on the
clock, of the same store. Beside it what the event loop spends on a group, milliseconds of its thread's
processor time, and that of the whole process, the writer's thread included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from skyrl_megatron.rollout.interface import GeneratorOutput, TrajectoryID
from skyrl_megatron.sources.records import CODEC, FinishedGroup
from skyrl_megatron.sources.store import GroupStore

SAMPLES, PROMPT = 8, 256


def group(number: int, tokens: int, rng: np.random.Generator) -> FinishedGroup:
    """Make a group of eight samples."""
    rows = range(SAMPLES)
    output: GeneratorOutput = {
        "prompt_token_ids": [rng.integers(0, 150_000, PROMPT, np.int32)] * SAMPLES,
        "response_ids": [rng.integers(0, 150_000, tokens, np.int32) for _ in rows],
        "rewards": [[0.0] * (tokens - 1) + [1.0] for _ in rows],
        "loss_masks": [np.ones(tokens, np.uint8) for _ in rows],
        "stop_reasons": ["stop" for _ in rows],
        "rollout_metrics": {"generate/avg_turns": 1.0},
        "rollout_logprobs": [-rng.random(tokens, np.float32) for _ in rows],
        "trajectory_ids": [TrajectoryID(str(number), row) for row in rows],
        "rollout_versions": [[("3", 0, tokens // 2), ("4", tokens // 2, tokens)] for _ in rows],
        "env_metrics": [{} for _ in rows],
        "errors": [None for _ in rows],
        "is_last_step": None,
    }
    return FinishedGroup(number, str(number), 0, output)


async def stored(folder: Path, groups: list[FinishedGroup], together: bool) -> tuple[float, float, float, int]:
    """Return (seconds, the loop's and the process's seconds of the processor, flushes)."""
    store = GroupStore(folder)
    flushes = store.journal.log.flushes
    began, loop, process = time.perf_counter(), time.thread_time(), time.process_time()
    if together:
        await asyncio.gather(*(store.finished(each) for each in groups))
    else:
        for each in groups:
            await store.finished(each)
    spent = time.perf_counter() - began, time.thread_time() - loop, time.process_time() - process
    flushes = store.journal.log.flushes - flushes
    store.close()
    return *spent, flushes


def main() -> None:
    """Print the ratio and the costs of a group."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    options = parse(parser, groups=16, tokens=64)
    rng = np.random.default_rng(0)
    groups = [group(number, options.tokens, rng) for number in range(options.groups)]
    size = sum(len(part) for part in CODEC.encode(groups[0]))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        seconds, loop, process, flushes = asyncio.run(stored(folder / "together", groups, True))
        alone, *_, each = asyncio.run(stored(folder / "alone", groups, False))
    finally:
        shutil.rmtree(folder)
    count = options.groups
    tokens = SAMPLES * options.tokens
    print(f"{count} groups of {size} bytes, {size / tokens:.2f} a response token; load {os.getloadavg()[0]:.1f}")
    print(f"together {seconds:.2f} s, {flushes} flushes; alone {alone:.2f} s, {each} flushes: {seconds / alone:.2f}x")
    print(f"event loop {1000 * loop / count:.3f} ms a group, process {1000 * process / count:.3f} ms")


if __name__ == "__main__":
    main()
