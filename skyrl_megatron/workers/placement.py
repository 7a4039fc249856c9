"""Where ranks and engines run: placement groups, shared devices, and which rank keeps a copy of whose state.

Whether there are GPUs is asked of the cluster: the process that places a run may be on a node without any, and Ray
shows none to an actor that asked for none.
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
from skyrl_megatron.errors import LaunchError

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


log = logging.getLogger(__name__)
READY_TIMEOUT_S = 60.0
"""Seconds after which a group that found no place is given up."""
PROCESSES, RAY = "mp", "ray"
"""vLLM's executors (``distributed_executor_backend``): processes of one node, actors on any."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the cluster: its node, and its id there (what ``CUDA_VISIBLE_DEVICES`` lists)."""

    node: str
    id: str
    bundle: int = -1
    """The one-GPU bundle that reserves it."""


@dataclass(frozen=True, slots=True)
class BundleAllocation:
    """The bundles of a role's actors, one an actor, and the share of a bundle that an actor asks for.

    An engine on several GPUs has a bundle of all of them, or one-GPU bundles behind its own: where others use these
    too, and where it lies on several nodes.
    """

    group: PlacementGroup
    bundles: tuple[int, ...]
    share: float = 1.0
    gpus: tuple[Gpu, ...] = ()
    """The GPUs of the engines' one-GPU bundles, in order."""
    on_gpus: bool = False
    executor: str = PROCESSES
    """What may start the workers of an engine: with ``ray`` it may lie on several nodes."""

    def options(self, number: int, devices: int = 1) -> dict[str, Any]:
        """Return ``.options`` of actor ``number``, which takes ``devices`` GPUs (none on a CPU machine).

        An engine on several nodes takes none itself: its workers do, which are actors of their own.
        """
        asked: dict[str, Any] = {"num_cpus": self.share}
        if self.on_gpus:
            asked["num_gpus"] = self.share * (1 if self.gpus else devices)
            if self.over_nodes(number, devices):
                asked["num_gpus"] = 0
        strategy = PlacementGroupSchedulingStrategy(self.group, self.bundles[number])
        return asked | {"scheduling_strategy": strategy}

    def over_nodes(self, number: int, devices: int) -> bool:
        """Return whether engine ``number`` of ``devices`` GPUs lies on more than one node."""
        return len({gpu.node for gpu in self._own(number, devices)}) > 1

    def engine_executor(self, number: int, devices: int) -> str:
        """Return what starts the workers of engine ``number``: processes on one node, Ray actors on several."""
        return RAY if self.over_nodes(number, devices) else PROCESSES

    def visible_gpus(self, number: int, devices: int) -> list[str] | None:
        """Return ids of the GPUs that engine ``number`` of ``devices`` GPUs should see; None: those that Ray shows it.

        Its own come first, then the others of its node, whose weights it reads (``weight_sync/transport.py``).

        Raises LaunchError for an engine that would lie on two nodes and cannot.
        """
        if not self.gpus:
            return None
        own = self._own(number, devices)
        if self.over_nodes(number, devices) and self.executor != RAY:
            raise LaunchError(
                f"engine {number} would lie on two nodes: each node must have room for whole engines, of {devices} "
                "GPUs (tp · pp · dp) each; or set generator.inference_engine.distributed_executor_backend=ray"
            )
        here = own[0].node
        others = [gpu for gpu in self.gpus if gpu not in own]
        return [gpu.id for gpu in (*own, *others) if gpu.node == here]

    def engine_environment(self, number: int, devices: int) -> dict[str, str]:
        """Return the variables that engine ``number`` of ``devices`` GPUs is to find before it imports vLLM.

        Raises LaunchError as :meth:`visible_gpus` does.
        """
        visible = self.visible_gpus(number, devices)
        if visible is None:
            return {}
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
        if self.share < 1:  # memory that sleeps is vLLM's own, which torch's expandable segments exclude
            environment |= dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "")
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
        """Give all devices back; the actors on them end. A Ray head that hangs is not waited for twice: what is left
        ends with the run."""
        groups = {allocation.group.id: allocation.group for allocation in self.allocations.values()}.values()
        self.allocations.clear()
        try:
            for group in groups:
                remove_placement_group(group)
        except ray.exceptions.RayError as error:
            log.warning("the places of this run were not given back before its end: %s", str(error).splitlines()[0])


