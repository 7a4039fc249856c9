"""A group on its way from sampling to training, and what hands out the groups of each step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_megatron.rollout.interface import GeneratorOutput


@dataclass(eq=False)
class Group:
    """One prompt and its samples, on the way through the stream."""

    number: int
    """Position of its prompt in the data, counted from 0 over all epochs."""
    prompt: dict[str, Any]
    """The dataset entry: ``prompt``, ``uid``, ``env_class``, ``env_extras``."""
    started: int
    """The published version when its sampling began."""
    output: GeneratorOutput | None = None
    """Its rows, once all are sampled."""
    versions: list[int] = field(default_factory=list)
    """The version of the oldest trained token, for each row that has one."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    """The task that samples it."""

    @property
    def uid(self) -> str:
        """The prompt's uid."""
        return str(self.prompt["uid"])

    @property
    def oldest(self) -> int:
        """Version of the oldest trained token; while the group is sampled, a lower bound of it."""
        return min(self.versions, default=self.started)

    def finish(self, output: GeneratorOutput) -> None:
        """Set the rows. No row is older than ``started``, because engines serve no version older than that."""
        self.output = output
        self.versions = [max(version, self.started) for version in _oldest_trained(output, self.started)]


class GroupLog(Protocol):
    """A durable log of finished groups. It records a group before the group can be trained on."""

    async def finished(self, group: Group) -> None:
        """Record a group, and return once it is durable. Called on the event loop, concurrently for several groups."""


class GroupStream(Protocol):
    """Hands out the groups of each step: sampled ahead (:class:`RolloutStream`), or recorded (``replayed.py``)."""

    def start(self, version: int, *, oldest: int = 0, ahead: Iterable[int] = ()) -> None:
        """Begin at ``version``. ``oldest``, ``ahead``: the values of :meth:`state`."""

    async def take(self) -> list[Group]:
        """Return the groups of a step, in the order of their prompts."""

    def give_back(self, groups: Sequence[Group]) -> None:
        """Record that a batch is not trained. Its groups are not handed out again."""

    def trained(self, groups: Sequence[Group]) -> list[int]:
        """Mark the groups of a step as trained. Returns the numbers of the groups that were given up since the
        previous step."""

    def advance(self, version: int) -> None:
        """Record that engines serve ``version`` now."""

    def staleness(self, groups: Iterable[Group]) -> list[int]:
        """Return the staleness in steps of each row, if it were trained now."""

    def metrics(self) -> dict[str, float]:
        """Return ``async/…``: counts of the groups since the last call."""

    def state(self) -> dict[str, Any]:
        """Return the numbers of the groups that are done, as plain values."""

    async def close(self) -> None:
        """Stop, and release what the stream holds."""


def _oldest_trained(output: GeneratorOutput, unknown: int) -> Iterator[int]:
    """Yield the oldest version among the trained tokens of each row that has some. ``unknown``: used for rows without
    versions."""
    spans: Sequence[Sequence[tuple[str, int, int]] | None]
    spans = output.get("rollout_versions") or [None] * len(output["loss_masks"])
    for row, mask in zip(spans, output["loss_masks"], strict=True):
        if row:
            trained = [int(name) if name.isdecimal() else unknown for name, a, b in row if any(mask[a:b])]
            if trained:
                yield min(trained)
        elif any(mask):
            yield unknown
