"""Policy ranks that are Ray actors, for the weight sync of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.hf_model import engines_quantise, read_hf_config
from skyrl_megatron.config.roles import (
    ranks_exchange_weights,
    sends_adapters_alone,
    trains_draft,
    weight_bucket_sizes,
    weight_transport,
)
from skyrl_megatron.config.rules.exact_rules import requires_equal_bits
from skyrl_megatron.errors import RankLostError
from skyrl_megatron.plugins import ADAPTERS
from skyrl_megatron.weight_sync.probe import QUANTISED
from skyrl_megatron.workers.actor_group import ACTOR_LOST, CALL_FAILED, lost_because, raise_rank_error
from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron.types import Part
    from skyrl_megatron.weight_sync.buckets import TensorMeta
    from skyrl_megatron.weight_sync.point_to_point import ExchangeSchedule
    from skyrl_megatron.weight_sync.slices import SourceMap
    from skyrl_megatron.weight_sync.transport import GroupMember
    from skyrl_megatron.workers.worker_group import WorkerGroup

PHASE = "sync weights"


def weight_synchronizer(
    cfg: SkyRLTrainConfig, policy: WorkerGroup, pool: EnginePool, *, dtype: str
) -> WeightSynchronizer:
    """Return the synchronizer that sends the weights of ``policy`` to ``pool``.

    ``dtype``: dtype of the engines' weights that are not quantized to 8 bits. Await ``sync(version)`` on the event
    loop that started the engines.
    """
    hf = read_hf_config(cfg) or {}
    return WeightSynchronizer(
        pool,
        policy_ranks(policy),
        hf_config=hf,
        dtype=QUANTISED if engines_quantise(cfg, hf) else dtype,
        probe_interval=cfg.generator.inference_engine.weight_sync_probe_interval,
        # Exact rollouts promise equal bits: any difference is an error, not noise.
        probe_limit=0.0 if requires_equal_bits(cfg) else cfg.generator.inference_engine.weight_sync_probe_limit,
        deadline_s=2 * cfg.trainer.phase_timeout_s,
        phase_s=cfg.trainer.phase_timeout_s,
        shared_gpus=cfg.trainer.placement.colocate_all,
        transport=weight_transport(cfg),
        bucket_sizes=weight_bucket_sizes(cfg),
        exchange=cfg.trainer.placement.policy_num_gpus_per_node if ranks_exchange_weights(cfg) else 0,
        reshard=cfg.generator.inference_engine.weight_sync_routes,
        adapters=ADAPTERS.require("sent")(cfg) if sends_adapters_alone(cfg) else None,
        draft=trains_draft(cfg, "policy"),
        experts_move=cfg.trainer.policy.megatron_config.moe_expert_moves != "none",
        # Lambdas, because recovery replaces the group while the synchronizer lives.
        look=lambda: policy.group.look(),
        end_waiting=lambda error: policy.group.end_waiting(error),
    )


def policy_ranks(policy: WorkerGroup) -> list[PolicyRank]:
    """Return the current ranks of ``policy``."""
    return [PolicyRank(actor, policy, rank) for rank, actor in enumerate(policy.group.actors)]


class PolicyRank:
    """The ``TrainerRank`` of an actor."""

    def __init__(self, actor: Any, policy: WorkerGroup, rank: int) -> None:
        self.actor, self.policy, self.rank = actor, policy, rank

    async def weight_metadata(self) -> Sequence[TensorMeta]:
        metadata: Sequence[TensorMeta] = await self._call("weight_metadata")
        return metadata

    async def weights_moved(self) -> bool:
        return bool(await self._call("weights_moved"))

    async def listen_for_engines(self) -> tuple[str, int]:
        host, port = await self._call("listen_for_engines")
        return host, port

    async def connect_engines(self, receivers: int, timeout_s: float) -> None:
        await self._call("connect_engines", receivers, timeout_s)

    async def join_engines(self, member: GroupMember, timeout_s: float, sizes: Sequence[int]) -> list[float]:
        rates: list[float] = await self._call("join_engines", member, timeout_s, sizes)
        return rates

    async def weight_source_map(self) -> SourceMap | str:
        source_map: SourceMap | str = await self._call("weight_source_map")
        return source_map

    async def set_transfers(
        self, buckets: bytes, copies: bytes, ranks_of: dict[int, int], exchange: ExchangeSchedule | None = None
    ) -> None:
        await self._call("set_transfers", buckets, copies, ranks_of, exchange)

    async def send_weights(self, adapters: Sequence[str] | None = None) -> list[Any]:
        sums: list[Any] = await self._call("send_weights", adapters)
        return sums

    async def score(
        self, token_ids: Sequence[int], *, perturbation: float = 0.0, adapter: str = ""
    ) -> list[float] | None:
        scores: list[float] | None = await self._call("score", list(token_ids), perturbation, adapter)
        return scores

    async def offload(self, parts: Sequence[Part]) -> None:
        await self._call("offload", parts)

    async def _call(self, method: str, *args: Any) -> Any:
        """Call the actor. Raises a rank's error as :meth:`ActorGroup.call`, and RankLostError if its process died."""
        name = self.policy.group.names[self.rank]
        try:
            return await getattr(self.actor, method).remote(*args)
        except ACTOR_LOST as error:
            # Ray's own message has the actor's id only, and tells nothing of memory or of a node that is gone.
            why = lost_because(error)
            raise RankLostError(f"{name}, phase {PHASE}: the process died ({why})", self.policy.group.role) from error
        except CALL_FAILED as error:
            # The process lives: it is the rank's own error, with its traceback.
            raise_rank_error(error, name, PHASE)
