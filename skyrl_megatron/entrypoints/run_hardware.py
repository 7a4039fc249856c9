"""The hardware that a run will get: that of the cluster it joins, else this machine's."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from skyrl_megatron.config.hardware import Hardware, local_hardware
from skyrl_megatron.errors import LaunchError

ANSWER_S = 90.0
"""Seconds that a cluster has to say what it consists of: Ray's import and connection."""


def run_hardware() -> Hardware:
    """Return the nodes of the cluster that ``RAY_ADDRESS`` names, else this machine as one node.

    The process that starts a run may be on a node without GPUs, or outside the cluster, so that only the cluster can
    tell. Raises LaunchError when none answers there.
    """
    address = os.environ.get("RAY_ADDRESS")
    return cluster_hardware(address) if address else local_hardware()


def cluster_hardware(address: str) -> Hardware:
    """Ask the Ray cluster at ``address`` for its GPUs, in a process that ends with the answer. Raises LaunchError.

    Where nodes differ, ``gpus_per_node`` is that of the largest, and nodes without GPUs do not count.
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
    gpus: list[int] = json.loads(lines[-1])
    with_gpus = [count for count in gpus if count]
    return Hardware(max(with_gpus), len(with_gpus)) if with_gpus else Hardware(0, len(gpus))
