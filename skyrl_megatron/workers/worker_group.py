"""One role of a run: its rank actors behind calls that take and return whole batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from skyrl_megatron.algorithms.registry import registry_versions
from skyrl_megatron.config.hf_model import model_dimensions, read_hf_config
from skyrl_megatron.config.roles import active_roles, adapter_names, role_part, role_world_size, shares_policy_gpus
from skyrl_megatron.data.batch import routes_of
from skyrl_megatron.runtime.flops import ModelFlops
from skyrl_megatron.runtime.offload import PARTS
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron.workers.actor_group import ActorGroup
from skyrl_megatron.workers.dispatch import RankInfo, ShardedBatch, dispatch
from skyrl_megatron.workers.megatron_worker import OWN_SECONDS, MegatronWorker, ReplaceableWorker
from skyrl_megatron.workers.placement import cores_per_gpu, distance_to_neighbour, holders
from skyrl_megatron.workers.processes import runtime_environment
from skyrl_megatron.workers.ray_setup import rank_environment

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.progress import Span
    from skyrl_megatron.runtime.checkpoint.checkpointer import RoleRanks
    from skyrl_megatron.runtime.offload import Part
    from skyrl_megatron.workers.placement import BundleAllocation


class Speed:
    """Sums the forward passes of a phase; :meth:`metrics` tells and starts anew."""

    def __init__(self) -> None:
        self.tokens, self.flops, self.seconds = 0.0, 0.0, 0.0

    def add(self, lengths: np.ndarray, flops: ModelFlops, seconds: float = 0.0) -> None:
        """Count sequences. ``lengths``: [B] int, tokens; ``seconds``: what they took, unless it is told at the end."""
        self.tokens += float(lengths.sum())
        self.flops += float(flops.forward(lengths).sum())
        self.seconds += seconds

    def timed[T](self, lengths: np.ndarray, flops: ModelFlops, result: Callable[[], T]) -> Callable[[], T]:
        """Return ``result``, which counts the sequences and the seconds from now until it has returned."""
        began = time.perf_counter()

        def finish() -> T:
            found = result()
            self.add(lengths, flops, time.perf_counter() - began)
            return found

        return finish

    def metrics(self, prefix: str, ranks: int, peak: float | None, seconds: float | None = None) -> dict[str, float]:
        """Return ``<prefix>tokens_per_second_per_rank``, ``flops_per_second_per_rank`` and, with the ``peak`` of a
        rank in FLOP/s, ``mfu``; {} when nothing was done. ``seconds``: of all of it, where they were not counted."""
        took = self.seconds if seconds is None else seconds
        found: dict[str, float] = {}
        if self.tokens and took > 0:
            found[f"{prefix}tokens_per_second_per_rank"] = self.tokens / took / ranks
            found[f"{prefix}flops_per_second_per_rank"] = self.flops / took / ranks
            if peak is not None:
                found[f"{prefix}mfu"] = self.flops / took / ranks / peak
        self.tokens = self.flops = self.seconds = 0.0
        return found


AVERAGED = ("tokens_per_second_per_rank", "flops_per_second_per_rank", "mfu")
"""Metrics of a rank's own speed, averaged over replicas; those that name a peak are the largest."""


