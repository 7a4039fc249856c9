"""What a check looks at, and what it may find beside a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that has not been started. Its configuration is resolved, and may have problems."""

    cfg: SkyRLTrainConfig
    hardware: Hardware
    """What it will get."""
    training: bool = True
    """False for an evaluation, which reads no training data and trains nothing."""
    scripted: bool = False
    """Started by a user's script, which may bring data sets and a tokenizer of its own."""
    ahead: bool = False
    """Looked at by ``--check`` alone: the files of a model beside ``config.json`` may come later."""

    def awaits_files(self, folder: Path) -> bool:
        """Return whether the weights of a model are yet to come into its folder."""
        return self.ahead and not any(folder.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class NotChecked:
    """Something that shows only when the run has started."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"
