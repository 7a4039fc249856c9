"""The hardware that a run will get: that of the cluster it joins, else this machine's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from skyrl_megatron.config.hardware import Hardware, local_hardware
from skyrl_megatron.errors import LaunchError

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
    command = [sys.executable, "-m", "skyrl_megatron.workers.cluster_gpus", address]
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
