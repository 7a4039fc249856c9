"""A durable log of byte strings that many tasks append to at the same time.

A thread of its own writes. It takes all appends that wait, writes them, and flushes the file once for all: while one
flush is under way, the next appends gather. An append is done when its bytes are on the disk.

What is not needed any more is settled, and compaction frees its place: segments of which less than half is held are
removed, and what is held of them is copied.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from skyrl_megatron.config.run_folder import private_folder
from skyrl_megatron.errors import DataError, JournalError
from skyrl_megatron.runtime.checkpoint.lock import FolderLock
from skyrl_megatron.trainer.stream.log import SegmentedLog
from skyrl_megatron.trainer.stream.segment import OVERHEAD, Buffer, StoredRecord

SEGMENT_BYTES = 64 * 2**20
type _Append = tuple[Callable[[], Sequence[Buffer]], Future[int]]


class Journal:
    """The log in a folder, which one process at a time has open. Methods may be called from any thread.

    ``segment_bytes``: where a new segment begins; ``limit_bytes``: of all segments, None for no limit; ``setting``:
    what chooses the folder, for errors. Raises JournalError for damage (:mod:`skyrl_megatron.trainer.stream.segment`),
    CheckpointError while another process has it open.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int | None = None,
        setting: str = "folder",
    ) -> None:
        self.folder, self.limit_bytes = Path(folder), limit_bytes
        try:
            private_folder(self.folder)
        except OSError as error:
            raise JournalError(f"{folder} cannot be made ({error.strerror}); check {setting}") from error
        self._lock = FolderLock(str(folder), setting)
        try:
            self.log = SegmentedLog(self.folder, segment_bytes)
        except OSError as error:
            self._lock.release()
            raise JournalError(f"{folder} cannot be opened: {error}; check {setting}") from error
        except BaseException:
            self._lock.release()
            raise
        self._failure: JournalError | None = None
        self._closing, self._closed = threading.Lock(), False
        self._queue: queue.SimpleQueue[_Append | list[int] | Future[None] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._work, name="journal", daemon=True)
        self._writer.start()

    def submit(self, *payload: Buffer) -> Future[int]:
        """Begin to append a record of some parts, which must stay as they are until it is done; the result is its
        sequence number. The result raises JournalError when the journal is full, and once any write has failed."""
        return self.submit_made(lambda: payload)

    def submit_made(self, make: Callable[[], Sequence[Buffer]]) -> Future[int]:
        """As :meth:`submit`, of parts that the writer's thread makes. Where that raises DataError, so does the
        result, and nothing is appended."""
        future: Future[int] = Future()
        with self._closing:
            if self._closed:
                raise JournalError(f"{self.folder} is closed")
            self._queue.put((make, future))
        return future

    async def append(self, *payload: Buffer) -> int:
        """Append a record; it is on the disk on return. As :meth:`submit`."""
        return await asyncio.wrap_future(self.submit(*payload))

    async def append_made(self, make: Callable[[], Sequence[Buffer]]) -> int:
        """Append a record; it is on the disk on return. As :meth:`submit_made`."""
        return await asyncio.wrap_future(self.submit_made(make))

    def settle(self, sequences: Collection[int]) -> None:
        """Hold records no longer; compaction frees their place. Those that were not freed are held again after the
        journal was opened anew."""
        self._queue.put(list(sequences))

    def compact(self) -> Future[None]:
        """Begin to free the place of settled records."""
        future: Future[None] = Future()
        with self._closing:
            if self._closed:
                raise JournalError(f"{self.folder} is closed")
            self._queue.put(future)
        return future

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield (sequence, payload) of all that is held, by sequence."""
        for sequence in sorted(self.log.held):
            yield sequence, self.read(sequence)

    def read(self, sequence: int) -> bytes:
        """Return the payload of a record. Raises KeyError for one that is not held, JournalError for a damaged one."""
        return self.log.read(sequence)

    def close(self) -> None:
        """Write what waits, and give the folder back. May be called twice."""
        with self._closing:
            if not self._closed:
                self._queue.put(None)
            self._closed = True
        self._writer.join()
        self._lock.release()

    # ------------------------------------------------------------------ the writer's thread
    def _work(self) -> None:
        going = True
        while going:
            items = [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            appends: list[_Append] = []
            for item in items:
                if isinstance(item, tuple):
                    appends.append(item)
                    continue
                self._append_all(appends)
                appends = []
                if isinstance(item, Future):
                    self._compact_for(item)
                elif item is None:
                    going = False
                else:
                    self.log.settle(item)
            self._append_all(appends)
        self.log.close()

    def _append_all(self, appends: Sequence[_Append]) -> None:
        waiting = [(make, future) for make, future in appends if future.set_running_or_notify_cancel()]
        written: list[tuple[Future[int], StoredRecord]] = []
        try:
            self._refuse_after_failure()
            for make, future in waiting:
                try:
                    parts = make()
                except DataError as error:
                    future.set_exception(error)
                    continue
                size = sum(map(len, parts)) + OVERHEAD
                if self._has_room(size):
                    written.append((future, self.log.append(parts)))
                else:
                    future.set_exception(self._full(size))
            if written:
                self.log.flush()
        except Exception as error:
            failure = self._fail(error)
            for _, future in waiting:
                if not future.done():
                    future.set_exception(failure)
            return
        for future, record in written:
            future.set_result(record.sequence)

    def _has_room(self, size: int) -> bool:
        if self.limit_bytes is None or self.log.stored_bytes + size <= self.limit_bytes:
            return True
        self.log.compact()
        return self.log.stored_bytes + size <= self.limit_bytes

    def _full(self, size: int) -> JournalError:
        return JournalError(
            f"{self.folder} holds {self.log.stored_bytes} bytes, and {size} more would exceed its limit of"
            f" {self.limit_bytes}: save checkpoints more often, keep fewer of them, or raise the limit"
        )

    def _compact_for(self, future: Future[None]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._refuse_after_failure()
            self.log.compact()
        except Exception as error:
            future.set_exception(self._fail(error))
        else:
            future.set_result(None)

    def _refuse_after_failure(self) -> None:
        """Raise the error of an earlier write: after it nobody knows what is on the disk."""
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> JournalError:
        if self._failure is None:
            fix = "free space there if it is full, and start the run again: it goes on from what is on the disk"
            made = JournalError(f"{self.folder} cannot be written: {error}; {fix}")
            self._failure = error if isinstance(error, JournalError) else made
        return self._failure
