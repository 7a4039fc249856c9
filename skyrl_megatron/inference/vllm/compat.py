"""Everything of vLLM that moves between releases, for vLLM 0.32: the only file that imports it.

Loaded in every worker process as the module of ``worker_extension_cls``: importing it installs CPU work-arounds and
registers our weight-transfer backend, before the model is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partialmethod
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import PauseMode
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import multiproc_executor
from vllm.v1.sample.sampler import Sampler

from skyrl_megatron.inference.vllm import processes
from skyrl_megatron.weight_sync import DEFAULT_BUCKET_BYTES
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.receiver import WeightReceiver
from skyrl_megatron.weight_sync.transport import DEFAULT_TIMEOUT_S, default_transport, open_transport

__all__ = [
    "BACKEND",
    "WORKER_EXTENSION",
    "AsyncEngineArgs",
    "AsyncLLM",
    "EngineDeadError",
    "RequestOutputKind",
    "SamplingParams",
    "VLLMClientError",
    "WeightTransferInitRequest",
    "WeightTransferUpdateRequest",
    "tokens_input",
    "worker_environment",
]

BACKEND = "skyrl_megatron"
WORKER_EXTENSION = "skyrl_megatron.inference.vllm.compat.WorkerExtension"


# ------------------------------------------------------------------ starting an engine
def worker_environment() -> dict[str, str]:
    """Environment that engine processes need. Set before an engine is started."""
    shared = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    if current_platform.is_cpu():
        # The default binding pins every engine to the first core and asserts as many NUMA nodes as tp ranks.
        shared |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": processes.omp_threads()}
    return shared


def platform_arguments(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments that the platform needs for a model."""
    if not current_platform.is_cpu():
        return {}
    arguments: dict[str, Any] = {"distributed_executor_backend": "mp"}
    if "kv_lora_rank" in hf_config:
        # vLLM's CPU rotary kernel is wrong for the 3-D queries of multi-head latent attention: use the torch one
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return arguments


@cache
def sampling_keys() -> frozenset[str]:
    """Keys that a request may set; one request is one continuation, delivered whole."""
    ours = {"n", "output_kind", "skip_clone", "stream_interval"}
    return frozenset(name for name in SamplingParams.__struct_fields__ if not name.startswith("_")) - ours


def ray_stat_loggers() -> list[Any]:
    """Engine metrics through Ray's Prometheus exporter."""
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return [RayPrometheusStatLogger]


# ------------------------------------------------------------------ pausing
async def pause(llm: AsyncLLM, mode: PauseMode) -> None:
    """``AsyncLLM.pause_generation`` without clearing caches, and without its 20 ms of sleep, which only let earlier
    outputs be delivered first."""
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)


# ------------------------------------------------------------------ OpenAI endpoint
async def openai_app(llm: AsyncLLM, model: str, served_model_name: str) -> Any:
    """vLLM's own OpenAI-compatible ASGI application over an engine."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = ["--model", model, "--served-model-name", served_model_name, "--disable-fastapi-docs"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app


# ------------------------------------------------------------------ weights, worker side
@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the senders listen: ``(host, port)`` each. ``rank_offset``: rank of this engine's first worker."""

    senders: list[tuple[str, int]] = field(default_factory=list)
    rank_offset: int = 1
    world_size: int = 2
    transport: str | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What each sender sends: lists of :class:`TensorMeta` fields. None: what was announced before."""

    senders: list[list[list[Any]]] | None = None


class BroadcastTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Buckets broadcast by trainer ranks, loaded through vLLM's layerwise reload, with a checksum for each bucket."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    receiver: WeightReceiver | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        transports = [
            open_transport(
                init_info.transport or default_transport(), host, port, rank, init_info.world_size, init_info.timeout_s
            )
            for host, port in init_info.senders
        ]
        self.receiver = WeightReceiver(transports, init_info.bucket_bytes, torch.device(self.device))

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self.receiver is None:
            raise RuntimeError("no trainer is connected")
        if update_info.senders is not None:
            self.receiver.announce([[_meta(*item) for item in sender] for sender in update_info.senders])
        try:
            self.model.load_weights(self.receiver.tensors())
        except BaseException:
            self.shutdown()
            self.finish_weight_update()  # leaves wrong weights, and a model that the next update starts afresh on
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu() and getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            pack_output_layer(self.model)

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None


def _meta(name: str, dtype: str, shape: list[int], rows: list[int] | None = None, position: int = -1) -> TensorMeta:
    return TensorMeta(name, dtype, tuple(shape), None if rows is None else (rows[0], rows[1]), position)


class WorkerExtension:
    """Methods that ``collective_rpc`` finds on every worker, which this class is mixed into."""

    def skyrl_ping(self) -> None:
        """Answer."""

    def skyrl_checksums(self) -> list[list[int]]:
        """Checksums of the last update's buckets, per sender."""
        receiver = self.weight_transfer_engine.receiver  # type: ignore[attr-defined]
        return [] if receiver is None else receiver.checksums

    def skyrl_abort_update(self) -> None:
        """Leave an update that was started and not finished. The weights are wrong until the next whole update."""
        if self._weight_update_active:  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]

    def skyrl_logprobs_at_temperature(self) -> None:
        """Log-probs of sampled tokens are of softmax(logits / temperature), whatever truncates the distribution."""
        Sampler.forward = _with_temperature_logprobs(Sampler.forward)

    def skyrl_compile_nothing(self) -> None:
        """``enforce_eager`` is about the model; a few functions of the sampler are compiled all the same, which on CPU
        holds up the first log-probs of every engine by 4 s."""
        torch._dynamo.config.disable = True


