"""``spans.jsonl``: of every step who worked when, as lanes of trainer, ranks and engines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron import spans
from skyrl_megatron.spans import Span

if TYPE_CHECKING:
    from skyrl_megatron.workers.worker_group import WorkerGroup

RANKS = 64
"""Ranks of a role that get lanes: the first ones."""
SHORTEST_S = 0.0005
OUTER = ("step", "train_critic_and_policy")
"""Phases that are the sum of others."""


class LaneLog:
    """Writes a line for each step into ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, roles: Mapping[str, WorkerGroup], *, told: bool = True) -> list[Span]:
        """Take what trainer, ranks and engines recorded since the last step, write it if it is to be ``told``, and
        return it."""
        found = [span for span in spans.take() if span[1] not in OUTER]
        for name, role in roles.items():
            if role.group.actors:
                for rank, theirs in enumerate(role.take_spans()[:RANKS]):
                    found += [(f"{name} rank {rank}", what, begin, end) for _, what, begin, end in theirs]
        found = [span for span in found if span[3] - span[2] >= SHORTEST_S]
        if found and told:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(lanes(step, found)) + "\n")
        return found


def lanes(step: int, found: Sequence[Span]) -> dict[str, object]:
    """Return a line of the file: seconds since its ``began``, by lane; the trainer's first, then by name."""
    began = min(begin for _, _, begin, _ in found)
    by_lane: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for lane, name, begin, end in found:
        by_lane[lane].append((name, round(begin - began, 4), round(end - began, 4)))
    order = sorted(by_lane, key=lambda lane: (lane != "trainer", [_as_number(part) for part in lane.split()]))
    outer_first = {lane: sorted(by_lane[lane], key=lambda span: (span[1], -span[2])) for lane in order}
    return {"step": step, "began": round(began, 3), "lanes": outer_first}


def _as_number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)
