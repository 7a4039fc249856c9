"""A folder below ``/tmp`` that counts as one of several nodes."""

from pathlib import Path

import pytest


def share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks see a file system of the network mounted at ``folder``."""
    from skyrl_megatron_observe.preflight import room_checks

    mounts = folder / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/shared {folder} nfs4 rw 0 0\n")
    monkeypatch.setattr(room_checks, "MOUNTS", mounts)
