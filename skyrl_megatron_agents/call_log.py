"""The calls of a run's agents on disk: what was sampled is durable before a client sees it.

A :class:`LoggedCall` has the sampled tokens with everything that training needs, and the bytes of the answer. After a
crash the graphs are as they were, and a client that asks again gets the answer that it missed. A trajectory is
forgotten once its rows are elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from skyrl_megatron.data.codec import Codec
from skyrl_megatron.data.journal import Journal
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.types import TokenSupport


@dataclass(slots=True)
class LoggedChoice:
    """One sampled answer of a call (:class:`~skyrl_megatron_agents.graph.SampledCall`)."""

    number: int
    parent: int | None
    rest: np.ndarray
    generation: Generation
    end: str
    """Digest of the messages up to and with the answer, hexadecimal."""
    text_only: bool
    text: str | None = None
    """Prompt and answer of a call of ``/v1/completions`` as text."""
    whole: str = ""
    """Digest of the answer's text with its thinking, hexadecimal."""


@dataclass(slots=True)
class LoggedConversation:
    """What is known of a conversation when its first call is answered
    (:class:`~skyrl_megatron_agents.graph.Conversation`)."""

    system: str
    tools: int
    quoted: list[str]


@dataclass(slots=True)
class LoggedCall:
    """A request that was answered."""

    trajectory: str
    request: str
    """Digest of the request, hexadecimal: an equal one is a retry."""
    content_type: str
    answer: str
    """The body of the answer."""
    choices: list[LoggedChoice] = field(default_factory=list)
    conversation: int = 0
    begins: LoggedConversation | None = None
    """The conversation, if this is its first call."""


@dataclass(slots=True)
class ForgottenTrajectories:
    """The calls of these trajectories are no longer needed."""

    names: list[str]


_CODEC = Codec(LoggedCall, LoggedChoice, LoggedConversation, ForgottenTrajectories, Generation, TokenSupport)


class CallLog:
    """The log in a folder. Raises JournalError and CheckpointError as :class:`~skyrl_megatron.data.journal.Journal`
    does."""

    def __init__(self, folder: str | Path, *, setting: str = "folder") -> None:
        self.stored: dict[str, list[LoggedCall]] = {}
        """Trajectory → the calls of an earlier process, in order."""
        self._sequences: dict[str, list[int]] = {}
        self.journal = Journal(folder, setting=setting)
        try:
            forgotten: list[int] = []
            for sequence, payload in self.journal.records():
                record = _CODEC.decode(payload)
                if isinstance(record, ForgottenTrajectories):
                    freed = [number for name in record.names for number in self._sequences.pop(name, ())]
                    for name in record.names:
                        self.stored.pop(name, None)
                    forgotten += freed or [sequence]  # kept as long as the file has calls that it frees
                else:
                    self.stored.setdefault(record.trajectory, []).append(record)
                    self._sequences.setdefault(record.trajectory, []).append(sequence)
            if forgotten:
                self.journal.release(forgotten)
                self.journal.compact().result()
        except BaseException:
            self.journal.close()
            raise

    async def add(self, call: LoggedCall) -> None:
        """Append a call. It is on disk on return. Calls are on disk in this order. Raises JournalError if the disk
        fails, RowsLostError if what an engine sampled was lost with its host."""
        # In the journal's thread: what an engine sampled is fetched there.
        sequence = await self.journal.append(partial(_CODEC.encode, call))
        self._sequences.setdefault(call.trajectory, []).append(sequence)

    async def forget(self, names: Iterable[str]) -> None:
        """Free the calls of trajectories, also for later processes."""
        logged = [name for name in names if name in self._sequences]
        if not logged:
            return
        await self.journal.append(lambda: _CODEC.encode(ForgottenTrajectories(logged)))
        freed = [sequence for name in logged for sequence in self._sequences.pop(name)]
        for name in logged:
            self.stored.pop(name, None)
        self.journal.release(freed)
        await asyncio.wrap_future(self.journal.compact())

    def close(self) -> None:
        """Write what waits, and release the folder."""
        self.journal.close()
