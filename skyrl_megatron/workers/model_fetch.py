"""Models of the hub on every node of a run, before anything there needs them: one process of a node asks, and the
driver shows how far it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_megatron import hub
from skyrl_megatron.errors import ConfigError, DistributedError
from skyrl_megatron.workers.actor_group import ACTOR_LOST

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.workers.placement import Placement

POLL_S = 1.0
ANSWER_S = 120.0
"""Longest time that a node may take to start a process, or to answer it."""


class NodeFetch:
    """The actor of a node. :meth:`lines` is called while :meth:`fetch` goes on."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()

    def fetch(self, cfg: SkyRLTrainConfig, roles: Sequence[str]) -> None:
        """Bring the models of ``roles`` to this node's cache. Raises ConfigError."""
        for role in roles:
            hub.model_folder(cfg, role, say=self._lines.append)

    def lines(self) -> list[str]:
        """Return what was said since the last call."""
        return [self._lines.popleft() for _ in range(len(self._lines))]


def fetch_models(
    cfg: SkyRLTrainConfig, roles: Sequence[str], placement: Placement, say: Callable[[str], None]
) -> None:
    """Fetch the models of ``roles`` to every node of ``placement``; those that have them need not ask the hub.

    Raises ConfigError of the first node that cannot have one, naming it; DistributedError when a node does not answer.
    """
    roles = [role for role in (*roles, hub.ADAPTER) if hub.model_repo(cfg, role) is not None]
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
    waiting = {each.fetch.remote(cfg, roles): node for node, each in actors.items()}
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    try:
        for role in roles:
            hub.model_folder(cfg, role, say=say)
        while waiting:
            done, _ = ray.wait([*waiting], timeout=POLL_S)
            for reference, node in [*waiting.items()]:
                for line in _answer(actors[node].lines.remote(), names[node]):
                    say(f"node {names[node]}: {line}")
                if reference in done:
                    _answer(reference, names[waiting.pop(reference)])
    finally:
        for each in actors.values():
            ray.kill(each)


def _answer(reference: Any, node: str) -> Any:
    """Return what the actor of ``node`` answers. Raises its ConfigError, or DistributedError when it is gone."""
    try:
        return ray.get(reference, timeout=ANSWER_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            there = [replace(problem, fix=f"on node {node}: {problem.fix}") for problem in error.cause.problems]
            raise ConfigError(there) from None
        raise
    except (*ACTOR_LOST, ray.exceptions.GetTimeoutError) as error:
        raise DistributedError(f"node {node}: no answer from the process that fetches models there") from error


def _nodes(placement: Placement) -> list[str]:
    """Return the ids of the nodes that ranks and engines lie on."""
    tables = [placement_group_table(each.group) for each in placement.allocations.values()]
    return list(dict.fromkeys(node for table in tables for node in table["bundles_to_node_id"].values()))
