"""What users type wrong in their first hour, and the message that each mistake must get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mistake:
    """One row: a command with one thing wrong in it."""

    name: str
    """The mistake in a few words; the test's id."""
    arguments: Callable[[Path], list[str]]
    """Folder of its own → arguments of ``launch/run_moe.sh``, with ``--check`` where that finds the mistake."""
    says: tuple[str, ...]
    """Parts of the one message: the key, the value or the fix."""


MISTAKES: tuple[Mistake, ...] = ()
