"""A joined Ray cluster: does it answer, are its nodes alike, do their clocks agree?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_megatron.entrypoints.doctor.finding import Finding
from skyrl_megatron.errors import LaunchError

LARGEST_SKEW_S = 1.0
"""Logs of several nodes are read by time, and tokens of file systems and registries expire by it."""
ASKED = 5
ANSWER_S = 60.0


def cluster() -> Iterator[Finding]:
    """Join the cluster that RAY_ADDRESS names, judge its nodes, and leave it, unless it was joined before."""
    import ray

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.workers.ray_setup import initialize_ray

    joined_before = ray.is_initialized()
    try:
        initialize_ray(SkyRLTrainConfig(), log_to_driver=False)
    except LaunchError as error:
        text, _, fix = str(error).partition("; ")
        yield Finding("Ray cluster", "FAIL", text, fix)
        return
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        yield gpus_of_nodes({node["NodeManagerAddress"]: int(node["Resources"].get("GPU", 0)) for node in nodes})
        yield clocks({node["NodeManagerAddress"]: _skew(node["NodeID"]) for node in nodes})
    except (ray.exceptions.RayError, TimeoutError) as error:
        yield Finding("Ray cluster", "FAIL", str(error).splitlines()[0], "look at ray status")
    finally:
        if not joined_before:
            ray.shutdown()


def _skew(node: str) -> tuple[float, float]:
    """Return (seconds that a node's clock is ahead of this one's, uncertainty), from the quickest of a few answers."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    clock: Any = ray.remote(num_cpus=0)(_now).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    answers = []
    for _ in range(ASKED):
        asked = time.time()
        theirs = ray.get(clock.remote(), timeout=ANSWER_S)
        answered = time.time()
        answers.append(((answered - asked) / 2, theirs - (asked + answered) / 2))
    uncertainty, ahead = min(answers)
    return ahead, uncertainty


def _now() -> float:
    return time.time()


def gpus_of_nodes(counts: Mapping[str, int]) -> Finding:
    """Judge whether all nodes with GPUs have the same number of them."""
    with_gpus = {address: count for address, count in counts.items() if count}
    text = f"{len(counts)} nodes, GPUs: " + (", ".join(f"{a} {c}" for a, c in with_gpus.items()) or "none")
    if len(set(with_gpus.values())) > 1:
        fix = "start Ray with the smallest node's --num-gpus, or without the others: ranks fill whole nodes"
        return Finding("Ray cluster", "warn", text, fix)
    return Finding("Ray cluster", "ok", text)


def clocks(skews: Mapping[str, tuple[float, float]]) -> Finding:
    """Judge the clocks of nodes: seconds ahead of this machine's, with the uncertainty of the measurement."""
    worst = max(skews, key=lambda address: abs(skews[address][0]))
    ahead, uncertainty = skews[worst]
    text = f"at most {abs(ahead):.3f} s apart, of {worst} (± {uncertainty:.3f} s)"
    if abs(ahead) - uncertainty > LARGEST_SKEW_S:
        return Finding("clocks", "warn", text, "run chrony or systemd-timesyncd on every node")
    return Finding("clocks", "ok", text)
