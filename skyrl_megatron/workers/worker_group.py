"""One role of a run: its rank actors, with methods that take and return whole batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from skyrl_megatron.algorithms.registry import registry_versions
from skyrl_megatron.config.hf_model import experts_per_token, model_dimensions, read_hf_config
from skyrl_megatron.config.roles import active_roles, adapter_names, role_part, role_world_size, shares_policy_gpus
from skyrl_megatron.runtime.flops import ModelFlops
from skyrl_megatron.types import PARTS, StoredArray, TrainingBatch
from skyrl_megatron.workers.actor_group import ActorGroup
from skyrl_megatron.workers.dispatch import RankInfo, ShardedBatch, TopTokens, dispatch
from skyrl_megatron.workers.megatron_worker import OWN_SECONDS, MegatronWorker, ReplaceableWorker
from skyrl_megatron.workers.placement import cores_per_gpu, find_peer_holders, peer_distance
from skyrl_megatron.workers.ray_setup import rank_environment
from skyrl_megatron.workers.runtime_env import runtime_environment

if TYPE_CHECKING:
    from bridges.source import FolderChanges
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.progress import Span
    from skyrl_megatron.runtime.checkpoint.checkpointer import RoleRanks
    from skyrl_megatron.types import Part
    from skyrl_megatron.workers.placement import BundleAllocation


class ThroughputMeter:
    """Sums tokens, FLOPs and seconds of forward passes; :meth:`metrics` returns the throughput and resets the sums."""

    def __init__(self) -> None:
        self.tokens, self.flops, self.seconds = 0.0, 0.0, 0.0

    def add(self, lengths: np.ndarray, flops: ModelFlops, seconds: float = 0.0) -> None:
        """Count sequences. ``lengths``: [B] int, tokens. ``seconds``: their time, unless given to :meth:`metrics`."""
        self.tokens += float(lengths.sum())
        self.flops += float(flops.forward(lengths).sum())
        self.seconds += seconds

    def timed[T](self, lengths: np.ndarray, flops: ModelFlops, result: Callable[[], T]) -> Callable[[], T]:
        """Wrap ``result`` so that it counts the sequences, and the seconds from now until it returns.

        ``lengths``: [B] int, tokens.
        """
        began = time.perf_counter()

        def finish() -> T:
            found = result()
            self.add(lengths, flops, time.perf_counter() - began)
            return found

        return finish

    def metrics(self, prefix: str, ranks: int, peak: float | None, seconds: float | None = None) -> dict[str, float]:
        """Return ``<prefix>tokens_per_second_per_rank``, ``flops_per_second_per_rank`` and ``mfu``; {} without passes.

        ``peak``: FLOP/s of a rank; without it, no ``mfu``. ``seconds``: total time, if it was not counted.
        """
        took = self.seconds if seconds is None else seconds
        throughput: dict[str, float] = {}
        if self.tokens and took > 0:
            throughput[f"{prefix}tokens_per_second_per_rank"] = self.tokens / took / ranks
            throughput[f"{prefix}flops_per_second_per_rank"] = self.flops / took / ranks
            if peak is not None:
                throughput[f"{prefix}mfu"] = self.flops / took / ranks / peak
        self.tokens = self.flops = self.seconds = 0.0
        return throughput


AVERAGED = ("tokens_per_second_per_rank", "flops_per_second_per_rank", "mfu")
"""Metrics of a rank's own speed, which are averaged over replicas. Of ``peak_…`` metrics the largest is used."""