class WorkerGroup:
    """The ranks of ``role`` on ``allocation``. :meth:`start_building` and :meth:`finish_building` come first."""

    def __init__(self, cfg: SkyRLTrainConfig, role: str, allocation: BundleAllocation) -> None:
        self.cfg, self.name = cfg, role
        self._allocation, world = allocation, role_world_size(cfg.trainer.placement, role)
        self.group = ActorGroup(role, [self._actor(rank, world) for rank in range(world)], cfg.trainer.phase_timeout_s)
        self.group.replaceable = cfg.trainer.healing.enabled
        self.ranks: list[RankInfo] = []
        self._stepped: set[str] | None = None  # named adapters, since changed_adapters(); None: whichever there are
        self._own_seconds: list[float] = []
        self._building: Any = None
        self._built_with: tuple[int | None, str | None] = (None, None)
        self._scored = Speed()
        self._distance = 0

    def _actor(self, rank: int, world: int) -> Any:
        actor: Any = ReplaceableWorker if self.cfg.trainer.healing.enabled else MegatronWorker
        variables = rank_environment(self.cfg, self.name, cores_per_gpu()) if self._allocation.on_gpus else {}
        options = self._allocation.options(rank) | {"runtime_env": runtime_environment(variables)}
        return actor.options(**options).remote(rank, world)

    # ------------------------------------------------------------------ start
    def start_building(self, total_steps: int | None = None, log_folder: str | None = None) -> None:
        """Begin to load the model; :meth:`finish_building` waits for it."""
        self._built_with = (total_steps, log_folder)
        address = self.group.call("address", phase="start", ranks=[0])[0]
        self._building = self.group.start("build", self.cfg, self.name, address, *self._built_with, phase="build")

    def finish_building(self) -> None:
        """Wait until all ranks hold their part of the model. Raises what they raised."""
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
    def dispatch(self, batch: TrainingBatch) -> ShardedBatch:
        """Cut for the replicas and put into the object store once, for one or more calls."""
        return dispatch(batch, self.dp_size, self.flops)

    def compute_logprobs(self, batch: TrainingBatch, phase: str = "") -> Tensor:
        """Return [B, T] float32, nats: log-probs of the response tokens under this role's weights."""
        return self.start_logprobs(batch, phase)()

    def start_logprobs(self, batch: TrainingBatch, phase: str = "", *, adapters: bool = True) -> Callable[[], Tensor]:
        """Begin to compute log-probs, so that roles on devices of their own work at the same time; call the result.

        ``adapters`` false: of the model that low-rank adapters are added to.
        """
        sharded = self.dispatch(batch)
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
        """Return log-probs as :meth:`compute_logprobs` does, and what was recorded of each row on the way
        (``runtime/profiling.py``): routes, where routers can replay them, and with ``layers`` what layers gave.

        ``temperature``: ``algorithm.temperature`` unless given. ``perturbation``: relative change of every embedding.
        """
        sharded = self.dispatch(batch)
        arguments = (temperature, layers, perturbation)
        phase = phase or f"{self.name} log-probs"
        results = self.group.call("compute_recorded", *arguments, phase=phase, each=sharded.arguments(self.ranks))
        logprobs = sharded.collect(self.ranks, [result[0] for result in results])
        return logprobs, sharded.collect_recorded(self.ranks, [result[1] for result in results])

    def logprobs_and_routes(self, batch: TrainingBatch, phase: str = "") -> tuple[Tensor, list[np.ndarray | None]]:
        """Return log-probs as :meth:`compute_logprobs` does, and the experts that the model took on the way: [n, L, K]
        of all n tokens of each row."""
        compute = self._scored.timed(batch.lengths, self.flops, lambda: self.compute_recorded(batch, phase=phase))
        logprobs, found = compute()
        dims = model_dimensions(read_hf_config(self.cfg, self.name) or {})
        assert dims is not None, "a model with experts whose config.json names no layers"
        return logprobs, [routes_of(each, dims.num_layers) for each in found]

    def layer_weights(self, layer: int | None) -> dict[str, np.ndarray]:
        """Return the tensors of a layer by HF's names, as float32; None: those that no layer has. Each expert's of one
        that all share is ``<name>.<expert>``."""
        results = self.group.call("layer_weights", layer, phase="layer weights")
        return {name: tensor for found in results for name, tensor in found.items()}

    def start_values(self, batch: TrainingBatch) -> Callable[[], Tensor]:
        """Begin to compute a critic's values, [B, T] float32; call the result."""
        sharded = self.dispatch(batch)
        pending = self.group.start("compute_values", phase="values", each=sharded.arguments(self.ranks))
        return self._scored.timed(batch.lengths, self.flops, lambda: sharded.collect(self.ranks, pending.results()))

    def start_scores(self, batch: TrainingBatch, k: int) -> Callable[[], Tensor]:
        """Begin to ask a teacher for log-probs of the response tokens and of its ``k`` likeliest ones, [B, T, 1 + 2k]
        float32; call the result."""
        sharded = self.dispatch(batch)
        pending = self.group.start("compute_scores", k, phase="teacher", each=sharded.arguments(self.ranks))
        return self._scored.timed(batch.lengths, self.flops, lambda: sharded.collect(self.ranks, pending.results()))

    def score_speed(self) -> dict[str, float]:
        """Return ``score_…`` of the passes without gradients since this was asked last (:class:`Speed`)."""
        return self._scored.metrics("score_", self.world_size, self.peak_flops)

    def train_mini_batch(
        self, sharded: ShardedBatch, *, more_follow: bool = False, **algorithm: Any
    ) -> dict[str, float]:
        """Take an optimizer step on the rows of ``sharded``; returns metrics of the whole mini-batch.

        ``algorithm``: fields of ``trainer.algorithm`` that the objective of this step has other values of.
        ``more_follow``: the next call is for another mini-batch, whose forward pass may gather the new weights.
        """
        arguments = (registry_versions(), algorithm, more_follow)
        results = self.group.call(
            "train_mini_batch", *arguments, phase=f"train {self.name}", each=sharded.arguments(self.ranks)
        )
        self.group.repeat_warnings()
        if own := [result.pop(OWN_SECONDS) for result in results if OWN_SECONDS in result]:
            self._own_seconds = [a + b for a, b in zip(self._own_seconds or [0.0] * len(own), own, strict=True)]
        merged = self._merged(results)
        named = {metric.split("/")[1] for metric in merged if metric.startswith("adapter/")}
        self._stepped = self._stepped | named if self._stepped is not None and named else None
        return merged

    def take_own_seconds(self) -> list[float]:
        """Return the time that each rank was busy itself with mini-batches since the last call, without waiting for
        others; [] where it is not known."""
        own, self._own_seconds = self._own_seconds, []
        return own

    def changed_adapters(self) -> set[str] | None:
        """Return the named adapters that took a step since this was asked last; None: all that there is may have."""
        changed, self._stepped = self._stepped, set()
        return changed

    def restart_schedule(self, *, lr: float | None = None, total_steps: int | None = None) -> None:
        """Begin the learning-rate schedule anew: as configured for ``total_steps``, or constant at ``lr``."""
        self.group.call("restart_schedule", lr, total_steps)

    def _merged(self, results: list[dict[str, float]]) -> dict[str, float]:
        """Merge what ranks measured: equal on all of them but for their own speed and memory."""
        collected = [result for info, result in zip(self.ranks, results, strict=True) if info.collects]
        merged = dict(collected[0])
        for name in merged:
            if name in AVERAGED:
                merged[name] = sum(result[name] for result in collected) / len(collected)
            elif name.startswith("peak_"):
                merged[name] = max(result[name] for result in results)
        return merged

    def copy_weights(self, source: WorkerGroup) -> None:
        """Make this role's weights those of ``source``, bit for bit, whatever the two layouts. A few weights at a time
        travel from its ranks to these. Raises WeightSyncError where the two are not of one model."""
        first, given = True, [None]
        while given:
            results = source.group.call("next_weights", first, phase=f"weights of the {source.name}")
            given = [reference for references in results for reference in references or ()]
            self.group.call("take_weights", first, given, phase=f"weights for the {self.name}")
            first = False

    # ------------------------------------------------------------------ when ranks are lost
    def keep_state(self) -> int:
        """Let each rank copy its state and give it to a neighbour, on another host where there are several; returns
        the bytes of host memory that the copies of all hold."""
        self._distance = distance_to_neighbour([info.node for info in self.ranks])
        return sum(self.group.call("keep_state", self._distance, phase="copy of the state"))

    def replace(self, lost: Sequence[int]) -> list[int]:
        """Start ``lost`` ranks anew, in the places of the old ones, and let the others leave them; returns the ranks
        that are new. :meth:`rebuild` comes next."""
        return self.group.replace(lost, partial(self._actor, world=len(self.group)))

    def rebuild(self) -> None:
        """Build the model on all ranks, with the weights of its folder. Raises as a start does."""
        self._stepped, self._own_seconds, self._scored = None, [], Speed()
        # one that is lost while it starts leaves nobody in a rendezvous, from which nobody returns before its deadline
        self.group.call("load", self.cfg, self.name, self._built_with[1], phase="start")
        self.start_building(*self._built_with)
        self.finish_building()

    def kept_by(self, new: Sequence[int]) -> dict[int, int] | None:
        """Return which rank has the copy of each ``new`` one; None where such a rank is new itself, or there are no
        neighbours."""
        return holders(new, self._distance, len(self.group))

    def roll_back(self, kept_by: dict[int, int]) -> None:
        """Bring all ranks back to the state that was copied last. ``kept_by``: as :meth:`kept_by` returned it."""
        self.group.call("roll_back", kept_by, phase="back to the copied state")
        self._stepped = None

    # ------------------------------------------------------------------ memory
    def offload(self, *parts: Part) -> None:
        """Free the GPU memory of ``parts`` (all: without arguments) for other roles and engines on the same GPUs. They
        come back by themselves when a call needs them."""
        self.group.call("offload", parts or PARTS)

    def onload(self, *parts: Part) -> None:
        """Bring ``parts`` (all: without arguments) back ahead of their use."""
        self.group.call("onload", parts or PARTS)

    # ------------------------------------------------------------------ what was done
    def take_spans(self) -> list[list[Span]]:
        """Return what each rank was busy with since the last call, and when."""
        spans: list[list[Span]] = self.group.call("take_spans", phase="spans")
        return spans

    def expert_load(self) -> dict[int, list[int]]:
        """Return the tokens that each expert was trained with since the last call, by layer; {} without experts."""
        load: dict[int, list[int]] = self.group.call("take_expert_load", phase="expert load")[0]
        return load

    # ------------------------------------------------------------------ state
    def checkpointed(self) -> dict[str, RoleRanks]:
        """Return what a checkpoint holds of the role, by its folder there: one part, or one for each named adapter."""
        names = adapter_names(self.cfg) if self.name == "policy" else ("",)
        alone = "critic" not in active_roles(self.cfg) and not self.cfg.trainer.update_ref_every_epoch
        leaves = not alone and shares_policy_gpus(self.cfg, self.name)
        return {role_part(self.name, name): _CheckpointedPart(self.group, name, leaves=leaves) for name in names}

    def export_hf(self, folder: str) -> None:
        """Write the weights as a HF folder; named adapters as PEFT folders beside it."""
        self.group.call("export_hf", folder, phase="export")
        self.group.repeat_warnings()

    def state_hashes(self) -> list[dict[str, str]]:
        """Return SHA-256 of weights, moments and random states, by rank."""
        hashes: list[dict[str, str]] = self.group.call("state_hashes")
        return hashes

    def device_bytes(self) -> int:
        """Return what weights, gradients and optimizer state hold now on the rank that holds most."""
        return int(max(self.group.call("device_bytes")))

    def memory_bytes(self) -> int:
        """Return the largest peak of a rank so far."""
        return int(max(self.group.call("memory_bytes")))

    def stop(self) -> None:
        """End the ranks."""
        self.group.kill()


class _CheckpointedPart:
    """The ranks of a role as a checkpoint sees them, for all that is trained or for one adapter. ``leaves``: its GPUs
    are needed for another role's part."""

    def __init__(self, group: ActorGroup, adapter: str, *, leaves: bool) -> None:
        self._group, self._adapter, self._leaves = group, adapter, leaves

    @property
    def world_size(self) -> int:
        return len(self._group)

    def save_checkpoint(self, folder: str, step: int, *, background: bool) -> None:
        self._group.call("save_checkpoint", self._adapter, folder, step, background, phase="save checkpoint")
        self._leave()

    def wait_checkpoint(self) -> None:
        self._group.call("wait_checkpoint", self._adapter, self._group.timeout_s, phase="save checkpoint")

    def load_checkpoint(self, folder: str) -> int:
        step = int(self._group.call("load_checkpoint", self._adapter, folder, phase="load checkpoint")[0])
        self._group.repeat_warnings()
        self._leave()
        return step

    def _leave(self) -> None:
        if self._leaves:
            self._group.call("offload", PARTS)
