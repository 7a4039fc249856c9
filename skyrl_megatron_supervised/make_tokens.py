"""The processes that tokenize rows while a run trains (:mod:`.row_tokens`), one for each processor core.

    python -m skyrl_megatron_supervised.make_tokens

reads the job from its standard input, loads it once, forks the others, and writes a line for each finished shard. It
and they end when that input ends, so with the run, whatever ends that.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_megatron.data.row_cache import RowCache
    from skyrl_megatron_supervised.chat_rows import ChatRows

MOST_PROCESSES = 64
NICE = 10
"""Training comes first where it needs the same cores."""
PR_SET_PDEATHSIG = 1
_SHARD = struct.Struct("=ii")


class TokenMakers:
    """The processes that make ``shards`` of ``rows`` in the entries ``keys``. Raises RuntimeError if the tokenizer
    cannot be sent to them."""

    def __init__(
        self, rows: ChatRows, cache: RowCache, keys: Sequence[str], shards: Sequence[tuple[int, int]]
    ) -> None:
        self.count = min(len(os.sched_getaffinity(0)), len(shards), MOST_PROCESSES)
        chat = rows.chat
        job = {
            "rows": (type(rows), rows.names, rows.settings, rows.hub_commits, sorted(rows.declared)),
            "chat": (chat.tokenizer, chat.template, chat.kwargs, chat.stop_token_ids),
            "cache": (cache.most, cache.folder),
            "keys": list(keys),
            "files": [part.fingerprint for part in rows.rows.sources],
            "shards": list(shards),
            "count": self.count,
        }
        try:
            sent = pickle.dumps(job)
        except Exception as error:  # whatever a tokenizer's own code raises
            raise RuntimeError(f"the tokenizer cannot be sent to another process: {error}") from error
        environment = os.environ | {
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt of the terminal is the run's to handle
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(sent)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: its exit code says so

    def finished(self) -> Iterator[tuple[int, int]]:
        """Yield each shard when its file is there."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            which, shard = map(int, line.split())
            yield which, shard
        self._process.wait()

    def require_success(self) -> None:
        """Raise RuntimeError if a process failed."""
        if self._process.returncode:
            raise RuntimeError(f"the processes that tokenize rows ended with code {self._process.returncode}")

    def end(self) -> None:
        """End the processes, if they have not ended."""
        self._process.kill()
        self._process.wait()


def main() -> int:
    """Make the shards of the job on the standard input."""
    os.nice(NICE)
    job: dict[str, Any] = pickle.load(sys.stdin.buffer)
    from skyrl_megatron.data.row_cache import CacheEntry, RowCache
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.row_shards import make_shard

    tokenizer, template, kwargs, stops = job["chat"]
    kind, names, settings, commits, declared = job["rows"]
    cache = RowCache(*job["cache"])
    chat = ChatFormat(tokenizer, template, kwargs, stop_token_ids=stops)
    rows = kind.to_make(names, chat, settings, hub_commits=commits, declared=declared, cache=cache)
    if [part.fingerprint for part in rows.rows.sources] != job["files"]:  # their tokens would have the keys of others
        print("data: a file has changed since the run opened it: its rows are not cached", file=sys.stderr)
        return 1
    entries = [CacheEntry(cache.folder / key) for key in job["keys"]]
    starts = [0, *rows.rows.ends[:-1]]
    tasks, feeder = os.pipe()
    workers = []
    for _ in range(job["count"]):
        if (worker := os.fork()) == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(feeder)
            while len(data := os.read(tasks, _SHARD.size)) == _SHARD.size:
                which, shard = _SHARD.unpack(data)
                if not make_shard(rows, rows.rows.sources[which], starts[which], entries[which], shard, cache):
                    os._exit(1)
                os.write(1, f"{which} {shard}\n".encode())
            os._exit(0)
        workers.append(worker)
    os.close(tasks)
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    try:
        for which, shard in job["shards"]:
            os.write(feeder, _SHARD.pack(which, shard))
    except BrokenPipeError:
        pass  # all workers failed
    os.close(feeder)
    return max(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) != 0 for worker in workers)


def _end_with_the_run() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    os._exit(main())  # a thread still reads the standard input