class WorkerGroup:
    """The ranks of ``role`` on ``allocation``. :meth:`start_building` and :meth:`finish_building` come first."""

    def __init__(self, cfg: SkyRLTrainConfig, role: str, allocation: BundleAllocation) -> None:
        self.cfg, self.name = cfg, role
        self._allocation, world = allocation, role_world_size(cfg.trainer.placement, role)
        self.group = ActorGroup(role, [self._actor(rank, world) for rank in range(world)], cfg.trainer.phase_timeout_s)
        self.group.replaceable = cfg.trainer.healing.enabled
        self.ranks: list[RankInfo] = []
        self._stepped: set[str] | None = None  # adapters since changed_adapters(); None: all
        self._own_seconds: list[float] = []
        self._building: Any = None
        self._built_with: tuple[int | None, str | None] = (None, None)
        self._scored = ThroughputMeter()
        self._distance = 0

    def _actor(self, rank: int, world: int) -> Any:
        actor: Any = ReplaceableWorker if self.cfg.trainer.healing.enabled else MegatronWorker
        variables = rank_environment(self.cfg, self.name, cores_per_gpu()) if self._allocation.on_gpus else {}
        options = self._allocation.options(rank) | {"runtime_env": runtime_environment(variables)}
        return actor.options(**options).remote(rank, world)

    # ------------------------------------------------------------------ start
    def start_building(self, total_steps: int | None = None, log_folder: str | None = None) -> None:
        """Start to load the model. :meth:`finish_building` waits for it."""
        self._built_with = (total_steps, log_folder)
        address = self.group.call("address", phase="start", ranks=[0])[0]
        self._building = self.group.start("build", self.cfg, self.name, address, *self._built_with, phase="build")

    def finish_building(self) -> None:
        """Wait until all ranks have loaded their part of the model. Raises their errors."""
        self.ranks = self._building.results()
        self.group.names = [
            f"{self.name} rank {rank} (pid {info.pid} on {info.node})" for rank, info in enumerate(self.ranks)
        ]
        self.flops = self.group.call("flops")[0]
        self.peak_flops: float | None = self.group.call("peak_flops")[0]
        self.group.repeat_warnings()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.group)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas."""
        return self.ranks[0].dp_size

    # ------------------------------------------------------------------ computing
    def dispatch(self, batch: TrainingBatch, rows: np.ndarray | None = None) -> ShardedBatch:
        """Split ``rows`` [b] int64 of a batch, by default all, for the replicas, to train on them once or more."""
        return dispatch(batch, self.dp_size, self.flops, rows, stages=self.stages)

    def _to_score(self, batch: TrainingBatch) -> ShardedBatch:
        return dispatch(batch, self.dp_size, self.flops, trains=False, stages=self.stages)

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """The layers whose routes each pipeline stage replays; [] without replay."""
        return sorted({info.routed for info in self.ranks} - {()})

    def compute_logprobs(self, batch: TrainingBatch, phase: str = "") -> Tensor:
        """Return log-probs [R] float32 (nats) of the response tokens under this role's weights."""
        return self.start_logprobs(batch, phase)()

    def start_logprobs(self, batch: TrainingBatch, phase: str = "", *, adapters: bool = True) -> Callable[[], Tensor]:
        """Start to compute log-probs [R] float32 (nats). Call the result to wait.

        Roles on separate devices then run concurrently. ``adapters`` false: compute them without the LoRA adapters.
        """
        sharded = self._to_score(batch)
        each = sharded.arguments(self.ranks)
        phase = phase or f"{self.name} log-probs"
        pending = self.group.start("compute_logprobs", adapters, phase=phase, each=each)
        return self._scored.timed(batch.lengths, self.flops, lambda: sharded.collect(self.ranks, pending.results()))

    def compute_recorded(
        self,
        batch: TrainingBatch,
        *,
        temperature: float | None = None,
        layers: bool = False,
        perturbation: float = 0.0,
        phase: str = "",
    ) -> tuple[Tensor, list[dict[str, np.ndarray]]]:
        """Return log-probs [R] as :meth:`compute_logprobs`, and the recorded values of each row, [n, …] of its n
        tokens, int32 or float32 (``runtime/recording.py``).

        Recorded are routes, if routers can replay them, and with ``layers`` the outputs of layers. ``temperature``:
        ``algorithm.temperature`` by default. ``perturbation``: relative change of every embedding.
        """
        sharded = self._to_score(batch)
        arguments = (temperature, layers, perturbation)
        phase = phase or f"{self.name} log-probs"
        results = self.group.call("compute_recorded", *arguments, phase=phase, each=sharded.arguments(self.ranks))
        logprobs = sharded.collect(self.ranks, [result[0] for result in results])
        return logprobs, sharded.collect_recorded(self.ranks, [result[1] for result in results])

    def logprobs_and_routes(self, batch: TrainingBatch, phase: str = "") -> tuple[Tensor, list[StoredArray]]:
        """Return log-probs as :meth:`compute_logprobs`, and for each row the experts [n, L, K] of its n tokens, which
        stay in the object store."""
        hf = read_hf_config(self.cfg, self.name) or {}
        dims = model_dimensions(hf)
        assert dims is not None, "a model with experts whose config.json names no layers"
        like = np.zeros((0, dims.num_layers, experts_per_token(hf)), np.min_scalar_type(dims.num_experts - 1))
        sharded = self._to_score(batch)
        arguments = sharded.arguments(self.ranks)
        counts = [
            1 + len(share.references) if info.records and info.routed else 1
            for info, (share,) in zip(self.ranks, arguments, strict=True)
        ]
        pending = self.group.start("compute_logprobs_and_routes", phase=phase, each=arguments, returns=counts)
        compute = self._scored.timed(batch.lengths, self.flops, lambda: sharded.collect(self.ranks, pending.results()))
        return compute(), sharded.routes(self.ranks, pending.further, batch.lengths, like)

    def layer_weights(self, layer: int | None) -> dict[str, np.ndarray]:
        """Return the float32 tensors of a layer by HF names, [...] as in the HF checkpoint.

        ``layer=None``: tensors outside of the layers. A tensor that holds all experts is split into
        ``<name>.<expert>``.
        """
        results = self.group.call("layer_weights", layer, phase="layer weights")
        return {name: tensor for found in results for name, tensor in found.items()}

    def start_values(self, batch: TrainingBatch) -> Callable[[], Tensor]:
        """Start to compute a critic's values [R] float32. Call the result to wait."""
        sharded = self._to_score(batch)
        pending = self.group.start("compute_values", phase="values", each=sharded.arguments(self.ranks))
        return self._scored.timed(batch.lengths, self.flops, lambda: sharded.collect(self.ranks, pending.results()))

    def start_scores(
        self, batch: TrainingBatch, k: int, rows: np.ndarray | None = None, flops: ModelFlops | None = None
    ) -> Callable[[], tuple[Tensor, TopTokens]]:
        """Start to compute a teacher's log-probs [R] float32 (nats), 0 in other rows than ``rows`` [b] int64, and its
        ``k`` likeliest tokens, which stay in the object store. Call the result to wait.

        ``flops``: of the role that trains on the rows, whose ranks then read what one rank computed.
        """
        sharded = dispatch(batch, self.dp_size, flops or self.flops, rows, trains=False, stages=self.stages)
        arguments = sharded.arguments(self.ranks)
        counts = [
            1 + 2 * len(share.references) if k and info.collects else 1
            for info, (share,) in zip(self.ranks, arguments, strict=True)
        ]
        pending = self.group.start("compute_scores", k, phase="teacher", each=arguments, returns=counts)

        def finish() -> tuple[Tensor, TopTokens]:
            logprobs = sharded.collect(self.ranks, pending.results())
            return logprobs, sharded.places(self.ranks, pending.further) if k else {}

        return self._scored.timed(batch.lengths if rows is None else batch.lengths[rows], self.flops, finish)

    def score_speed(self) -> dict[str, float]:
        """Return the ``score_…`` metrics of passes without gradients since the last call
        (:class:`ThroughputMeter`)."""
        return self._scored.metrics("score_", self.world_size, self.peak_flops)

    def train_mini_batch(
        self, sharded: ShardedBatch, *, more_follow: bool = False, **algorithm: Any
    ) -> dict[str, float]:
        """Take an optimizer step on the rows of ``sharded``. Return the metrics of the whole mini-batch.

        ``algorithm``: overrides of ``trainer.algorithm`` for this step. ``more_follow``: the next call is for another
        mini-batch, whose forward pass may gather the new weights.
        """
        arguments = (registry_versions(), algorithm, more_follow)
        results = self.group.call(
            "train_mini_batch", *arguments, phase=f"train {self.name}", each=sharded.arguments(self.ranks)
        )
        self.group.repeat_warnings()
        if rank_seconds := [result.pop(OWN_SECONDS) for result in results if OWN_SECONDS in result]:
            self._own_seconds = [
                a + b for a, b in zip(self._own_seconds or [0.0] * len(rank_seconds), rank_seconds, strict=True)
            ]
        merged = self._merged(results)
        named = {metric.split("/")[1] for metric in merged if metric.startswith("adapter/")}
        self._stepped = self._stepped | named if self._stepped is not None and named else None
        return merged

    def take_own_seconds(self) -> dict[str, float]:
        """Return name of a rank → its time for mini-batches since the last call, without waiting for others; {} if
        unknown."""
        own, self._own_seconds = self._own_seconds, []
        return dict(zip(self.group.names, own, strict=True)) if own else {}

    def changed_adapters(self) -> set[str] | None:
        """Return the adapters that took a step since the last call; None: possibly all."""
        changed, self._stepped = self._stepped, set()
        return changed

    def restart_schedule(self, *, lr: float | None = None, total_steps: int | None = None) -> None:
        """Restart the learning-rate schedule: as configured for ``total_steps``, or constant at ``lr``."""
        self.group.call("restart_schedule", lr, total_steps)

    def _merged(self, results: list[dict[str, float]]) -> dict[str, float]:
        """Merge the ranks' metrics, which are equal except for speed and memory."""
        collected = [result for info, result in zip(self.ranks, results, strict=True) if info.collects]
        merged = dict(collected[0])
        for name in merged:
            if name in AVERAGED:
                merged[name] = sum(result[name] for result in collected) / len(collected)
            elif name.startswith("peak_"):
                merged[name] = max(result[name] for result in results)
        return merged

    def copy_weights(self, source: WorkerGroup) -> None:
        """Copy the weights of ``source`` to this role, bitwise equal, a few at a time. The layouts may differ.

        Raises WeightSyncError if the models differ.
        """
        first, bucket = True, [None]
        while bucket:
            results = source.group.call("next_weights", first, phase=f"weights of the {source.name}")
            bucket = [reference for references in results for reference in references or ()]
            self.group.call("take_weights", first, bucket, phase=f"weights for the {self.name}")
            first = False

    # ------------------------------------------------------------------ when ranks are lost
    def keep_state(self) -> int:
        """Let each rank copy its state to host memory and send it to a peer, if possible on another host.

        Returns the bytes of host memory of all copies.
        """
        self._distance = peer_distance([info.node for info in self.ranks])
        return sum(self.group.call("keep_state", self._distance, phase="copy of the state"))

    def replace(self, lost: Sequence[int]) -> list[int]:
        """Replace ``lost`` ranks on their devices, and let the others leave their process groups.

        Returns the replaced ranks. Call :meth:`rebuild` next.
        """
        return self.group.replace(lost, partial(self._actor, world=len(self.group)))

    def rebuild(self) -> None:
        """Build the model on all ranks, with the initial weights. Raises as :meth:`finish_building`."""
        self._stepped, self._own_seconds, self._scored = None, [], ThroughputMeter()
        # load before the rendezvous: if a rank dies while it loads, the others do not wait for it until a deadline
        self.group.call("load", self.cfg, self.name, self._built_with[1], phase="start")
        self.start_building(*self._built_with)
        self.finish_building()

    def peer_holders(self, new: Sequence[int]) -> dict[int, int] | None:
        """Return new rank → rank that holds its checkpoint; None if that is new itself or there are no peers."""
        return find_peer_holders(new, self._distance, len(self.group))

    def roll_back(self, peer_holders: dict[int, int]) -> None:
        """Roll all ranks back to their last peer checkpoint. ``peer_holders``: from :meth:`peer_holders`."""
        self.group.call("roll_back", peer_holders, phase="back to the copied state")
        self._stepped = None

    # ------------------------------------------------------------------ memory
    def offload(self, *parts: Part) -> None:
        """Free the GPU memory of ``parts`` (default: all) for other roles and engines on the same GPUs.

        They are reloaded when a call needs them.
        """
        self.group.call("offload", parts or PARTS)

    def onload(self, *parts: Part) -> None:
        """Reload ``parts`` (default: all) before a call needs them."""
        self.group.call("onload", parts or PARTS)

    # ------------------------------------------------------------------ measurements
    def take_spans(self) -> list[list[Span]]:
        """Return each rank's timeline spans since the last call."""
        spans: list[list[Span]] = self.group.call("take_spans", phase="spans")
        return spans

    def device_type(self) -> str | None:
        """Return the type of the role's devices, a key of ``GPU_TYPES``; "" if unknown, None for a CPU."""
        kind: str | None = self.group.call("device_type", ranks=[0])[0]
        return kind

    def expert_load(self) -> dict[int, list[int]]:
        """Return layer → number of tokens per expert in training since the last call; {} without experts."""
        load: dict[int, list[int]] = self.group.call("take_expert_load", phase="expert load")[0]
        return load

    # ------------------------------------------------------------------ state
    def checkpointed(self) -> dict[str, RoleRanks]:
        """Return the role's parts of a checkpoint by folder: one part, or one for each named adapter."""
        names = adapter_names(self.cfg) if self.name == "policy" else ("",)
        alone = "critic" not in active_roles(self.cfg) and not self.cfg.trainer.update_ref_every_epoch
        offloads = not alone and shares_policy_gpus(self.cfg, self.name)
        return {role_part(self.name, name): _CheckpointedPart(self.group, name, offloads=offloads) for name in names}

    def export_hf(self, folder: str, changes: FolderChanges | None = None) -> None:
        """Write the weights as an HF folder, and named adapters as PEFT folders next to it."""
        self.group.call("export_hf", folder, changes, phase="export")
        self.group.repeat_warnings()

    def state_hashes(self) -> list[dict[str, str]]:
        """Return for each rank the SHA-256 of weights, moments and random states."""
        hashes: list[dict[str, str]] = self.group.call("state_hashes")
        return hashes

    def device_bytes(self) -> int:
        """Return the current bytes of weights, gradients and optimizer state on the rank with the most."""
        return int(max(self.group.call("device_bytes")))

    def memory_bytes(self) -> int:
        """Return the largest peak memory of a rank in bytes."""
        return int(max(self.group.call("memory_bytes")))

    def stop(self) -> None:
        """End the ranks."""
        self.group.kill()


class _CheckpointedPart:
    """The ranks of a role for a checkpoint of all trained weights or of one adapter.

    ``offloads``: another role needs the GPUs afterwards.
    """

    def __init__(self, group: ActorGroup, adapter: str, *, offloads: bool) -> None:
        self._group, self._adapter, self._offloads = group, adapter, offloads

    @property
    def world_size(self) -> int:
        return len(self._group)

    def save_checkpoint(self, folder: str, step: int, *, background: bool) -> None:
        self._group.call("save_checkpoint", self._adapter, folder, step, background, phase="save checkpoint")
        self._offload()

    def wait_checkpoint(self) -> None:
        self._group.call("wait_checkpoint", self._adapter, self._group.timeout_s, phase="save checkpoint")

    def load_checkpoint(self, folder: str) -> int:
        step = int(self._group.call("load_checkpoint", self._adapter, folder, phase="load checkpoint")[0])
        self._group.repeat_warnings()
        self._offload()
        return step

    def _offload(self) -> None:
        if self._offloads:
            self._group.call("offload", PARTS)
