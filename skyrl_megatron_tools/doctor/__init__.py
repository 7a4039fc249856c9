"""Check whether this machine can run a training: ``launch/doctor.sh``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "--", "warn", "FAIL"]
"""``--``: missing but not required. ``warn``: a run starts, but works less well. ``FAIL``: a run cannot start."""
NAME_WIDTH = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its name, its state, what was found, and how to fix it."""

    name: str
    state: State
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"  {self.state:<4}  {self.name:<{NAME_WIDTH}}  {self.text}"
        return f"{line}\n{'':{NAME_WIDTH + 10}}fix: {self.fix}" if self.fix else line
