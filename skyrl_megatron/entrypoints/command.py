"""Common parts of all commands: readable warnings, one message for a user error, the hardware of the run, and the
detection of a finished run.
"""

from __future__ import annotations

import atexit
import enum
import gc
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from skyrl_megatron.config.derive import is_address
from skyrl_megatron.config.hardware import Hardware, local_hardware
from skyrl_megatron.config.load import parse
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.errors import LaunchError, SkyRLMegatronError, SkyRLMegatronWarning
from skyrl_megatron.interrupts import end_is_reported, ending_with_signals, exit_code
from skyrl_megatron.progress import heartbeat

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


def run_command(work: Callable[[], int], *, beats: bool = False) -> int:
    """Return the exit code of ``work``. An error that a user can act on is printed without a traceback.

    ``beats``: report long operations that print nothing, on stderr. Not for servers, or commands that print progress.
    """
    atexit.register(gc.freeze)  # the last garbage collections over all imported objects take seconds
    with readable_warnings(), heartbeat(_on_terminal) if beats else nullcontext():
        try:
            with ending_with_signals():
                return work()
        except SkyRLMegatronError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt as error:
            if not (getattr(error, "reported", False) or end_is_reported()):
                print("interrupted", file=sys.stderr)
            return exit_code(getattr(error, "number", signal.SIGINT))


def with_strict_rows(args: Sequence[str], section: str) -> list[str]:
    """Return the arguments of a command with its option ``--strict-rows`` as the key that it sets."""
    named = {"--strict-rows": "true", "--strict-rows=true": "true", "--strict-rows=false": "false"}
    return [f"{section}.strict_rows={named[arg]}" if arg in named else arg for arg in args]


@contextmanager
def readable_warnings() -> Iterator[None]:
    """Print warnings of this package, also deprecations, as one line on stderr, without file and source line."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, SkyRLMegatronWarning | DeprecationWarning):
            print(f"warning: {message}", file=file or terminal(), flush=True)
        else:
            usual(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=SkyRLMegatronWarning)
        warnings.filterwarnings("default", category=DeprecationWarning, module=r"skyrl_megatron\.")
        warnings.filterwarnings("ignore", module=r"megatron\.")  # optional packages that make Megatron faster
        warnings.showwarning = show
        yield


def _on_terminal(text: str) -> None:
    print(text, file=terminal(), flush=True)


_terminal: TextIO | None = None
"""Stream of this package's warnings while stderr is redirected into a file."""


def terminal() -> TextIO:
    """Return the user's stderr, also while stderr is redirected into a file."""
    return _terminal or sys.stderr


@contextmanager
def redirect_stderr(log: Path, terminal: TextIO | None = None) -> Iterator[None]:
    """Append what libraries, also C++ code, write to stderr to ``log``. Warnings of this package go to ``terminal``.

    ``terminal``: default: the original stderr. Standard output is not redirected.
    """
    global _terminal
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    usual = os.dup(2)
    with os.fdopen(os.dup(usual), "w", buffering=1) as own, log.open("a") as file:
        before, _terminal = _terminal, terminal or own
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(usual, 2)
            os.close(usual)
            _terminal = before


def require_memory(gib: float, what: str) -> None:
    """Raise LaunchError unless ``gib`` GiB of memory are available for ``what``."""
    available = psutil.virtual_memory().available / 2**30
    if available < gib:
        raise LaunchError(
            f"memory: {available:.1f} GiB available, but {what} needs about {gib:.1f} GiB: end other processes, or "
            "use a larger machine"
        )


ANSWER_S = 90.0
"""Timeout for asking a cluster for its nodes, in seconds. It includes the import of Ray and the connection."""
SIZES = ("gpu_bytes", "host_bytes", "lockable_bytes")
"""Sizes that each node reports in addition to its number of GPUs (fields of Hardware)."""


def run_hardware() -> Hardware:
    """Return the nodes of the cluster that ``RAY_ADDRESS`` names, else this machine as one node.

    The process that starts a run may be on a node without GPUs, or outside the cluster, so the cluster is asked.
    Raises LaunchError if it does not answer.
    """
    address = os.environ.get("RAY_ADDRESS")
    return cluster_hardware(address) if address else local_hardware()


def cluster_hardware(address: str) -> Hardware:
    """Return the hardware of the Ray cluster at ``address``, which a short-lived process asks for. Raises LaunchError.

    If nodes differ, ``gpus_per_node`` is the maximum, memory and lockable memory are the minimum over nodes with GPUs,
    and the type of GPU is None. A size is None if a node does not report it.
    """
    command = [sys.executable, "-m", "skyrl_megatron.workers.ray_setup", address]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"RAY_ADDRESS={address}: the cluster did not report its nodes within {ANSWER_S:g} s; run ray status"
        ) from None
    lines = asked.stdout.splitlines()
    if asked.returncode or not lines:
        errors = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise LaunchError(errors[-1] if asked.returncode == 1 else f"RAY_ADDRESS={address}: {errors[-1]}")
    nodes: list[dict[str, Any]] = json.loads(lines[-1])
    with_gpus = [node for node in nodes if node["gpus"]]
    if not with_gpus:
        return Hardware(0, len(nodes), elsewhere=True)
    kinds = {node.get("gpu") for node in with_gpus}
    gpu, host, lockable = ([int(node[name]) for node in with_gpus if node.get(name) is not None] for name in SIZES)
    return Hardware(
        max(node["gpus"] for node in with_gpus),
        len(with_gpus),
        min(gpu) if len(gpu) == len(with_gpus) else None,
        min(host) if len(host) == len(with_gpus) else None,
        min(lockable, default=None),
        kinds.pop() if len(kinds) == 1 else None,
        elsewhere=True,
    )


class QuickCheck(enum.Enum):
    """Result of :func:`quick_check`."""

    FINISHED = enum.auto()
    """The run is finished and there is nothing left to do. This has been printed."""
    REFUSED = enum.auto()
    """The arguments have problems, which ``load_config`` will report."""
    RUN = enum.auto()
    """No problem was found. Model and data have not been checked."""


def quick_check(cls: type[SkyRLTrainConfig], argv: Sequence[str], hardware: Hardware | None = None) -> QuickCheck:
    """Check a command's arguments within a second, without loading large libraries, models or data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cfg, problems = parse(cls, argv)
        if problems or find_problems(cfg, hardware or run_hardware()):
            return QuickCheck.REFUSED
    return QuickCheck.FINISHED if report_if_finished(cfg) else QuickCheck.RUN


def report_if_finished(cfg: SkyRLTrainConfig) -> bool:
    """Return whether the run is finished; if so, print that and where its files are. ``cfg`` is resolved."""
    folder = cfg.trainer.ckpt_path
    if cfg.trainer.resume_mode in (None, "none"):
        return False
    if not is_address(folder) and not os.path.isdir(folder) and cfg.trainer.resume_mode != "from_path":
        return False
    from skyrl_megatron.trainer.stopping import remaining_work
    from skyrl_megatron.trainer.summary import summary_lines

    left = remaining_work(cfg)
    if left is None or not left.nothing:
        return False
    for line in (str(left), *summary_lines(cfg, left.step, left.step)):
        print(line, flush=True)
    return True
