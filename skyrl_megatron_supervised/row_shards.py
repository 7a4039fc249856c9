"""Shards: the tokens of 1024 rows of one data set as arrays, whatever the limits of a run are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron.data.row_cache import ArrayFile, CacheEntry, RowCache
from skyrl_megatron_supervised.chat_rows import ChatRows, MadeRow

if TYPE_CHECKING:
    from skyrl_megatron_supervised.trained_answers import TrainedSequence

SHARD_ROWS = 1024
PER_ROW = ("problem", "noted", "longest")
"""Arrays that say which rows a run keeps."""


def pack(made: Sequence[MadeRow]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return rows as arrays, and the texts that these number.

    ``problem``, ``noted``, ``longest`` int32 [rows]: number of the problem (-1: none) and of the notes, tokens of the
    longest sequence. ``first`` int64 [rows + 1]: first sequence of each row. ``answer`` uint8, ``prompt`` int32
    [sequences]: number of the answer, tokens of the prompt. ``start`` int64 [sequences + 1]: first token. ``ids``
    int32 [tokens]. ``mask`` uint8 [tokens / 8]: one bit per token, 1 if it is trained.
    """
    problems: dict[tuple[str, str], int] = {}
    notes: dict[tuple[str, ...], int] = {}
    rows = np.zeros((3, len(made)), np.int32)
    for column, row in enumerate(made):
        rows[0, column] = problems.setdefault((row.kind, row.details), len(problems)) if row.kind else -1
        rows[1, column] = notes.setdefault(tuple(row.notes), len(notes))
        rows[2, column] = max((len(p) + len(r) for group in row.groups for p, r, _ in group), default=0)
    arrays: dict[str, np.ndarray] = dict(zip(PER_ROW, rows, strict=True))
    flat = [(answer, *one) for row in made for answer, group in enumerate(row.groups) for one in group]
    sizes = [len(prompt) + len(response) for _, prompt, response, _ in flat]
    ids, mask = np.zeros(sum(sizes), np.int32), np.zeros(sum(sizes), np.uint8)
    start = np.cumsum([0, *sizes], dtype=np.int64)
    for (_, prompt, response, trained), (begin, end) in zip(flat, pairwise(start.tolist()), strict=True):
        ids[begin : begin + len(prompt)] = prompt
        ids[begin + len(prompt) : end] = response
        mask[begin + len(prompt) : end] = trained
    arrays |= {
        "first": np.cumsum([0, *(sum(map(len, row.groups)) for row in made)], dtype=np.int64),
        "answer": np.asarray([answer for answer, *_ in flat], np.uint8),
        "prompt": np.asarray([len(prompt) for _, prompt, _, _ in flat], np.int32),
        "start": start,
        "ids": ids,
        "mask": np.packbits(mask),
    }
    return arrays, {"problems": list(problems), "notes": list(notes), "lacking": 0}


class StoredRows:
    """The rows of a shard."""

    def __init__(self, file: ArrayFile) -> None:
        self.file = file
        self.has_tokens = not file.about["lacking"]
        if self.has_tokens:
            self.arrays = {name: file[name] for name in (*PER_ROW, "first", "answer", "prompt", "start")}

    def row(self, place: int) -> MadeRow:
        """Return the row at a place of the shard."""
        about, arrays = self.file.about, self.arrays
        made = MadeRow(notes=list(about["notes"][arrays["noted"][place]]))
        if (problem := arrays["problem"][place]) >= 0:
            made.kind, made.details = about["problems"][problem]
        first, last = arrays["first"][place : place + 2].tolist()
        if first == last:
            return made
        start = arrays["start"][first : last + 1].tolist()
        begin, end = start[0], start[-1]
        ids = self.file.part("ids", begin, end).tolist()
        bits = np.unpackbits(self.file.part("mask", begin // 8, -(-end // 8)))
        mask = bits[begin % 8 : begin % 8 + end - begin].tolist()
        made.groups = [[] for _ in range(int(arrays["answer"][last - 1]) + 1)]
        for number, (one, after) in enumerate(pairwise(start), first):
            middle, size = one - begin + int(arrays["prompt"][number]), after - begin
            sequence: TrainedSequence = ids[one - begin : middle], ids[middle:size], mask[middle:size]
            made.groups[int(arrays["answer"][number])].append(sequence)
        return made


def join(parts: Sequence[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays per row of all shards, and their texts, as those of one; and the number of each shard without
    tokens, with the bytes that these need."""
    problems: dict[tuple[str, str], int] = {}
    notes: dict[tuple[str, ...], int] = {}
    columns: dict[str, list[np.ndarray]] = {name: [] for name in PER_ROW}
    for arrays, about in parts:
        of_problems = [problems.setdefault(tuple(one), len(problems)) for one in about["problems"]]
        of_notes = [notes.setdefault(tuple(one), len(notes)) for one in about["notes"]]
        columns["problem"].append(np.asarray([*of_problems, -1], np.int32)[arrays["problem"]])
        columns["noted"].append(np.asarray(of_notes, np.int32)[arrays["noted"]])
        columns["longest"].append(arrays["longest"])
    joined = {name: np.concatenate(arrays) for name, arrays in columns.items()}
    lacking = [(number, about["lacking"]) for number, (_, about) in enumerate(parts) if about["lacking"]]
    return joined, {"problems": list(problems), "notes": list(notes), "lacking": lacking}


def shard_name(shard: int) -> str:
    """Return the name of the arrays of a shard."""
    return f"{shard:07d}"


@dataclass(frozen=True)
class ShardMaker:
    """Makes shards of ``rows`` in the entries ``keys`` of their data sets, here or in another process."""

    rows: ChatRows
    cache: RowCache
    keys: Sequence[str]

    def __call__(self, which: tuple[int, int]) -> tuple[int, int]:
        """Make the shard ``which``, (number of the data set, number of the shard in it), and return this.

        If the cache has no room for its tokens, it has what decides which rows are kept alone. Raises DataError if the
        file has changed since it was opened, and RuntimeError if the shard cannot be written.
        """
        number, shard = which
        part, entry = self.rows.rows.sources[number], CacheEntry(self.cache.folder / self.keys[number])
        first, before = shard * SHARD_ROWS, self.rows.rows.ends[number - 1] if number else 0
        read = part.part(first, min(first + SHARD_ROWS, len(part)))
        arrays, about = pack(self.rows.make(range(before + first, before + first + len(read)), read))
        part.require_unchanged()
        needed = sum(array.nbytes for array in arrays.values())
        if not self.cache.make_room(needed):
            arrays, about = {name: arrays[name] for name in PER_ROW}, about | {"lacking": needed}
        if not entry.write(shard_name(shard), arrays, about):
            raise RuntimeError(f"{entry.folder} cannot be written")
        return which
