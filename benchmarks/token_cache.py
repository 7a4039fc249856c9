"""Rows as tokens: made once and read from the cache, against the path that it replaced.

    python benchmarks/run.py token_cache [--rows 100000] [--sample 2000] [--rounds 3]

Rows of about 640 tokens, of one and of three turns, with a byte-level tokenizer. The path before, which is kept here,
rendered and tokenized every row one by one at each start and each resume, and a row again when it was drawn.

Printed are rows a second of processor time for a sample, one by one and as the cache's shards are made, and for all
rows in the processes that make them; and the time from an open tokenizer to the first batch of 64 shuffled rows:
before (all rows, from the time of the sample), of a first run, and of a resume. Both paths give the same rows of the
sample, which is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core
from rendering import conversations, small_tokenizer
from smoke import parse

from skyrl_megatron.config.schema.supervised import SFTConfig
from skyrl_megatron.data.row_cache import RowCache
from skyrl_megatron.rollout.templates import ChatFormat
from skyrl_megatron_supervised.chat_rows import ChatRows
from skyrl_megatron_supervised.row_shards import SHARD_ROWS, pack
from skyrl_megatron_supervised.row_tokens import cached_rows
from skyrl_megatron_supervised.trained_answers import TrainedSequence, trained_sequences

BATCH = 64


def write(path: Path, count: int, tokens: int) -> None:
    """Write conversations; a thousand of them differ, each with a number of its own."""
    some = [*conversations(500, 1, tokens), *conversations(500, 3, tokens)]
    with path.open("w") as file:
        for number in range(count):
            messages = [dict(message) for message in some[number % len(some)]]
            messages[0]["content"] = f"{number} {messages[0]['content']}"
            file.write(json.dumps({"messages": messages}) + "\n")


def one_by_one(rows: ChatRows, numbers: Sequence[int]) -> list[list[TrainedSequence]]:
    """Return the sequences of rows as they were made before there was a cache."""
    made = []
    for number in numbers:
        row, _, kind, details = rows.checked(rows.rows, number, rows.rows[number], rows.settings)
        assert not kind, details
        made.append(trained_sequences(rows.chat, rows.form.fitted(row["messages"])))
    return made


def fastest(rounds: int, *sides: Callable[[], Any]) -> list[float]:
    """Return the seconds of processor time of each side."""
    best = [float("inf")] * len(sides)
    for _ in range(rounds):
        for place, side in enumerate(sides):
            started = time.process_time()
            side()
            best[place] = min(best[place], time.process_time() - started)
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--sample", type=int, default=2 * SHARD_ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=640)
    args = parse(parser, rows=1100, sample=20, rounds=1)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write(path, args.rows, args.tokens)
        chat, settings = ChatFormat(small_tokenizer()), SFTConfig()
        opened: float = time.perf_counter()
        rows = ChatRows.to_make([str(path)], chat, settings)
        reading = time.perf_counter() - opened
        sample = range(args.sample)
        parts = [range(first, min(first + SHARD_ROWS, args.sample)) for first in range(0, args.sample, SHARD_ROWS)]

        def shards() -> None:
            for part in parts:
                pack(rows.make(part, rows.rows.sources[0].part(part.start, part.stop)))

        made = rows.make(sample, rows.rows.sources[0].part(0, args.sample))
        assert [row.groups[0] for row in made] == one_by_one(rows, sample)
        seconds = fastest(args.rounds, lambda: one_by_one(rows, sample), shards)
        before, ours = (args.sample / of_side for of_side in seconds)
        rates = f"one by one {before:,.0f} rows/s, ours {ours:,.0f}: {ours / before:.2f}x (wanted: 1.8)"
        print(f"one core: {rates}")

        cache, said = RowCache(10**11, Path(folder) / "cache"), list[str]()
        first, after_first = first_batch(path, chat, settings, cache, said)
        assert first.tokens is not None
        first.tokens.wait()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        rate = args.rows / (used.ru_utime + used.ru_stime)
        print(f"processes on {cores} cores, their start included: {rate:,.0f} rows/s per core, {rate / before:.2f}x")
        _, resumed = first_batch(path, chat, settings, cache, said)
        whole = reading + args.rows / before
        print(f"first batch of {args.rows:,} rows: before {whole:.1f} s; a first run {after_first:.1f} s; ", end="")
        print(f"a resume {resumed:.2f} s, {resumed / whole:.3f}x (wanted: 0.1)")


def first_batch(
    path: Path, chat: ChatFormat, settings: SFTConfig, cache: RowCache, said: list[str]
) -> tuple[ChatRows, float]:
    """Return the rows, and the seconds until the first batch of a shuffled order is there."""
    started = time.perf_counter()
    rows = cached_rows(ChatRows, [str(path)], chat, settings, cache=cache, say=said.append)
    order = random.Random(1).sample(range(len(rows)), min(BATCH, len(rows)))
    assert len([rows[place] for place in order]) == len(order)
    return rows, time.perf_counter() - started


if __name__ == "__main__":
    main()
