"""Everything of vLLM that moves between releases, for vLLM 0.32: the only file that imports it.

Loaded in every worker process as the module of ``worker_extension_cls``: importing it installs CPU work-arounds and
registers our weight-transfer backend, before the model is built.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams, TokensPrompt
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from skyrl_megatron.weight_sync.bucket import DEFAULT_BUCKET_BYTES, TensorMeta
from skyrl_megatron.weight_sync.receiver import WeightReceiver
from skyrl_megatron.weight_sync.transport_gloo import GlooTransport

__all__ = [
    "BACKEND",
    "WORKER_EXTENSION",
    "AsyncEngineArgs",
    "AsyncLLM",
    "RequestOutputKind",
    "SamplingParams",
    "TokensPrompt",
    "VLLMValidationError",
    "WeightTransferInitRequest",
    "WeightTransferUpdateRequest",
    "worker_environment",
]

BACKEND = "skyrl_megatron"
WORKER_EXTENSION = "skyrl_megatron.weight_sync.vllm_compat.WorkerExtension"


def worker_environment() -> dict[str, str]:
    """Environment that engine processes need. Set before an engine is started."""
    shared = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    if current_platform.is_cpu():
        # The default binding pins every engine to the first core and asserts as many NUMA nodes as tp ranks.
        shared |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return shared


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the senders listen: ``(host, port)`` each. ``rank_offset``: rank of this engine's first worker."""

    senders: list[tuple[str, int]] = field(default_factory=list)
    rank_offset: int = 1
    world_size: int = 2
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    timeout_s: float = 120.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What each sender sends: lists of (name, dtype, shape)."""

    senders: list[list[tuple[str, str, list[int]]]] = field(default_factory=list)


class BroadcastTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Buckets broadcast by trainer ranks, loaded through vLLM's layerwise reload, with a checksum for each bucket."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        transports = [
            GlooTransport(host, port, rank, init_info.world_size, init_info.timeout_s)
            for host, port in init_info.senders
        ]
        self.receiver = WeightReceiver(transports, init_info.bucket_bytes)
        WorkerExtension.receiver = self.receiver

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        metadata = [[TensorMeta(n, d, tuple(s)) for n, d, s in sender] for sender in update_info.senders]
        self.model.load_weights(self.receiver.tensors(metadata))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.receiver = None


class WorkerExtension:
    """Methods that ``collective_rpc`` finds on every worker."""

    receiver: WeightReceiver | None = None

    def skyrl_checksums(self) -> list[list[int]]:
        """Checksums of the last update's buckets, per sender."""
        return [] if WorkerExtension.receiver is None else WorkerExtension.receiver.checksums


def _repack_experts_after_reload() -> None:
    """On CPU, vLLM packs expert weights for its kernel only the first time they are loaded; a reload then writes
    unpacked weights into packed tensors, and log-probs are silently wrong. Pack after every load."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = UnquantizedFusedMoEMethod._setup_kernel
    if getattr(original, "repacks", False):
        return

    def _setup_kernel(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        reloading = self.moe_kernel is not None
        original(self, layer=layer, w13=w13, w2=w2)
        if reloading:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    _setup_kernel.repacks = True  # type: ignore[attr-defined]
    UnquantizedFusedMoEMethod._setup_kernel = _setup_kernel


if current_platform.is_cpu():
    _repack_experts_after_reload()
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BroadcastTransferEngine)
