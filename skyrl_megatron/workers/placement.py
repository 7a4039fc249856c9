"""Where ranks and engines run: placement groups, shared GPUs, and the peers that hold ranks' checkpoints in memory.

The cluster's resources tell whether there are GPUs. The process that places a run may have none, because its node has
none or because Ray hides them from an actor that has not requested any.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_megatron.config.roles import engine_ranks, role_configs, role_world_size
from skyrl_megatron.device import ALLOCATOR_OPTIONS
from skyrl_megatron.errors import LaunchError

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


log = logging.getLogger(__name__)
READY_TIMEOUT_S = 60.0
"""Deadline in seconds for the reservation of a placement group."""
PROCESSES, RAY = "mp", "ray"
"""vLLM's executors (``distributed_executor_backend``): processes of one node, actors on any."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the cluster: its node, and its id in ``CUDA_VISIBLE_DEVICES``."""

    node: str
    id: str
    bundle: int = -1
    """The one-GPU bundle that reserves it."""


@dataclass(frozen=True, slots=True)
class BundleAllocation:
    """The bundles of a role's actors, one per actor, and the share of a bundle that an actor requests.

    An engine on several GPUs has one bundle with all of them. If it shares the GPUs with other roles or spans several
    nodes, it has consecutive one-GPU bundles instead.
    """

    group: PlacementGroup
    bundles: tuple[int, ...]
    share: float = 1.0
    gpus: tuple[Gpu, ...] = ()
    """The GPUs of the engines' one-GPU bundles, in order."""
    on_gpus: bool = False
    executor: str = PROCESSES
    """vLLM's executor. With ``ray``, an engine may span several nodes."""

    def options(self, number: int, devices: int = 1) -> dict[str, Any]:
        """Return the Ray options of actor ``number``, which uses ``devices`` GPUs (none on a CPU machine).

        The actor of an engine on several nodes requests no GPUs, because the engine's workers are separate actors.
        """
        options: dict[str, Any] = {"num_cpus": self.share}
        if self.on_gpus:
            options["num_gpus"] = self.share * (1 if self.gpus else devices)
            if self.over_nodes(number, devices):
                options["num_gpus"] = 0
        strategy = PlacementGroupSchedulingStrategy(self.group, self.bundles[number])
        return options | {"scheduling_strategy": strategy}

    def over_nodes(self, number: int, devices: int) -> bool:
        """Return whether engine ``number`` with ``devices`` GPUs spans several nodes."""
        return len({gpu.node for gpu in self._own(number, devices)}) > 1

    def engine_executor(self, number: int, devices: int) -> str:
        """Return the executor of engine ``number``: processes on one node, Ray actors on several."""
        return RAY if self.over_nodes(number, devices) else PROCESSES

    def visible_gpus(self, number: int, devices: int) -> list[str] | None:
        """Return ids of the GPUs that engine ``number`` with ``devices`` GPUs must see; None: those that Ray sets.

        Its own GPUs come first, then the others of its node, whose weights it reads (``weight_sync/transport.py``).
        Raises LaunchError if the engine would span two nodes without the Ray executor.
        """
        if not self.gpus:
            return None
        engine_gpus = self._own(number, devices)
        if self.over_nodes(number, devices) and self.executor != RAY:
            raise LaunchError(
                f"engine {number} would span two nodes: each node must fit whole engines of {devices} GPUs (tp · pp · "
                "dp); or set generator.inference_engine.distributed_executor_backend=ray"
            )
        here = engine_gpus[0].node
        others = [gpu for gpu in self.gpus if gpu not in engine_gpus]
        return [gpu.id for gpu in (*engine_gpus, *others) if gpu.node == here]

    def engine_environment(self, number: int, devices: int) -> dict[str, str]:
        """Return the environment variables of engine ``number`` with ``devices`` GPUs, to be set before vLLM's import.

        Raises LaunchError as :meth:`visible_gpus`.
        """
        visible = self.visible_gpus(number, devices)
        if visible is None:
            return {}
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
        if self.share < 1:  # vLLM's sleep mode does not work with torch's expandable segments
            environment |= dict.fromkeys(ALLOCATOR_OPTIONS, "")
        if self.over_nodes(number, devices):  # vllm/v1/executor/ray_executor_v2.py
            environment["VLLM_RAY_BUNDLE_INDICES"] = ",".join(str(gpu.bundle) for gpu in self._own(number, devices))
            environment["VLLM_RAY_PER_WORKER_GPUS"] = f"{self.share:g}"
        return environment

    def _own(self, number: int, devices: int) -> tuple[Gpu, ...]:
        return self.gpus[number * devices : (number + 1) * devices]


@dataclass(slots=True)
class Placement:
    """Allocations of all roles (``policy``, ``ref``, ``critic``, ``teacher``, ``engines``)."""

    allocations: dict[str, BundleAllocation] = field(default_factory=dict)

    def __getitem__(self, who: str) -> BundleAllocation:
        return self.allocations[who]

    def remove(self) -> None:
        """Release all devices, which ends their actors. If Ray does not answer, the end of the run releases the
        rest."""
        groups = {allocation.group.id: allocation.group for allocation in self.allocations.values()}.values()
        self.allocations.clear()
        try:
            for group in groups:
                remove_placement_group(group)
        except ray.exceptions.RayError as error:
            log.warning("the placement groups of this run were not removed: %s", str(error).splitlines()[0])


