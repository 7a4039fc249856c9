"""Pickles of a checkpoint, read through a list of the few names they need. Anything else is refused.

Two files of the ``torch_dist`` format are pickles: ``.metadata`` and the object ``common_state``. Data of tensors is
never unpickled here: it is taken from the bytes that the metadata points at.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from bridges.metadata import AllowListUnpickler
from skyrl_megatron.errors import CheckpointError

_DAMAGE = (
    pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError, KeyError, OverflowError,
    MemoryError, zipfile.BadZipFile,
)  # fmt: skip


def read_metadata(data: bytes, path: str) -> Metadata:
    """``.metadata`` of a torch_dist folder. ``path`` is for messages. Raises CheckpointError."""
    try:
        value = AllowListUnpickler(io.BytesIO(data)).load()
    except _DAMAGE as error:
        raise CheckpointError(f"{path} is not the metadata of a checkpoint ({error}): refused") from error
    if not isinstance(value, Metadata) or not isinstance(value.storage_data, dict):
        raise CheckpointError(f"{path} is not the metadata of a torch_dist checkpoint: refused")
    return value


def read_common_state(data: bytes, path: str) -> dict[str, Any]:
    """The object ``common_state``, ``torch.save([dict])`` of plain values. Raises CheckpointError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            value = AllowListUnpickler(io.BytesIO(archive.read(name)), {("collections", "OrderedDict")}).load()
    except (StopIteration, *_DAMAGE) as error:
        raise CheckpointError(f"{path}: common_state is not plain values ({error}): refused") from error
    if not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)):
        raise CheckpointError(f"{path}: common_state is not what Megatron writes: refused")
    return value[0]
