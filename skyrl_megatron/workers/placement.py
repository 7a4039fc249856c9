"""Where each role's ranks and the engines run: placement groups, and who shares which devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_megatron import device
from skyrl_megatron.config.rules.role_layout import active_roles, engine_ranks, role_world_size
from skyrl_megatron.errors import LaunchError

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

READY_TIMEOUT_S = 60.0
"""Seconds after which a group that found no place is given up."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the cluster: its node, and its id there (what ``CUDA_VISIBLE_DEVICES`` lists)."""

    node: str
    id: str


@dataclass(frozen=True, slots=True)
class BundleAllocation:
    """The bundles of a role's actors, one an actor, and the share of a bundle that an actor asks for.

    ``gpus``: of engines on GPUs that others use too: where the bundles lie, in order. A bundle has one of them, and an
    engine on several runs over the bundles behind its own.
    """

    group: PlacementGroup
    bundles: tuple[int, ...]
    share: float = 1.0
    gpus: tuple[Gpu, ...] = ()

    def options(self, number: int, devices: int = 1) -> dict[str, Any]:
        """Return ``.options`` of actor ``number``, which takes ``devices`` GPUs (none on a CPU machine)."""
        asked: dict[str, Any] = {"num_cpus": self.share}
        if device.has_cuda():
            asked["num_gpus"] = self.share * (1 if self.gpus else devices)
        strategy = PlacementGroupSchedulingStrategy(self.group, self.bundles[number])
        return asked | {"scheduling_strategy": strategy}

    def visible_gpus(self, number: int, devices: int) -> list[str] | None:
        """Return ids of the GPUs that engine ``number`` of ``devices`` GPUs should see; None: those that Ray shows it.

        Its own come first, then the others of its node, whose weights it reads (``weight_sync/transport_ipc.py``).

        Raises LaunchError for an engine that would lie on two nodes.
        """
        if not self.gpus:
            return None
        own = self.gpus[number * devices : (number + 1) * devices]
        if len({gpu.node for gpu in own}) > 1:
            raise LaunchError(
                f"engine {number} would lie on two nodes: with trainer.placement.colocate_all=true each node must "
                f"have room for whole engines, of {devices} GPUs (tp · pp · dp) each"
            )
        return [gpu.id for gpu in own] + [gpu.id for gpu in self.gpus if gpu.node == own[0].node and gpu not in own]


@dataclass(slots=True)
class Placement:
    """Allocations of all roles (``policy``, ``ref``, ``critic``, ``engines``)."""

    allocations: dict[str, BundleAllocation] = field(default_factory=dict)

    def __getitem__(self, who: str) -> BundleAllocation:
        return self.allocations[who]

    def remove(self) -> None:
        """Give all devices back; the actors on them end."""
        for group in {allocation.group.id: allocation.group for allocation in self.allocations.values()}.values():
            remove_placement_group(group)
        self.allocations.clear()


def create_placement(cfg: SkyRLTrainConfig, timeout_s: float = READY_TIMEOUT_S) -> Placement:
    """Reserve devices for every role and the engines of ``cfg``.

    ``colocate_all``: one group that all share; ``colocate_policy_ref``: policy and reference share. Raises LaunchError
    after ``timeout_s`` naming what is missing.
    """
    settings, engine, roles = cfg.trainer.placement, cfg.generator.inference_engine, active_roles(cfg)
    sizes = {role: role_world_size(settings, role) for role in roles}
    if engine.run_engines_locally:
        sizes["engines"] = engine.num_engines
    together = {"policy", "ref"} if settings.colocate_policy_ref else {"policy"}
    together = set(sizes) if settings.colocate_all else together & set(sizes)
    placement = Placement()
    try:
        shared = reserve("+".join(sorted(together)), [_bundle(1)] * sizes["policy"], timeout_s)
        order, share = _by_node(shared), 1.0 / len(together)
        for who in sorted(together):
            step = engine_ranks(cfg) if who == "engines" else 1
            placement.allocations[who] = BundleAllocation(shared, order[::step], share)
        if "engines" in together and device.has_cuda():
            placement.allocations["engines"] = replace(placement["engines"], gpus=_gpus(shared, order, share))
        for who, count in sizes.items():
            if who not in together:
                per_actor = engine_ranks(cfg) if who == "engines" else 1
                group = reserve(who, [_bundle(per_actor)] * count, timeout_s)
                placement.allocations[who] = BundleAllocation(group, _by_node(group))
    except BaseException:
        placement.remove()
        raise
    return placement


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


def _bundle(devices: int) -> dict[str, float]:
    return {"GPU": float(devices), "CPU": float(devices)} if device.has_cuda() else {"CPU": 1.0}


def _by_node(group: PlacementGroup) -> tuple[int, ...]:
    """Return the bundles ordered by node, so that neighbouring ranks share one (tp groups lie inside nodes)."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return tuple(sorted(range(group.bundle_count), key=lambda bundle: (nodes[bundle], bundle)))


def _gpus(group: PlacementGroup, bundles: tuple[int, ...], share: float) -> tuple[Gpu, ...]:
    """Return the GPU behind each bundle, which a task there reports. Raises LaunchError."""
    asked = [
        _own_gpu.options(num_gpus=share, scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
        for bundle in bundles
    ]
    try:
        return tuple(Gpu(node, gpu) for node, gpu in ray.get(asked, timeout=READY_TIMEOUT_S))
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines()[0]
        raise LaunchError(
            f"the {len(bundles)} GPUs reserved for the run do not answer: {said}; see ray status"
        ) from error


@ray.remote(num_cpus=0)
def _own_gpu() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.get_node_id(), str(context.get_accelerator_ids()["GPU"][0])