def create_placement(cfg: SkyRLTrainConfig, timeout_s: float = READY_TIMEOUT_S, *, training: bool = True) -> Placement:
    """Reserve devices for every role and the engines of ``cfg``. ``training`` false: for the engines only.

    With ``colocate_all`` all share one group, with ``colocate_policy_ref`` policy and reference. Raises LaunchError
    with the missing resources after ``timeout_s``.
    """
    settings, engine = cfg.trainer.placement, cfg.generator.inference_engine
    roles = role_configs(cfg) if training else {}
    sizes = {key: role_world_size(settings, role) for key, (role, _) in roles.items()}
    if engine.run_engines_locally:
        sizes["engines"] = engine.num_engines
    together = {"policy", "ref"} if settings.colocate_policy_ref else {"policy"}
    together = set(sizes) if settings.colocate_all and training else together & set(sizes)
    largest = max(node_gpus(), default=0)
    ranks, on_gpus = engine_ranks(cfg), largest > 0
    placement = Placement()

    def allocate(who: str, group: PlacementGroup, share: float, *, step: int = 1, ask: bool = False) -> None:
        """Allocate every ``step``-th bundle to ``who``. ``ask``: determine the GPU of each bundle."""
        order = _by_node(group)
        made = BundleAllocation(
            group, order[::step], share, on_gpus=on_gpus, executor=engine.distributed_executor_backend
        )
        placement.allocations[who] = made  # recorded first, so that it is released if asking for GPUs fails
        if ask:
            placement.allocations[who] = replace(made, gpus=_gpus(group, order, share))

    try:
        count = sizes.get("policy", 0)
        shared = reserve("+".join(sorted(together)), [_bundle(1, on_gpus)] * count, timeout_s) if together else None
        for who in sorted(together):
            assert shared is not None
            step = ranks if who == "engines" else 1
            allocate(who, shared, 1.0 / len(together), step=step, ask=who == "engines" and on_gpus)
        for who, count in sizes.items():
            if who in together:
                continue
            devices = ranks if who == "engines" else 1
            if on_gpus and devices > largest:  # an engine spans several nodes
                group = reserve(who, [_bundle(1, on_gpus)] * count * devices, timeout_s)
                allocate(who, group, 1.0, step=devices, ask=True)
            else:
                allocate(who, reserve(who, [_bundle(devices, on_gpus)] * count, timeout_s), 1.0)
    except BaseException:
        placement.remove()
        raise
    return placement


def node_gpus() -> list[int]:
    """Return the number of GPUs of each node that has any."""
    found = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return [count for count in found if count]


def cores_per_gpu() -> int:
    """Return the number of CPU cores per GPU: the smallest of all nodes, at least 1."""
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shares = [int(each.get("CPU", 0) // each["GPU"]) for each in resources if each.get("GPU")]
    return max(min(shares, default=1), 1)


def reserve(who: str, bundles: list[dict[str, float]], timeout_s: float = READY_TIMEOUT_S) -> PlacementGroup:
    """Return a ready placement group. Raises LaunchError with the missing resources after ``timeout_s``."""
    group = placement_group(bundles, strategy="PACK")
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    raise LaunchError(f"no resources for {who} within {timeout_s:.0f} s: {shortage(bundles)}")


def shortage(bundles: list[dict[str, float]]) -> str:
    """Describe what ``bundles`` need and what the cluster has."""
    needed: Counter[str] = Counter()
    for bundle in bundles:
        needed.update(bundle)
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = [
        f"{amount:g} {name} needed, {total.get(name, 0):g} in the cluster, {free.get(name, 0):g} free"
        for name, amount in sorted(needed.items())
        if amount > free.get(name, 0)
    ]
    if not parts:
        parts = [f"{len(bundles)} bundles of {bundles[0]} do not fit on its nodes, although the totals suffice"]
    return "; ".join(parts) + "; use fewer (trainer.placement.*, num_engines), or join a larger cluster (RAY_ADDRESS)"


def _bundle(devices: int, on_gpus: bool) -> dict[str, float]:
    return {"GPU": float(devices), "CPU": float(devices)} if on_gpus else {"CPU": 1.0}


def _by_node(group: PlacementGroup) -> tuple[int, ...]:
    """Return the bundles ordered by node, so that consecutive ranks (tp groups) are on the same node."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return tuple(sorted(range(group.bundle_count), key=lambda bundle: (nodes[bundle], bundle)))


def _gpus(group: PlacementGroup, bundles: Sequence[int], share: float) -> tuple[Gpu, ...]:
    """Return the GPU of each bundle, which a task in the bundle reports. Raises LaunchError."""
    asked = [
        _own_gpu.options(num_gpus=share, scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
        for bundle in bundles
    ]
    try:
        reported = ray.get(asked, timeout=READY_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        first_line = str(error).strip().splitlines()[0]
        raise LaunchError(
            f"the {len(bundles)} GPUs reserved for the run do not answer: {first_line}; run ray status"
        ) from error
    return tuple(Gpu(node, gpu, bundle) for bundle, (node, gpu) in zip(bundles, reported, strict=True))


@ray.remote(num_cpus=0)
def _own_gpu() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.get_node_id(), str(context.get_accelerator_ids()["GPU"][0])


def peer_distance(nodes: Sequence[str]) -> int:
    """Return the distance from each rank to its peer: the smallest one with the most pairs on different nodes.

    ``nodes``: node of each rank. 0 for a single rank, which has no peer.
    """
    count = len(nodes)

    def apart(distance: int) -> int:
        return sum(nodes[rank] != nodes[(rank + distance) % count] for rank in range(count))

    return max(range(1, count), key=lambda distance: (apart(distance), -distance), default=0)


def find_peer_holders(new: Sequence[int], distance: int, count: int) -> dict[int, int] | None:
    """Return new rank → rank that holds its checkpoint; None if one of these is new itself. ``count``: all ranks."""
    found = {rank: (rank + distance) % count for rank in new}
    return None if set(found.values()) & set(new) else found
