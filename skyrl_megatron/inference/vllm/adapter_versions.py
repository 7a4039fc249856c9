"""The adapter versions that an engine has loaded, and the requests that use them.

A request uses one version from its first to its last token. New requests use the newest version at the same time. An
engine has a slot per version; one slot is reserved for the next version.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_megatron.errors import RequestError, WeightSyncError

NAME = "policy"
"""Name of the unnamed adapter in engines, where its versions are called ``policy@VERSION``."""


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """The adapter settings that an engine starts with."""

    rank: int
    """Largest rank, one of those that vLLM supports."""
    targets: tuple[str, ...]
    """Suffixes of the names of modules that may have adapters: ``q_proj``, …, and ``experts``."""
    slots: int = 2
    """Number of versions of all adapters together: at least two per adapter, the serving and the next one."""
    names: tuple[str, ...] = ("",)
    """Names of the adapters; ``("",)`` for one unnamed adapter."""
    worker_extension: str = ""
    """Subclass of ``compat.WorkerExtension`` that receives adapters."""

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's engine arguments."""
        return {
            "enable_lora": True,
            "max_loras": self.slots,
            "max_cpu_loras": self.slots,
            "max_lora_rank": self.rank,
            "lora_target_modules": list(self.targets),
            "enable_mixed_moe_lora_format": "experts" in self.targets,
            "worker_extension_cls": self.worker_extension,
        }


@dataclass(eq=False)
class AdapterVersion:
    """One loaded version of an adapter."""

    adapter: str
    version: str
    number: int
    """Its id in vLLM, never reused."""
    users: list[str] = field(default_factory=list)
    """Ids of the requests that use it; "" for an HTTP request."""
    evicted: bool = False
    """Whether it was evicted while requests used it, which then start over."""

    @property
    def name(self) -> str:
        """Its name in vLLM, which is part of the key of cached prefixes."""
        return f"{self.adapter or NAME}@{self.version}"


class AdapterVersions:
    """The adapter versions of one engine. Each adapter has a serving version, and during an update a candidate.

    ``names``: the adapters' names. Methods with a parameter ``adapter`` raise RequestError for an unknown name; empty
    means the only adapter.
    """

    def __init__(self, slots: int, names: Sequence[str] = ("",)) -> None:
        self.slots, self.names = slots, tuple(names)
        self.serving: dict[str, AdapterVersion] = {}
        self.candidates: dict[str, AdapterVersion] = {}
        self._held: list[AdapterVersion] = []
        self._numbers = itertools.count(1)

    def named(self, adapter: str) -> str:
        """Return the name of a request's adapter."""
        if adapter in self.names:
            return adapter
        if adapter or len(self.names) > 1:
            known = ", ".join(filter(None, self.names)) or "the only one, without a name"
            wrong = f"adapter {adapter!r} is unknown" if adapter else "the request names no adapter"
            raise RequestError(f"{wrong}: use {known}")
        return self.names[0]

    @contextlib.contextmanager
    def use(self, request_id: str, adapter: str = "") -> Iterator[AdapterVersion | None]:
        """Yield the serving version (None until there is one: use the base model) and keep it loaded in the block."""
        held = self.serving.get(self.named(adapter))
        if held is None:
            yield None
            return
        held.users.append(request_id)
        try:
            yield held
        finally:
            held.users.remove(request_id)

    def free_slots(self, count: int = 1) -> list[str]:
        """Free slots for ``count`` candidates: remove unused versions, then evict the oldest.

        Returns the requests that used evicted versions, which must be aborted. Raises WeightSyncError if HTTP requests
        use too many versions.
        """
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
                f"start: too few of {self.slots} adapter slots are free for {count} more; in use: "
                f"{', '.join(f'{held.name} by {len(held.users)} requests' for held in self._held)}; raise "
                "generator.inference_engine.engine_init_kwargs.max_loras"
            )
        return aborted

    def add(self, version: str, adapter: str = "") -> AdapterVersion:
        """Add a candidate, which the workers have activated or will activate."""
        self.candidates[adapter] = held = AdapterVersion(adapter, version, next(self._numbers))
        self._held.append(held)
        return held

    def commit(self) -> None:
        """Make the candidates the serving versions."""
        self.serving |= self.candidates
        self.candidates.clear()

    def leave(self) -> None:
        """Remove the candidates. The serving versions stay."""
        for held in self.candidates.values():
            self._held.remove(held)
        self.candidates.clear()

    def numbers(self) -> list[int]:
        """List the vLLM ids of all loaded versions."""
        return [held.number for held in self._held]
