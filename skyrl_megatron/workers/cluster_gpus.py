"""``python -m skyrl_megatron.workers.cluster_gpus ADDRESS``: what each node of a Ray cluster has, as a JSON list.

A process of its own: whoever asks stays free of Ray, and of a connection. Exit code 1 and a message when none answers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_megatron import device
from skyrl_megatron.config.hardware import lockable_bytes, own_memory
from skyrl_megatron.errors import LaunchError
from skyrl_megatron.workers.ray_setup import join

SIZES_S = 30.0
"""Seconds that nodes have to tell sizes: the start of a worker process. Those that do not are not known."""


def main(address: str) -> int:
    """Print what the cluster at ``address`` says of its living nodes; returns the exit code."""
    try:
        join(address)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = [{"gpus": int(node["Resources"].get("GPU", 0))} for node in nodes]
    asked = [node["NodeID"] for node, has in zip(nodes, found, strict=True) if has["gpus"]]
    sizes = dict(zip(asked, _sizes(asked), strict=True))
    print(json.dumps([has | sizes.get(node["NodeID"], {}) for node, has in zip(nodes, found, strict=True)]))
    return 0


def _sizes(nodes: Sequence[str]) -> list[dict[str, Any]]:
    """Ask each node for the sizes of its GPUs, its memory and what may be locked; empty for one that does not tell."""
    ask: Any = ray.remote(num_cpus=0, max_retries=0)(_own_sizes)
    where = (NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes)
    answers = [ask.options(scheduling_strategy=strategy).remote() for strategy in where]
    ray.wait(answers, num_returns=len(answers), timeout=SIZES_S)
    return [_answered(answer) for answer in answers]


def _answered(answer: Any) -> dict[str, Any]:
    try:
        sizes: dict[str, Any] = ray.get(answer, timeout=0)
    except ray.exceptions.RayError:  # lost, late, or a node without this package
        return {}
    return sizes


def _own_sizes() -> dict[str, Any]:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides GPUs from a task that takes none
    return {"gpu_bytes": device.driver_gpu_bytes(), "host_bytes": own_memory(), "lockable_bytes": lockable_bytes()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
