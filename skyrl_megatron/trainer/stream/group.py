"""A group: all samples of one prompt, and the policy versions that sampled them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_megatron.rollout.interface import GeneratorOutput


@dataclass(eq=False)
class Group:
    """One prompt on its way through the stream."""

    number: int
    """Place of its prompt in the data, all epochs one after another, from 0."""
    prompt: dict[str, Any]
    """The entry of the data set: ``prompt``, ``uid``, ``env_class``, ``env_extras``."""
    started: int
    """Version that was published when its sampling began."""
    output: GeneratorOutput | None = None
    """Its rows, once all of them are sampled."""
    versions: list[int] = field(default_factory=list)
    """Of each row with a token that is trained on: the version of the oldest one."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    """What samples it."""

    @property
    def uid(self) -> str:
        """The prompt's uid."""
        return str(self.prompt["uid"])

    @property
    def oldest(self) -> int:
        """Version of the oldest token that is trained on; while it is sampled, the oldest that this can become."""
        return min(self.versions, default=self.started)

    def finish(self, output: GeneratorOutput) -> None:
        """Take the rows. Engines serve no older version than the one that was published when sampling began."""
        self.output = output
        self.versions = [max(version, self.started) for version in _oldest_trained(output, self.started)]


class GroupLog(Protocol):
    """What is told of finished groups before they can be trained on, so that they outlive the process."""

    async def finished(self, group: Group) -> None:
        """Return once the group is safe. Called on the event loop, for several groups at a time."""


def _oldest_trained(output: GeneratorOutput, unknown: int) -> Iterator[int]:
    """Yield the oldest version among the trained tokens of each row that has any; ``unknown`` where the generator does
    not say it."""
    spans: Sequence[Sequence[tuple[str, int, int]] | None]
    spans = output.get("rollout_versions") or [None] * len(output["loss_masks"])
    for row, mask in zip(spans, output["loss_masks"], strict=True):
        if row:
            trained = [int(name) if name.isdecimal() else unknown for name, a, b in row if any(mask[a:b])]
            if trained:
                yield min(trained)
        elif any(mask):
            yield unknown
