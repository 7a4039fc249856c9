"""What every command does: readable warnings, one message for a user's mistake, the hardware of the run, and whether
the run that is asked for is finished already.
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

    ``beats``: what takes long without a line of its own gets one on stderr; not for what serves or prints by itself.
    """
    atexit.register(gc.freeze)  # the interpreter's last collections, over all that was imported, take seconds
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


@contextmanager
def readable_warnings() -> Iterator[None]:
    """Print our warnings, deprecations included, as one line each on stderr instead of with file and source line."""
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
        warnings.filterwarnings("ignore", module=r"megatron\.")  # what Megatron would run faster with
        warnings.showwarning = show
        yield


def _on_terminal(text: str) -> None:
    print(text, file=terminal(), flush=True)


_terminal: TextIO | None = None
"""Where our warnings go while stderr is a file."""


def terminal() -> TextIO:
    """Return stderr as the user sees it, also while libraries write into a file."""
    return _terminal or sys.stderr


@contextmanager
def noise_into(log: Path, terminal: TextIO | None = None) -> Iterator[None]:
    """Append what libraries write to stderr, C++ included, to ``log``; our warnings still reach ``terminal``.

    ``terminal``: stderr as it was, unless given. Standard output stays as it is, and errors that leave the block are
    shown after it.
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
            f"memory: {available:.1f} GiB available, {what} needs about {gib:.1f} GiB: end other processes, or run it "
            "on a larger machine"
        )


ANSWER_S = 90.0
"""Seconds that a cluster has to say what it consists of: Ray's import and connection."""
SIZES = ("gpu_bytes", "host_bytes", "lockable_bytes")
"""What each node is asked for beside the number of its GPUs (fields of Hardware)."""


def run_hardware() -> Hardware:
    """Return the nodes of the cluster that ``RAY_ADDRESS`` names, else this machine as one node.

    The process that starts a run may be on a node without GPUs, or outside the cluster, so that only the cluster can
    tell. Raises LaunchError when none answers there.
    """
    address = os.environ.get("RAY_ADDRESS")
    return cluster_hardware(address) if address else local_hardware()


def cluster_hardware(address: str) -> Hardware:
    """Ask the Ray cluster at ``address`` for its GPUs, in a process that ends with the answer. Raises LaunchError.

    Where nodes differ, ``gpus_per_node`` is that of the largest, memory and what may be locked are those of the
    smallest, and nodes without GPUs do not count. Sizes are None where a node does not tell them.
    """
    command = [sys.executable, "-m", "skyrl_megatron.workers.ray_setup", address]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"RAY_ADDRESS={address}: the cluster does not say within {ANSWER_S:g} s what it has; see ray status"
        ) from None
    lines = asked.stdout.splitlines()
    if asked.returncode or not lines:
        said = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise LaunchError(said[-1] if asked.returncode == 1 else f"RAY_ADDRESS={address}: {said[-1]}")
    nodes: list[dict[str, Any]] = json.loads(lines[-1])
    with_gpus = [node for node in nodes if node["gpus"]]
    if not with_gpus:
        return Hardware(0, len(nodes), elsewhere=True)
    gpu, host, lockable = ([int(node[name]) for node in with_gpus if node.get(name) is not None] for name in SIZES)
    return Hardware(
        max(node["gpus"] for node in with_gpus),
        len(with_gpus),
        min(gpu) if len(gpu) == len(with_gpus) else None,
        min(host) if len(host) == len(with_gpus) else None,
        min(lockable, default=None),
        elsewhere=True,
    )


class Ahead(enum.Enum):
    """What a command's arguments come to, before its model and data are looked at."""

    FINISHED = enum.auto()
    """A finished run that is asked for nothing new, which has been said."""
    REFUSED = enum.auto()
    """``load_config`` refuses them."""
    RUN = enum.auto()
    """As far as is known by then."""


def look_ahead(cls: type[SkyRLTrainConfig], argv: Sequence[str], hardware: Hardware | None = None) -> Ahead:
    """Return what the arguments come to. Takes a second: neither files nor libraries are loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cfg, problems = parse(cls, argv)
        if problems or find_problems(cfg, hardware or run_hardware()):
            return Ahead.REFUSED
    return Ahead.FINISHED if nothing_left(cfg) else Ahead.RUN


def nothing_left(cfg: SkyRLTrainConfig) -> bool:
    """Say so, and where the run's files are, when there is nothing left to do. ``cfg`` is resolved."""
    folder = cfg.trainer.ckpt_path
    if cfg.trainer.resume_mode in (None, "none"):
        return False
    if not is_address(folder) and not os.path.isdir(folder) and cfg.trainer.resume_mode != "from_path":
        return False
    from skyrl_megatron.trainer.stopping import leftover
    from skyrl_megatron.trainer.summary import last_lines

    left = leftover(cfg)
    if left is None or not left.nothing:
        return False
    for line in (str(left), *last_lines(cfg, left.step, left.step)):
        print(line, flush=True)
    return True
