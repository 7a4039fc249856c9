"""What a publication calls and what it returns: trainer ranks and a pool of engines, wherever they run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_megatron.weight_sync.probe import Gap


class TrainerRank(Protocol):
    """One rank of the policy, as the publisher calls it. All ranks get every call at the same time."""

    async def weight_metadata(self) -> Sequence[Any]:
        """``TensorMeta`` objects, or tuples of their fields; empty for a rank that sends nothing."""

    async def listen_for_engines(self) -> tuple[str, int]:
        """Take an address for this rank's group (``WeightSender.listen``)."""

    async def connect_engines(self, receivers: int, timeout_s: float) -> None:
        """Open the group at that address (``WeightSender.connect``)."""

    async def send_weights(self) -> list[int]:
        """Checksum of each bucket sent (``WeightSender.send``)."""

    async def score(self, token_ids: Sequence[int], *, nudge: float = 0.0) -> list[float] | None:
        """Log-probs of tokens 1 … n−1 at temperature 1, nats, on a rank that has them; None on the others.

        ``nudge``: relative change of every embedding first (``runtime/scoring.py``)."""

    async def offload(self) -> None:
        """Free the GPU memory that engines on the same GPUs need, until the next training pass. Called only if they
        share them."""


class Slot(Protocol):
    """An engine's place in a pool (``inference/pool.py``)."""

    name: str
    version: str
    why: str
    engine: Any

    async def probe(self, timeout_s: float) -> str: ...


class Pool(Protocol):
    """The part of ``inference.pool.EnginePool`` that a publication needs."""

    changing: asyncio.Lock
    published: str

    def alive(self) -> list[Any]: ...
    def lost(self) -> list[Any]: ...
    def hold(self, slot: Any) -> None: ...
    def serve(self, slot: Any, version: str) -> None: ...
    def publish(self, version: str) -> None: ...
    async def sleep(self, timeout_s: float) -> None: ...
    async def restart(self, slot: Any) -> None: ...
    async def drop(self, slot: Any, why: str) -> None: ...
    async def mark_dead(self, slot: Any, why: str) -> None: ...


@dataclass(slots=True)
class SyncReport:
    """What a publication cost and proved."""

    version: str
    nbytes: int
    engines: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall clock of each phase; of the last attempt, if engines failed."""
    gaps: dict[str, Gap] = field(default_factory=dict)
    """Per engine, if the probe was due."""
    failures: list[str] = field(default_factory=list)
    """What went wrong on the way."""

    @property
    def total_seconds(self) -> float:
        """From the first pause to the last resume, of the last attempt."""
        return sum(self.seconds.values())

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes sent per second of transfer, in 10⁹; each engine received as many."""
        return self.nbytes / self.seconds["transfer"] / 1e9
