"""Secrets planted in the environment of a run, and where they are found afterwards."""

from __future__ import annotations

import contextlib
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

KNOWN = ("HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "MLFLOW_TRACKING_PASSWORD", "SWANLAB_API_KEY")
"""Credentials that libraries read."""
POLL_S = 0.05


def secrets_of_all_names() -> dict[str, str]:
    """A secret under each name that libraries read, and under one that nobody knows for every forwarded prefix."""
    from skyrl_megatron.workers.runtime_env import FORWARDED_PREFIXES

    names = (*KNOWN, "AWS_SECRET_ACCESS_KEY", *(f"{prefix}OF_NOBODY" for prefix in FORWARDED_PREFIXES))
    return {name: f"planted-{secrets.token_hex(16)}" for name in names}


def found_in_files(planted: Mapping[str, str], folders: Iterable[Path], since: float = 0.0) -> list[str]:
    """``file: name`` of each secret in a file below ``folders``, changed at ``since`` (seconds since the epoch) or
    later."""
    return [
        f"{path}: {name}"
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if (content := _content(path, since)) is not None
        for name, value in planted.items()
        if value.encode() in content
    ]


def _content(path: Path, since: float) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        state = path.lstat()
        if stat.S_ISREG(state.st_mode) and state.st_mtime >= since:
            return path.read_bytes()
    return None


@contextlib.contextmanager
def arguments_watched(planted: Mapping[str, str]) -> Iterator[list[str]]:
    """Look, for the block, at the arguments of all processes; yields what is filled with ``name in arguments`` of each
    secret that one of them has."""
    found: list[str] = []
    left = threading.Event()

    def watch() -> None:
        while not left.wait(POLL_S):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    given = path.read_text(errors="replace")
                    found.extend(f"{name} in {given}" for name, value in planted.items() if value in given)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield found
    finally:
        left.set()
        watching.join()
