"""The tokens of rows on disk: made once, by all processor cores, and read by every run on the same data.

A shard has the tokens of 1024 rows of one data set, whatever the limits of the run are; an entry of
:class:`~skyrl_megatron.data.row_cache.RowCache` has all shards of a data set, and, when they are complete, an index
with what decides which rows a run keeps.

Which rows a run trains, and in which order, must not depend on the cache. So the form of all rows is checked before
the start, and

- if a row is left out only for its form, training begins at once: the other rows are made meanwhile, by other
  processes (:class:`~skyrl_megatron.data.row_cache.RowProcesses`), and a row that is drawn before by this one;
- if ``invalid_rows`` or ``long_rows`` skip rows, all of them are made before the start, as their number decides the
  length of an epoch;
- so are those of small data (:data:`AT_ONCE`), whose errors then come before the start.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron.data.folder_lock import FolderLock
from skyrl_megatron.data.row_cache import ArrayFile, CacheEntry, RowCache, RowProcesses, key_of, tokenizer_digest
from skyrl_megatron.data.row_files import READERS, Rows
from skyrl_megatron.errors import CheckpointError, DataError
from skyrl_megatron_supervised.chat_rows import MARK_BYTES, ChatRows, FittedRow, MadeRow
from skyrl_megatron_supervised.row_shards import PER_ROW, SHARD_ROWS, ShardMaker, StoredRows, join, shard_name

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.rollout.templates import ChatFormat

logger = logging.getLogger(__name__)

AT_ONCE = 1024
"""Rows that are made in the process of the run, before it starts."""
OPEN_SHARDS = 256
NICE = 10
"""Of the processes that make rows: training comes first where it needs the same cores."""
LOOK_S = 0.2
"""Time between two looks at the shards that another run makes."""
SHAPES, INDEX = "shapes", "index"
_PACKAGE, _CORE = Path(__file__).parent, Path(__file__).parent.parent / "skyrl_megatron"
_OF_PACKAGE = ("chat_rows", "preference_rows", "row_shards", "row_tokens", "trained_answers", "word_memo")
_OF_DATA = ("row_files", "row_shapes", "messages", "message_form", "tokenizer", "encoding")
SOURCES = [
    *(_PACKAGE / f"{name}.py" for name in _OF_PACKAGE),
    *(_CORE / f"data/{name}.py" for name in _OF_DATA),
    *(_CORE / f"rollout/{name}.py" for name in ("answer_ends", "templates")),
]
"""The code that decides what a row becomes."""

type Shard = tuple[int, int]
"""(number of the data set, number of the shard in it)."""


# ---------------------------------------------------------------------------------------------- the cache of a run
def cached_rows(
    kind: type[ChatRows],
    datasets: Sequence[str],
    chat: ChatFormat,
    settings: SFTConfig,
    *,
    cache: RowCache | None,
    say: Callable[[str], None] = logger.info,
    hub_commits: Mapping[str, str] | None = None,
    declared: Sequence[str] = (),
) -> ChatRows:
    """Return the rows that ``kind(datasets, chat, settings)`` returns, with their tokens in ``cache``.

    If they cannot be there, which is said, they are tokenized here. Raises DataError like ``kind``, or later, when an
    item is read, for a row that is made while the run trains.
    """
    others: dict[str, Any] = {"hub_commits": hub_commits, "declared": declared}
    if cache is None:
        return kind(datasets, chat, settings, say=say, **others)
    rows = kind.to_make(datasets, chat, settings, cache=cache, **others)
    tokens = None
    try:
        tokens = RowTokens(rows, cache, say)
        rows.kept, rows.tokens = tokens.kept_rows(), tokens
        if tokens.is_complete:
            rows.report(say)
        rows.require_enough(say)
        return rows
    except DataError:
        if tokens is not None:
            tokens.close()
        raise
    except (OSError, RuntimeError) as error:
        if tokens is not None:
            tokens.close()
        fix = ": free disk space, or set SKYRL_MEGATRON_HOME to another folder" if isinstance(error, OSError) else ""
        say(f"data: rows are tokenized by this process, and not cached in {cache.folder} ({error}){fix}")
        return kind(datasets, chat, settings, say=say, **others)


def check_rows(rows: ChatRows, cache: RowCache, enough: int) -> int:
    """Check the form of all ``rows``, and the tokens of the first ones until ``enough`` can be trained; return how
    many these are. Raises DataError, and OSError if the cache cannot be written."""
    tokens = RowTokens(rows, cache, lambda line: None)
    try:
        return tokens.check(enough)
    finally:
        tokens.close()


@dataclass(slots=True)
class _DataSet:
    """The cache of one data set."""

    rows: Rows
    start: int
    """Number of its first row over all data sets."""
    entry: CacheEntry

    @property
    def shards(self) -> int:
        return -(-len(self.rows) // SHARD_ROWS)

    def numbers(self, shard: int) -> range:
        """Return the numbers of a shard's rows in the data set."""
        return range(shard * SHARD_ROWS, min((shard + 1) * SHARD_ROWS, len(self.rows)))


