"""Publishing the policy's weights to the engines of a run: ranks and engines are Ray actors here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from skyrl_megatron import device
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.errors import DistributedError, SkyRLMegatronError
from skyrl_megatron.plugins import TRANSPORTS
from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.inference.pool import EnginePool
    from skyrl_megatron.workers.worker_group import WorkerGroup


def weight_synchronizer(
    cfg: SkyRLTrainConfig, policy: WorkerGroup, pool: EnginePool, *, dtype: str
) -> WeightSynchronizer:
    """The publisher of ``policy``'s weights to ``pool``. ``dtype``: of the engines' weights.

    Await its ``publish(version)`` on the event loop that the engines were started on.
    """
    key = "trainer.policy.model.path"
    return WeightSynchronizer(
        pool,
        [PolicyRank(actor, policy, rank) for rank, actor in enumerate(policy.group.actors)],
        hf_config=read_hf_config(cfg.trainer.policy.model.path or "", key) or {},
        dtype=dtype,
        probe_interval=cfg.generator.inference_engine.weight_sync_probe_interval or 0,
        deadline_s=2 * cfg.trainer.phase_timeout_s,
        phase_s=cfg.trainer.phase_timeout_s,
        shared_gpus=cfg.trainer.placement.colocate_all,
        transport=transport_of(cfg),
    )


def transport_of(cfg: SkyRLTrainConfig) -> str:
    """What carries the weights, for both ends.

    Two processes on one GPU cannot be in one NCCL group. Where they share GPUs, the bytes stay on them, by CUDA IPC;
    workers on another node than a sender, or in a vLLM that shows each of its data-parallel ranks only its own GPUs,
    cannot open its memory: gloo.
    """
    engine, placement = cfg.generator.inference_engine, cfg.trainer.placement
    if not placement.colocate_all or engine.weight_sync_backend not in TRANSPORTS.built_in:
        return engine.weight_sync_backend
    return "ipc" if placement.policy_num_nodes == engine.data_parallel_size == 1 else device.GLOO


class PolicyRank:
    """One rank of the policy as the publisher calls it (``workers/sync_handles.py``)."""

    def __init__(self, actor: Any, policy: WorkerGroup, rank: int) -> None:
        self.actor, self.policy, self.rank = actor, policy, rank

    async def weight_metadata(self) -> Sequence[Any]:
        metadata: Sequence[Any] = await self._call("weight_metadata")
        return metadata

    async def listen_for_engines(self) -> tuple[str, int]:
        host, port = await self._call("listen_for_engines")
        return host, port

    async def connect_engines(self, receivers: int, timeout_s: float) -> None:
        await self._call("connect_engines", receivers, timeout_s)

    async def send_weights(self) -> list[int]:
        sums: list[int] = await self._call("send_weights")
        return sums

    async def score(self, token_ids: Sequence[int], *, nudge: float = 0.0) -> list[float] | None:
        scores: list[float] | None = await self._call("score", list(token_ids), nudge)
        return scores

    async def offload(self) -> None:
        await self._call("offload")

    async def _call(self, method: str, *args: Any) -> Any:
        """Raises the rank's own error, or DistributedError when its process is gone."""
        try:
            return await getattr(self.actor, method).remote(*args)
        except ray.exceptions.RayActorError as error:
            name = self.policy.group.names[self.rank]
            raise DistributedError(f"{name}, phase sync weights: the process died") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SkyRLMegatronError):
                raise error.cause from None
            raise
