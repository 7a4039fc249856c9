"""Opening files of folders from elsewhere: regular files, of that folder.

A pipe in the place of a file never answers, a device may do anything when it is opened, and a link to a file of this
host puts that file into an export.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from bridges.errors import BridgeError

_OPENED = (".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".bin", ".metadata", ".distcp")
"""Endings of the files that loaders of models, tokenizers and adapters open."""
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises :class:`BridgeError` for what is neither a file nor a folder, OSError."""
    refuse_special(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(None, "it is a folder", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def refuse_special(path: Path) -> None:
    """Raise :class:`BridgeError` where there is a pipe, a socket or a device, before anything opens it."""
    try:
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):  # whoever opens it reports that
        return
    if kind is not None:
        raise BridgeError(f"{path} is {kind}, not a file: refused; put the file in its place")


def refuse_outside(path: Path, folder: Path) -> None:
    """Raise :class:`BridgeError` where ``path`` is a link to a file that is not in ``folder``.

    A snapshot in the Hugging Face hub's cache has links to the files of the same repository (``blobs``).
    """
    if not path.is_symlink() and path.parent == folder:
        return
    real = folder.resolve()
    roots = [real, real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [real]
    target = path.resolve()
    if not any(target.is_relative_to(root) for root in roots):
        raise BridgeError(
            f"{path} is a link to {target}, outside of the folder: refused; put the file itself in its place"
        )


def check_folder(folder: Path) -> None:
    """Look at every file of a folder that loaders open. Raises :class:`BridgeError` for one that is no regular file,
    or a link to a file elsewhere. What is no folder passes."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if not entry.name.endswith(_OPENED) or entry.is_file(follow_symlinks=False):
            continue
        path = folder / entry.name
        refuse_special(path)
        if path.is_file():
            refuse_outside(path, folder)
