"""From the notes of all ranks to a complete role folder: ``.metadata``, ``metadata.json`` and ``state.json``.

Needs no process group: any process that sees the storage can do it.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from bridges.errors import BridgeError
from bridges.rows import Shape
from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.manifest import PARTS, FileEntry, hash_bytes
from skyrl_megatron.runtime.checkpoint.storage import Storage

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

STATE = "state.json"
_AFTER_EXIT_S = 60.0  # once the main thread has ended, other ranks may be gone: do not keep the process for long

Note = dict[str, Any]


def wait_for_notes(storage: Storage, folder: str, role: str, world_size: int, timeout_s: float) -> list[Note]:
    """Wait for the notes of all ranks of a role and return them. Raises CheckpointError when one failed or is late."""
    parts = f"{folder}/{role}/{PARTS}"
    began, pause = time.monotonic(), 0.005
    exited: float | None = None
    while True:
        names = set(storage.names(parts))
        for name in sorted(names):
            if name.endswith(".failed"):
                raise CheckpointError(storage.read(f"{parts}/{name}").decode(errors="replace"))
        late = [rank for rank in range(world_size) if f"{rank}.json" not in names]
        if not late:
            return [json.loads(storage.read(f"{parts}/{rank}.json")) for rank in range(world_size)]
        now = time.monotonic()
        if exited is None and not threading.main_thread().is_alive():
            exited = now
        if now - began > timeout_s or (exited is not None and now - exited > _AFTER_EXIT_S):
            raise CheckpointError(f"{folder}: {role} ranks {late} have not written within {now - began:.0f} s")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def complete_role(storage: Storage, folder: str, role: str, notes: list[Note]) -> dict[str, FileEntry]:
    """Write what concerns all ranks, remove the notes, and return the role's files (paths from ``folder``).

    Raises CheckpointError when the ranks' chunks do not cover every tensor exactly once, or disagree.
    """
    from bridges.torch_dist import FORMAT  # torch.distributed.checkpoint, which a start need not await

    target = f"{folder}/{role}"
    metadata = _metadata(notes, target)
    counts = {note["optimizer_step"] for note in notes if note["optimizer_step"] is not None}
    if len(counts) > 1 or len({note["step"] for note in notes}) != 1:
        raise CheckpointError(f"{target}: the ranks are at different steps; this is a bug in the training loop")
    state = {
        "step": notes[0]["step"],
        "layout": notes[0]["layout"],
        "optimizer_step": counts.pop() if counts else None,
        "lr_schedule": notes[0]["lr_schedule"],
    }
    files = {name: FileEntry(**entry) for note in notes for name, entry in note["files"].items()}
    for name, data in {
        ".metadata": pickle.dumps(metadata),
        "metadata.json": json.dumps(FORMAT).encode(),
        STATE: json.dumps(state, indent=1).encode(),
    }.items():
        storage.write(f"{target}/{name}", data)
        files[name] = hash_bytes(data)
    storage.remove(f"{target}/{PARTS}")
    storage.sync_folder(target)
    return {f"{role}/{name}": entry for name, entry in files.items()}


def _metadata(notes: list[Note], target: str) -> Metadata:
    """Return torch's metadata of all chunks of all ranks, in an order that does not depend on the ranks'."""
    from bridges.torch_dist import Chunk, build_metadata

    kinds: dict[str, tuple[Shape, torch.dtype]] = {}
    for note in notes:
        for key, (dtype, shape) in note["tensors"].items():
            kind = (tuple(shape), getattr(torch, dtype))
            if kinds.setdefault(key, kind) != kind:
                raise CheckpointError(f"{target}: ranks have {key} as {kinds[key]} and as {kind}")
    written = [
        (key, Chunk(tuple(offsets), tuple(sizes), file, start, length))
        for note in notes
        for key, offsets, sizes, file, start, length in note["chunks"]
    ]
    try:
        return build_metadata(dict(sorted(kinds.items())), written)
    except BridgeError as error:
        raise CheckpointError(f"{target}: {error}") from error