def create_placement(cfg: SkyRLTrainConfig, timeout_s: float = READY_TIMEOUT_S, *, training: bool = True) -> Placement:
    """Reserve devices for every role and the engines of ``cfg``; where it trains nothing, for the engines alone.

    ``colocate_all``: one group that all share; ``colocate_policy_ref``: policy and reference share. Raises LaunchError
    after ``timeout_s`` naming what is missing.
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
        """Give ``who`` an actor on every ``step``-th bundle. ``ask``: which GPU lies behind each of them."""
        order = _by_node(group)
        made = BundleAllocation(
            group, order[::step], share, on_gpus=on_gpus, executor=engine.distributed_executor_backend
        )
        placement.allocations[who] = made  # given back also when its GPUs do not answer
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
            if on_gpus and devices > largest:  # an engine over several nodes
                group = reserve(who, [_bundle(1, on_gpus)] * count * devices, timeout_s)
                allocate(who, group, 1.0, step=devices, ask=True)
            else:
                allocate(who, reserve(who, [_bundle(devices, on_gpus)] * count, timeout_s), 1.0)
    except BaseException:
        placement.remove()
        raise
    return placement


def node_gpus() -> list[int]:
    """Return how many GPUs each node of the cluster has, of those that have any."""
    found = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return [count for count in found if count]


def cores_per_gpu() -> int:
    """Return how many CPU cores a node has for each of its GPUs: the fewest of all nodes, and at least 1."""
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shares = [int(each.get("CPU", 0) // each["GPU"]) for each in resources if each.get("GPU")]
    return max(min(shares, default=1), 1)


def reserve(who: str, bundles: list[dict[str, float]], timeout_s: float = READY_TIMEOUT_S) -> PlacementGroup:
    """Return a placement group that is ready. Raises LaunchError after ``timeout_s`` naming what the cluster lacks."""
    group = placement_group(bundles, strategy="PACK")
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    raise LaunchError(f"no place for {who} within {timeout_s:.0f} s: {shortage(bundles)}")


def shortage(bundles: list[dict[str, float]]) -> str:
    """Say what ``bundles`` need against what the cluster has."""
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
        parts = [f"{len(bundles)} bundles of {bundles[0]} do not fit on its nodes though the totals suffice"]
    return "; ".join(parts) + "; take fewer (trainer.placement.*, num_engines), or join a larger cluster (RAY_ADDRESS)"


def _bundle(devices: int, on_gpus: bool) -> dict[str, float]:
    return {"GPU": float(devices), "CPU": float(devices)} if on_gpus else {"CPU": 1.0}


def _by_node(group: PlacementGroup) -> tuple[int, ...]:
    """Return the bundles ordered by node, so that neighbouring ranks share one (tp groups lie inside nodes)."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return tuple(sorted(range(group.bundle_count), key=lambda bundle: (nodes[bundle], bundle)))


def _gpus(group: PlacementGroup, bundles: Sequence[int], share: float) -> tuple[Gpu, ...]:
    """Return the GPU behind each bundle, which a task there reports. Raises LaunchError."""
    asked = [
        _own_gpu.options(num_gpus=share, scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
        for bundle in bundles
    ]
    try:
        found = ray.get(asked, timeout=READY_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines()[0]
        raise LaunchError(
            f"the {len(bundles)} GPUs reserved for the run do not answer: {said}; see ray status"
        ) from error
    return tuple(Gpu(node, gpu, bundle) for bundle, (node, gpu) in zip(bundles, found, strict=True))


@ray.remote(num_cpus=0)
def _own_gpu() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.get_node_id(), str(context.get_accelerator_ids()["GPU"][0])


def distance_to_neighbour(nodes: Sequence[str]) -> int:
    """Return how far behind each rank its neighbour is; ``nodes``: where the ranks are. The smallest distance with the
    most pairs on two nodes; 0 for one rank, which has no neighbour."""
    count = len(nodes)

    def apart(distance: int) -> int:
        return sum(nodes[rank] != nodes[(rank + distance) % count] for rank in range(count))

    return max(range(1, count), key=lambda distance: (apart(distance), -distance), default=0)


def holders(new: Sequence[int], distance: int, count: int) -> dict[int, int] | None:
    """Return which rank has the copy of each ``new`` one of ``count``; None where such a rank is new itself."""
    found = {rank: (rank + distance) % count for rank in new}
    return None if set(found.values()) & set(new) else found