# ------------------------------------------------------------------ log-probabilities
def _with_temperature_logprobs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``Sampler.forward`` whose raw log-probs are taken after the temperature, before any truncation."""
    if getattr(forward, "at_temperature", False):
        return forward

    def forward_at_temperature(self: Any, logits: torch.Tensor, sampling_metadata: Any, **kwargs: Any) -> Any:
        temperature = sampling_metadata.temperature  # [requests]; None when all are greedy
        if temperature is None:
            return forward(self, logits, sampling_metadata, **kwargs)
        scale = torch.where(temperature < 1e-5, 1.0, temperature).unsqueeze(1)
        self.compute_logprobs = lambda raw: torch.log_softmax(raw.float() / scale, dim=-1)
        try:
            return forward(self, logits, sampling_metadata, **kwargs)
        finally:
            del self.compute_logprobs

    forward_at_temperature.at_temperature = True  # type: ignore[attr-defined]
    return forward_at_temperature


# ------------------------------------------------------------------ CPU work-arounds
LOOK_AGAIN_MS = 5


def repack_experts_after_reload() -> None:
    """On CPU, vLLM packs expert weights for its kernel only the first time they are loaded; a reload then writes
    unpacked weights into packed tensors, and log-probs are silently wrong. Pack after every load."""
    original = UnquantizedFusedMoEMethod._setup_kernel
    if getattr(original, "packs_once", None):
        return

    def _setup_kernel(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        reloading = self.moe_kernel is not None
        original(self, layer=layer, w13=w13, w2=w2)
        if reloading:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    _setup_kernel.packs_once = original  # type: ignore[attr-defined]
    UnquantizedFusedMoEMethod._setup_kernel = _setup_kernel


def pack_output_layer(model: torch.nn.Module) -> None:
    """On CPU, vLLM's output layer computes with a packed copy of its weight. One that is tied to the embedding is sent
    no weight of its own, and after a reload of the embedding its copy is still the old one. Pack it again."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def wait_without_spinning() -> None:
    """Workers ask for their next call in a loop for a second after each one, and sleep only then. Where engines and
    trainer share a few cores this takes one of them from whoever has work: sleep at once, but not for long. vLLM's
    notification is dropped when the one before it has not been taken, and a worker that misses one sleeps forever."""
    SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=0)  # type: ignore[assignment]
    original = SpinCondition.wait

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        original(self, LOOK_AGAIN_MS if timeout_ms is None else min(timeout_ms, LOOK_AGAIN_MS))

    SpinCondition.wait = wait  # type: ignore[method-assign]


def fork_engine_processes() -> None:
    """Engine cores and workers are forked from a process that has imported vLLM, instead of importing it each."""
    for module in (engine_utils, multiproc_executor):
        module.get_mp_context = processes.EngineContext  # type: ignore[attr-defined]


if current_platform.is_cpu():
    fork_engine_processes()
    repack_experts_after_reload()
    wait_without_spinning()
with contextlib.suppress(ValueError):  # registered already
    WeightTransferEngineFactory.register_engine(BACKEND, BroadcastTransferEngine)
