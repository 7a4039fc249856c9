"""What works on this machine: ``launch/doctor.sh``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "--", "warn", "FAIL"]
"""``--``: not there and not needed. ``warn``: a run starts and is worse for it. ``FAIL``: it could not start."""
NAME_WIDTH = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and what to do about it."""

    name: str
    state: State
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"  {self.state:<4}  {self.name:<{NAME_WIDTH}}  {self.text}"
        return f"{line}\n{'':{NAME_WIDTH + 10}}fix: {self.fix}" if self.fix else line