class RowTokens:
    """The cached tokens of ``rows``. Raises OSError if the folder of the cache cannot be written."""

    def __init__(self, rows: ChatRows, cache: RowCache, say: Callable[[str], None]) -> None:
        self.rows, self.cache, self.say = rows, cache, say
        tokenizer = tokenizer_digest(rows.chat.tokenizer, rows.chat.template)
        if not tokenizer:
            raise RuntimeError("the content of the tokenizer cannot be read")
        starts = [0, *rows.rows.ends[:-1]]
        self.keys = [
            _key(rows, name, part, tokenizer) for name, part in zip(rows.names, rows.rows.sources, strict=True)
        ]
        rows.rows.require_unchanged()
        self.sets = [
            _DataSet(part, start, cache.entry(key))
            for part, start, key in zip(rows.rows.sources, starts, self.keys, strict=True)
        ]
        self.failure: Exception | None = None
        """The problem of a row that was made while the run trained."""
        self._opened: OrderedDict[Shard, StoredRows] = OrderedDict()
        self._index: list[ArrayFile | None] = [one.entry.read(INDEX) for one in self.sets]
        self._thread: threading.Thread | None = None
        self._makers: RowProcesses[Shard, Shard] | None = None
        self._filled: set[Shard] = set()
        """Shards without tokens for which there is room now."""
        self._closed, self._opening = threading.Event(), threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether every row has been made, by this run or by another one."""
        return all(index is not None for index in self._index)

    @property
    def _is_small(self) -> bool:
        return len(self.rows.rows) <= AT_ONCE

    def kept_rows(self) -> np.ndarray:
        """Return the numbers of the rows that the run trains, [n] int64, and begin to make those that are missing.

        Raises DataError for a row that cannot be trained.
        """
        rows, shapes = self.rows, [self._shapes(one) for one in self.sets]
        self.say(f"data: tokens of {len(rows.rows)} rows are cached in {self.cache.folder}")
        if not self.is_complete:
            kept = self._well_formed(shapes)
            rows.skipped.clear()  # they are counted when all rows are made
            if rows.skips_made_rows or self._is_small:
                self._make_all()
            else:
                self.make_meanwhile()
        if self.is_complete:
            kept = self._judged()
            self._filled = self._to_fill()
            if self._missing():
                self.make_meanwhile()
        marks = np.concatenate([file["marks"] for file in shapes])
        rows.marks = [mark.tobytes() for mark in marks[kept]]
        return kept

    def check(self, enough: int) -> int:
        """Implement :func:`check_rows`."""
        if self.is_complete:
            return len(self._judged())
        trained = 0
        kept = self._well_formed([self._shapes(one) for one in self.sets])
        for number in kept.tolist():
            if trained >= enough:
                break
            trained += self.rows.is_kept(number, self.rows.fitted(self.rows.make_one(number, self.rows.rows[number])))
        return trained

    def made(self, number: int) -> MadeRow | None:
        """Return a row from the cache; None if it is not there. Raises the DataError of a row that was made
        while the run trained."""
        if self.failure is not None:
            raise self.failure
        which = int(np.searchsorted(self.rows.rows.ends, number, side="right"))
        shard, place = divmod(number - self.sets[which].start, SHARD_ROWS)
        with self._opening:
            stored = self._stored((which, shard))
        return stored.row(place) if stored is not None and stored.has_tokens else None

    def wait(self) -> None:
        """Return when all rows are made, or cannot be. Raises the DataError of one that cannot be trained."""
        if self._thread is not None:
            self._thread.join()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """End the processes, and let others remove the entries. May be called twice."""
        self._closed.set()
        if self._makers is not None:
            self._makers.end()
        if self._thread is not None:
            self._thread.join()
        for one in self.sets:
            one.entry.close()

    # ------------------------------------------------------------------ which rows are kept
    def _shapes(self, one: _DataSet) -> ArrayFile:
        """Return what is known of the rows of a data set without their tokens."""
        if (file := one.entry.read(SHAPES)) is not None:
            return file
        problems: dict[tuple[str, str], int] = {}
        problem, marks = np.full(len(one.rows), -1, np.int32), []
        for number, row in enumerate(one.rows):
            kind, details, mark = self.rows.shape_of(one.start + number, row)
            if kind:
                problem[number] = problems.setdefault((kind, details), len(problems))
            marks.append(mark or bytes(MARK_BYTES) if self.rows.has_marks else b"")
        one.rows.require_unchanged()
        arrays: dict[str, np.ndarray] = {
            "problem": problem,
            "marks": np.frombuffer(b"".join(marks), np.uint8).reshape(len(marks), -1),
        }
        one.entry.write(SHAPES, arrays, {"problems": list(problems)})
        file = one.entry.read(SHAPES)
        if file is None:
            raise OSError(f"{one.entry.folder} cannot be read")
        return file

    def _well_formed(self, shapes: Sequence[ArrayFile]) -> np.ndarray:
        """Return the numbers of the rows with the right form. Raises DataError."""
        for one, file in zip(self.sets, shapes, strict=True):
            problem = file["problem"]
            for place in np.flatnonzero(problem >= 0).tolist():
                self.rows.is_kept(one.start + place, FittedRow(*file.about["problems"][problem[place]]))
        return np.flatnonzero(np.concatenate([file["problem"] for file in shapes]) < 0)

    def _judged(self) -> np.ndarray:
        """Return the numbers of the rows that the run trains, and count what is left out. Raises DataError."""
        kept = []
        self.rows.skipped.clear()
        self.rows.notes.clear()
        for one, index in zip(self.sets, self._index, strict=True):
            assert index is not None
            arrays = {name: index[name] for name in PER_ROW}
            kept.append(one.start + self._judge(one, 0, arrays, index.about))
        return np.concatenate(kept)

    def _judge(
        self, one: _DataSet, first: int, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]
    ) -> np.ndarray:
        """Return which of the rows from ``first`` on are trained, and count what is left out. Raises DataError."""
        rows, problem, longest = self.rows, arrays["problem"], arrays["longest"]
        long = longest > rows.settings.max_length
        good = (problem < 0) & ~long
        numbers, earliest, counts = np.unique(arrays["noted"][good], return_index=True, return_counts=True)
        for row in np.argsort(earliest).tolist():
            for note in about["notes"][numbers[row]]:
                rows.notes[note] += int(counts[row])
        for row in np.flatnonzero(~good).tolist():
            number = one.start + first + row
            if long[row] and rows.settings.of_long_rows == "truncate":
                fitted = rows.fitted(self.made(number) or rows.make_one(number, rows.rows[number]))
            elif long[row]:
                fitted = rows.too_long(int(longest[row]))
            else:
                fitted = FittedRow(*about["problems"][problem[row]])
            if rows.is_kept(number, fitted):
                rows.notes.update(fitted.notes)
                good[row] = True
        return first + np.flatnonzero(good)

    # ------------------------------------------------------------------ making rows
    def _make_all(self) -> None:
        """Make all rows that are missing, and return when they are there."""
        for _ in self._made_shards():
            pass
        self._write_index()

    def make_meanwhile(self) -> None:
        """Begin to make all rows that are missing, and return at once."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="tokens of rows", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        was_complete = self.is_complete
        try:
            for which, shard in self._made_shards():
                if not was_complete and (stored := self._read(which, shard)) is not None:
                    one, arrays = self.sets[which], {name: stored[name] for name in PER_ROW}
                    self._judge(one, shard * SHARD_ROWS, arrays, stored.about)
            if not was_complete and not self._closed.is_set():
                self._write_index()
                self._judged()
                self.rows.report(self.say)
            elif self._filled and not self._closed.is_set():
                self._write_filled()
        except DataError as error:
            self.failure = error
        except (OSError, CheckpointError, RuntimeError) as error:
            self.say(f"data: the cache of tokens is not completed ({error}): rows are made when they are drawn")

    def _made_shards(self) -> Iterator[Shard]:
        """Make the shards that are missing, and yield all that are there, each once."""
        missing = self._missing()
        yield from (shard for shard in self._all() if shard not in missing)
        while missing and not self._closed.is_set():
            locks = {which: lock for which in {which for which, _ in missing} if (lock := self._lock(which))}
            try:
                missing_here = self._missing()  # another run may have made some before it left the lock
                ours = sorted(shard for shard in missing & missing_here if shard[0] in locks)
                yield from sorted(missing - missing_here)
                missing &= missing_here
                for shard in self._in_this_process(ours) if self._is_small else self._in_processes(ours):
                    missing.discard(shard)
                    with self._opening:
                        self._opened.pop(shard, None)
                    yield shard
            finally:
                for lock in locks.values():
                    lock.release()
            if missing:
                self._closed.wait(LOOK_S)

    def _in_this_process(self, shards: Sequence[Shard]) -> Iterator[Shard]:
        yield from map(ShardMaker(self.rows, self.cache, self.keys), shards)

    def _in_processes(self, shards: Sequence[Shard]) -> Iterator[Shard]:
        if not shards:
            return
        self._makers = RowProcesses(ShardMaker(self.rows, self.cache, self.keys), shards, nice=NICE)
        if self._closed.is_set():
            self._makers.end()
        self.say(f"data: {self._makers.count} processes tokenize {len(shards)} shards of {SHARD_ROWS} rows")
        try:
            yield from self._makers.results()
        except RuntimeError:
            if not self._closed.is_set():
                raise
        finally:
            self._makers.end()  # a row that cannot be trained ends the run: the other shards are not needed

    def _lock(self, which: int) -> FolderLock | None:
        """Return the lock of the one that makes the shards of a data set; None if that is another run."""
        folder = self.sets[which].entry.folder
        try:
            lock = FolderLock(str(folder), "SKYRL_MEGATRON_HOME")
        except CheckpointError as error:
            if not os.access(folder, os.W_OK):  # nobody makes them, so waiting would have no end
                raise OSError(str(error)) from error
            return None
        self.sets[which].entry.remove_partial()
        return lock

    def _write_index(self) -> None:
        for which, one in enumerate(self.sets):
            files = [self._read(which, shard) for shard in range(one.shards)]
            if None in files:
                raise RuntimeError("a file of the cache is missing")
            arrays, about = join([({name: file[name] for name in PER_ROW}, file.about) for file in files if file])
            one.entry.write(INDEX, arrays, about)
            self._index[which] = one.entry.read(INDEX)
        if not self.is_complete:
            raise RuntimeError("the index of the cache cannot be written")

    def _to_fill(self) -> set[Shard]:
        """Return the shards without tokens for which there is room."""
        lacking = {
            (which, shard): size
            for which, index in enumerate(self._index)
            for shard, size in (index.about["lacking"] if index else ())
        }
        room = self.cache.free(sum(lacking.values())) if lacking else 0
        return {shard for shard, end in zip(lacking, accumulate(lacking.values()), strict=True) if end <= room}

    def _write_filled(self) -> None:
        """Write the indices anew without the shards that have their tokens now."""
        for which, one in enumerate(self.sets):
            index = self._index[which]
            assert index is not None
            lacking = [(shard, size) for shard, size in index.about["lacking"] if self._lacks((which, shard))]
            one.entry.write(INDEX, {name: index[name] for name in PER_ROW}, index.about | {"lacking": lacking})
        self._filled.clear()

    # ------------------------------------------------------------------ files
    def _all(self) -> list[Shard]:
        return [(which, shard) for which, one in enumerate(self.sets) for shard in range(one.shards)]

    def _missing(self) -> set[Shard]:
        names = [one.entry.names for one in self.sets]
        missing = {(which, shard) for which, shard in self._all() if shard_name(shard) not in names[which]}
        return missing | {shard for shard in self._filled - missing if self._lacks(shard)}

    def _lacks(self, shard: Shard) -> bool:
        file = self._read(*shard)
        return file is None or bool(file.about["lacking"])

    def _read(self, which: int, shard: int) -> ArrayFile | None:
        return self.sets[which].entry.read(shard_name(shard))

    def _stored(self, shard: Shard) -> StoredRows | None:
        if shard in self._opened:
            self._opened.move_to_end(shard)
            return self._opened[shard]
        if (file := self._read(*shard)) is None:
            if self.is_complete:  # it was damaged, or removed by hand
                self.make_meanwhile()
            return None
        if len(self._opened) >= OPEN_SHARDS:
            self._opened.popitem(last=False)
        self._opened[shard] = StoredRows(file)
        return self._opened[shard]


def _key(rows: ChatRows, name: str, part: Rows, tokenizer: str) -> str:
    settings, is_file = rows.settings, Path(name).suffix.lower() in READERS
    return key_of(
        "tokens",
        SOURCES,
        rows=type(rows).__name__,
        files=[file["sha256"] for file in part.fingerprint],
        part=[None if is_file else name, len(part)],
        tokenizer=tokenizer,
        template_kwargs=rows.chat.kwargs,
        stops=list(rows.chat.stop_token_ids),
        settings=[settings.SECTION, settings.turns, settings.format, settings.thinking, settings.strict_rows],
        declared=sorted(rows.declared),
    )
