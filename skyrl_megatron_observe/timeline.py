"""The timeline of a run: the spans of trainer, ranks and engines in each step, a lane for each of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron import progress as spans
from skyrl_megatron.progress import Span

if TYPE_CHECKING:
    from skyrl_megatron.workers.worker_group import WorkerGroup

RANKS = 64
"""Number of ranks of a role that get lanes in the timeline."""
SHORTEST_S = 0.0005
"""Duration of the shortest span in the timeline."""
OUTER = ("step", "train_critic_and_policy")
"""Phases that contain other phases."""


class LaneLog:
    """Writes the timeline: one line per step, in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, roles: Mapping[str, WorkerGroup], *, record: bool = True) -> list[Span]:
        """Return the spans of trainer, ranks and engines since the last call, and write them unless ``record`` is
        false."""
        taken = [span for span in spans.take() if span[1] not in OUTER]
        for name, role in roles.items():
            if role.group.actors:
                for rank, of_rank in enumerate(role.take_spans()[:RANKS]):
                    taken += [(f"{name} rank {rank}", what, begin, end) for _, what, begin, end in of_rank]
        # Thousands of short spans would make the page slow, and none of them is wide enough to be seen.
        visible = [span for span in taken if span[3] - span[2] >= SHORTEST_S]
        if visible and record:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(lanes(step, visible)) + "\n")
        return visible


def lanes(step: int, spans_of_step: Sequence[Span]) -> dict[str, object]:
    """Return a line of the timeline: lane → spans in seconds since ``began``; the trainer is first, then by name."""
    began = min(begin for _, _, begin, _ in spans_of_step)
    by_lane: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for lane, name, begin, end in spans_of_step:
        by_lane[lane].append((name, round(begin - began, 4), round(end - began, 4)))
    order = sorted(by_lane, key=lambda lane: (lane != "trainer", [_as_number(part) for part in lane.split()]))
    outer_first = {lane: sorted(by_lane[lane], key=lambda span: (span[1], -span[2])) for lane in order}
    return {"step": step, "began": round(began, 3), "lanes": outer_first}


def _as_number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)
