"""The folder of a cluster, on a file system that all its hosts share: token, address, and who runs what where.

token               the cluster's secret, mode 0600
head.json           where the head listens; written once it does
members/NUMBER.json a host's processes, while they run
members/NUMBER.failed  why a host could not take part
save                the command is asked to save and end
ended               the cluster is over: members go
NUMBER.log          what Ray's processes of that host print
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_megatron.errors import LaunchError
from skyrl_megatron.workers.ports import LOOPBACK

LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray believes in a loopback address, on any system; else it puts the machine's own in its place."""
OF_ANOTHER_RAY = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", LOOPBACK_ALONE)
"""Variables of a Ray on this host alone (``workers/__init__.py``), which a cluster's processes must not see."""


@dataclass(frozen=True)
class HeadAddress:
    """Where the head listens, and which Ray session is the cluster's."""

    address: str
    port: int
    host: str

    @property
    def ray_address(self) -> str:
        """What RAY_ADDRESS is set to."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Member:
    """A host's part of the cluster. ``created``: start time of ``process``, so that its number is never another's.
    ``ready``: its Ray has started."""

    number: int
    host: str
    address: str
    process: int
    created: float
    ready: bool = False


class ClusterFolder:
    """The files of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, path: Path) -> ClusterFolder:
        """Make the folder with a fresh token. Raises LaunchError when a cluster is there that did not end."""
        folder = cls(path)
        try:
            (path / "members").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"{path}: cannot be made ({error.strerror}); give a folder of yours with --dir"
            ) from error
        if folder.head() is not None and not folder.ended:
            raise LaunchError(
                f"{path}: a cluster is there already ({folder.head()}); end it with 'launch/ray_cluster.sh down --dir "
                f"{path}', or give this one another folder with --dir"
            )
        folder.clear()
        token = os.open(path / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(token, "w") as file:
            file.write(secrets.token_hex(32))
        return folder

    def clear(self) -> None:
        """Remove what an earlier cluster left here."""
        for name in ("token", "head.json", "save", "ended"):
            (self.path / name).unlink(missing_ok=True)
        for file in self._members("*"):
            file.unlink(missing_ok=True)

    def _members(self, pattern: str) -> list[Path]:
        return sorted((self.path / "members").glob(pattern))

    # ------------------------------------------------------------------ what is written
    def announce(self, head: HeadAddress) -> None:
        """Tell the other hosts where the head is."""
        write_whole(self.path / "head.json", asdict(head))

    def join(self, member: Member) -> None:
        """Record a host's processes."""
        write_whole(self.path / "members" / f"{member.number}.json", asdict(member))

    def leave(self, number: int) -> None:
        """Take the record of a host back: its processes have ended."""
        (self.path / "members" / f"{number}.json").unlink(missing_ok=True)

    def fail(self, number: int, why: str) -> None:
        """Tell the others why a host cannot take part."""
        write_whole(self.path / "members" / f"{number}.failed", {"why": why})

    def end(self) -> None:
        """Ask every member to go."""
        (self.path / "ended").touch()

    # ------------------------------------------------------------------ what is read
    @property
    def asked_to_save(self) -> bool:
        """Whether the command is asked to save and end; SLURM's own signals would reach Ray's processes too."""
        return (self.path / "save").exists()

    @property
    def ended(self) -> bool:
        """Whether members are asked to go."""
        return (self.path / "ended").exists()

    def head(self) -> HeadAddress | None:
        """Return where the head is, None before it listens."""
        try:
            return HeadAddress(**json.loads((self.path / "head.json").read_text()))
        except FileNotFoundError:
            return None

    def members(self) -> list[Member]:
        """List the hosts that take part or are about to, in order."""
        found = [Member(**json.loads(file.read_text())) for file in self._members("*.json")]
        return sorted(found, key=lambda member: member.number)

    def ready(self) -> list[Member]:
        """List the hosts whose Ray has started, in order."""
        return [member for member in self.members() if member.ready]

    def failures(self) -> list[str]:
        """List why hosts could not take part."""
        return [json.loads(file.read_text())["why"] for file in self._members("*.failed")]

    def log(self, number: int) -> Path:
        """Return the file of what Ray's processes of a host print."""
        return self.path / f"{number}.log"

    def variables(self) -> dict[str, str]:
        """Return the variables with which a process finds the cluster and shows its token. RAY_AUTH_TOKEN, which Ray
        would heed first, must not be set beside them."""
        head = self.head()
        found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.path / "token")}
        if head is not None:
            found["RAY_ADDRESS"] = head.ray_address
            if head.address == LOOPBACK:
                found[LOOPBACK_ALONE] = "0"
        return found

    def environment(self) -> dict[str, str]:
        """Return this process's environment with :meth:`variables`."""
        return {name: value for name, value in os.environ.items() if name not in OF_ANOTHER_RAY} | self.variables()


def write_whole(file: Path, content: dict[str, Any]) -> None:
    """Write JSON so that a reader on any host sees all of it or nothing."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as part:
        json.dump(content, part)
        part.flush()
        os.fsync(part.fileno())
    os.replace(part.name, file)
