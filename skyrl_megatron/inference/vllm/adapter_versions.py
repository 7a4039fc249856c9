"""The versions of an adapter that an engine holds at the same time, and the requests that use them.

A request is sampled with one version from its first token to its last; the next version serves beside it. An engine
holds as many as it has slots, and one slot is always the next version's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from skyrl_megatron.errors import RequestError, WeightSyncError
from skyrl_megatron.weight_sync.adapter_tensors import Pairs, target_modules

NAME = "policy"
"""What an adapter without a name is called in engines, where a version is ``policy@VERSION``."""


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """What an engine is started with to hold adapters."""

    rank: int
    """Largest rank of a factor, one of :data:`RANKS`."""
    targets: tuple[str, ...]
    """Ends of the names of the engine's modules that may have adapters: ``q_proj``, …, and ``experts``."""
    slots: int = 2
    """Versions held at the same time, of all adapters together: at least two of each, the one that serves and the
    next."""
    names: tuple[str, ...] = ("",)
    """The adapters; ``("",)`` where there is one without a name."""


SLOTS = 2
"""Versions of an adapter that an engine has room for: the one that serves, and the next. A request whose version is
older than these starts over, so more of them only help requests that take longer than a training step."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has room for; adapters of others are held in the next larger one (vllm/config/lora.py)."""


def adapter_slots(adapters: Pairs | None, slots: int | None = None) -> AdapterSlots | None:
    """Return what an engine needs for adapters of such factors (name → projection → sizes); None for none."""
    if adapters is None:
        return None
    largest = max(pair.rank for pairs in adapters.values() for pair in pairs.values())
    rank = next(rank for rank in RANKS if rank >= largest)
    return AdapterSlots(rank, target_modules(adapters), slots or SLOTS * len(adapters), tuple(adapters))


@dataclass(eq=False)
class Held:
    """One version of an adapter."""

    adapter: str
    version: str
    number: int
    """vLLM's id of it, never used again."""
    users: list[str] = field(default_factory=list)
    """Ids of the requests that it serves; of a HTTP request empty."""
    evicted: bool = False
    """Whether it had to leave while requests used it: they start over."""

    @property
    def name(self) -> str:
        """Name that prefixes are cached under."""
        return f"{self.adapter or NAME}@{self.version}"


class HeldAdapters:
    """The versions that one engine holds: of each adapter one serves, and during an update the next is a candidate.

    ``names``: of the adapters. Methods that take one raise RequestError for another; empty means the only one.
    """

    def __init__(self, slots: int, names: Sequence[str] = ("",)) -> None:
        self.slots, self.names = slots, tuple(names)
        self.serving: dict[str, Held] = {}
        self.candidates: dict[str, Held] = {}
        self._held: list[Held] = []
        self._numbers = itertools.count(1)

    def named(self, adapter: str) -> str:
        """Return which of the adapters a request asks for."""
        if adapter in self.names:
            return adapter
        if adapter or len(self.names) > 1:
            known = ", ".join(filter(None, self.names)) or "one without a name"
            raise RequestError(f"{f'adapter {adapter!r} is unknown' if adapter else 'no adapter is named'}: {known}")
        return self.names[0]

    @contextlib.contextmanager
    def use(self, request_id: str, adapter: str = "") -> Iterator[Held | None]:
        """Give a request the version that serves, and keep it until the request has ended. None: the base does, until
        the first version serves."""
        held = self.serving.get(self.named(adapter))
        if held is None:
            yield None
            return
        held.users.append(request_id)
        try:
            yield held
        finally:
            held.users.remove(request_id)

    def make_room(self, count: int = 1) -> list[str]:
        """Forget versions without requests, and the oldest others until slots are free for ``count`` candidates.
        Returns the requests that used those, which must be aborted. Raises WeightSyncError where HTTP requests use too
        many."""
        self.candidates.clear()
        serving = list(self.serving.values())
        self._held = [held for held in self._held if held.users or held in serving]
        aborted: list[str] = []
        for held in list(self._held):
            if len(self._held) + count <= self.slots:
                break
            if held not in serving and all(held.users):
                self._held.remove(held)
                held.evicted = True
                aborted += held.users
        if len(self._held) + count > self.slots:
            raise WeightSyncError(
                f"start: of {self.slots} adapter slots too few are free for {count} more: "
                f"{', '.join(f'{held.name} by {len(held.users)} requests' for held in self._held)}; raise "
                "generator.inference_engine.engine_init_kwargs.max_loras"
            )
        return aborted

    def add(self, version: str, adapter: str = "") -> Held:
        """Make a candidate of a version that the workers have activated, or are about to."""
        self.candidates[adapter] = held = Held(adapter, version, next(self._numbers))
        self._held.append(held)
        return held

    def commit(self) -> None:
        """Let the candidates serve."""
        self.serving |= self.candidates
        self.candidates.clear()

    def leave(self) -> None:
        """Forget the candidates: what served before goes on."""
        for held in self.candidates.values():
            self._held.remove(held)
        self.candidates.clear()

    def numbers(self) -> list[int]:
        """List the ids of all versions that are held."""
        return [held.number for held in self._held]
