"""Error and warning types. One error names the thing, its value, and the fix; user mistakes never show a traceback.

Entry points catch :class:`SkyRLMegatronError`, print ``str(error)`` and exit with ``error.exit_code``.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class SkyRLMegatronWarning(UserWarning):
    """Our own warnings. Tests turn them into errors, so each one is expected where it appears."""


class SkyRLMegatronError(Exception):
    """Base of every error that a user can cause or must act on. ``exit_code`` is what a command exits with."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration.

    ``key`` is the dotted config key, ``value`` what it was set to, ``fix`` a sentence saying what to change.
    """

    key: str
    value: object
    fix: str

    def __str__(self) -> str:
        return f"{shown(self.key)}={shown(self.value)}: {self.fix}"


def shown(value: object) -> str:
    """Return a value as messages show it: one line that every terminal can print, the middle of what is long left
    out."""
    text = str(value).encode(errors="backslashreplace").decode().replace("\n", "\\n")
    return (
        text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-LONGEST // 4 :]} ({len(text):,} characters)"
    )


LONGEST = 2000
"""Characters of a value that a message shows."""


def install_command(package: str) -> str:
    """Return the command that adds a package to the environment of this process, which has no pip of its own."""
    own = Path(sys.prefix) / "tools" / "bin" / "uv"
    return f"{own if own.exists() else 'uv'} pip install --python {sys.executable} {package}"


def with_origin(error: BaseException) -> str:
    """Return type and message of an error of a user's code, and the file and line of it that raised.

    The line is the innermost outside of this package, of other packages and of the standard library; where all of the
    traceback is inside, none is named.
    """
    text = f"{type(error).__name__}: {error}"
    own = str(Path(__file__).parent)
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((own, _LIBRARY, "<frozen")) and "site-packages" not in frame.filename:
            place = f", at {frame.filename}:{frame.lineno} in {frame.name}"
    return text + place


_LIBRARY = sysconfig.get_path("stdlib")


class ConfigError(SkyRLMegatronError, ValueError):
    """All problems of a configuration at once, found before any process group, Ray or device is taken."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n".join([f"{head} in the configuration:", *(f"  - {p}" for p in self.problems)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        """Pickle with the problems; an exception's own way would call the class with the message."""
        return type(self), (self.problems,)


class ModelLoadError(SkyRLMegatronError):
    """A HF folder is missing, corrupt, or of a kind that is not supported."""


class HubError(SkyRLMegatronError):
    """A name on the Hugging Face hub, or files of it, cannot be had; says why and what to do."""


class DistributedError(SkyRLMegatronError):
    """A rank failed, or a phase outlived its deadline; names rank and phase."""


class RankLostError(DistributedError):
    """A rank of ``role`` is gone, and the others wait to be told what to do."""

    def __init__(self, message: str, role: str) -> None:
        super().__init__(message)
        self.role = role

    def __reduce__(self) -> tuple[type[RankLostError], tuple[str, str]]:
        """Pickle with the role; an exception's own way would call the class with the message alone."""
        return type(self), (str(self), self.role)


class EngineError(SkyRLMegatronError):
    """An inference engine failed to start, answer, or update."""


class EngineGoneError(EngineError):
    """An engine died or hangs. Nothing of the request was delivered: it can be made again on another engine."""


class RequestError(EngineError, ValueError):
    """A request that no engine can serve: token ids, length, sampling keys."""


class WeightSyncError(SkyRLMegatronError):
    """The weights on an engine are not provably those of the trainer."""


class CheckpointError(SkyRLMegatronError):
    """A checkpoint is incomplete, corrupt, or cannot be written."""


class JournalError(CheckpointError):
    """What a run keeps of its rollouts between checkpoints is damaged, at its limit, or cannot be written."""


class DataError(SkyRLMegatronError, ValueError):
    """A dataset, environment or reward is not what the run needs; names file and row."""


class AlgorithmError(SkyRLMegatronError, ValueError):
    """An estimator or loss got tensors that it cannot use, a function from outside returned the wrong thing, or a name
    is not registered (or is already)."""


class MemoryAheadError(SkyRLMegatronError):
    """A host's memory would be used up in the next steps; the run ended before, saved."""


class LaunchError(SkyRLMegatronError):
    """The machine lacks what the run needs: memory, a port, a slot in the cluster."""
