"""The versions of an adapter that an engine holds at the same time, and the requests that use them. Knows no vLLM.

A request is sampled with one version from its first token to its last; the next version serves beside it. An engine
holds as many as it has slots, and one slot is always the next version's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.adapter_tensors import PairShape, target_modules

NAME = "policy"
"""Name of the adapter in engines: a version of it is ``policy@VERSION``."""


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """What an engine is started with to hold adapters."""

    rank: int
    """Largest rank of a factor, one of :data:`RANKS`."""
    targets: tuple[str, ...]
    """Ends of the names of the engine's modules that may have adapters: ``q_proj``, …, and ``experts``."""
    slots: int = 2
    """Versions held at the same time: at least the one that serves and the next."""


SLOTS = 2
"""Versions that an engine has room for: the one that serves, and the next. A request whose version is older than these
starts over, so more of them only help requests that take longer than a training step."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has room for; adapters of others are held in the next larger one (vllm/config/lora.py)."""


def adapter_slots(pairs: Mapping[str, PairShape] | None, slots: int | None = None) -> AdapterSlots | None:
    """Return what an engine needs for an adapter of such factors (projection → sizes); None for none."""
    if pairs is None:
        return None
    largest = max(pair.rank for pair in pairs.values())
    return AdapterSlots(next(rank for rank in RANKS if rank >= largest), target_modules(pairs), slots or SLOTS)


@dataclass(eq=False)
class Held:
    """One version."""

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
        return f"{NAME}@{self.version}"


class HeldAdapters:
    """The versions that one engine holds: one serves, and during an update the next is a candidate."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.serving: Held | None = None
        self.candidate: Held | None = None
        self._held: list[Held] = []
        self._numbers = itertools.count(1)

    @contextlib.contextmanager
    def use(self, request_id: str) -> Iterator[Held | None]:
        """Give a request the version that serves, and keep it until the request has ended."""
        held = self.serving
        if held is None:
            yield None
            return
        held.users.append(request_id)
        try:
            yield held
        finally:
            held.users.remove(request_id)

    def make_room(self) -> list[str]:
        """Forget versions without requests, and the oldest others until a slot is free for a candidate. Returns the
        requests that used those, which must be aborted. Raises WeightSyncError where HTTP requests use too many."""
        self.candidate = None
        self._held = [held for held in self._held if held.users or held is self.serving]
        aborted: list[str] = []
        for held in list(self._held):
            if len(self._held) < self.slots:
                break
            if held is not self.serving and all(held.users):
                self._held.remove(held)
                held.evicted = True
                aborted += held.users
        if len(self._held) >= self.slots:
            raise WeightSyncError(
                f"start: all {self.slots} adapter slots are in use: "
                f"{', '.join(f'{held.name} by {len(held.users)} requests' for held in self._held)}; raise "
                "generator.inference_engine.engine_init_kwargs.max_loras"
            )
        return aborted

    def add(self, version: str) -> Held:
        """Make a candidate of a version that the workers have activated, or are about to."""
        self.candidate = Held(version, next(self._numbers))
        self._held.append(self.candidate)
        return self.candidate

    def commit(self, version: str) -> None:
        """Let the candidate serve, if there is one."""
        if self.candidate is not None:
            self.candidate.version = version
            self.serving, self.candidate = self.candidate, None

    def leave(self) -> None:
        """Forget the candidate: what served before goes on."""
        if self.candidate is not None:
            self._held.remove(self.candidate)
            self.candidate = None

    def numbers(self) -> list[int]:
        """List the ids of all versions that are held."""
        return [held.number for held in self._held]
