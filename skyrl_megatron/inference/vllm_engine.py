"""One real vLLM engine behind :class:`~skyrl_megatron.inference.protocol.InferenceEngine`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_megatron import device
from skyrl_megatron.errors import EngineError
from skyrl_megatron.inference.protocol import Generation, PauseMode


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is started with."""

    model: str
    """HF folder."""
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    """Memory of the KV cache. Must be set on CPU, where vLLM's default takes 92 % of the machine's memory."""
    gpu_memory_utilization: float = 0.8
    enforce_eager: bool = True
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of vLLM's engine arguments, applied last."""


class VLLMEngine:
    """AsyncLLM with sampled-token log-probs after temperature, and weights updated by our transfer backend."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._llm: Any = None

    async def start(self) -> None:
        """Start vLLM's processes and load the model. Raises EngineError naming what is missing."""
        settings = self.settings
        if not (Path(settings.model) / "config.json").is_file():
            raise EngineError(f"{settings.model}: no config.json there; give a HF folder as the engine's model")
        if settings.kv_cache_bytes is None and not device.has_cuda():
            raise EngineError("an engine on CPU needs an explicit KV cache size: set kv_cache_bytes")
        from skyrl_megatron.weight_sync import vllm_compat

        os.environ.update(vllm_compat.worker_environment())
        arguments: dict[str, Any] = {
            "model": settings.model,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "dtype": settings.dtype,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "enforce_eager": settings.enforce_eager,
            "seed": settings.seed,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": vllm_compat.WORKER_EXTENSION,
            "weight_transfer_config": {"backend": vllm_compat.BACKEND},
            "disable_log_stats": True,
        }
        if settings.kv_cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes
        else:
            arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
        if not device.has_cuda():
            arguments["distributed_executor_backend"] = "mp"
        try:
            self._llm = vllm_compat.AsyncLLM.from_engine_args(
                vllm_compat.AsyncEngineArgs(**(arguments | dict(settings.extra)))
            )
        except Exception as error:
            raise EngineError(f"vLLM did not start on {settings.model}: {error}") from error

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any]
    ) -> Generation:
        """See the protocol. Raises EngineError for prompts or sampling keys that vLLM refuses."""
        from skyrl_megatron.weight_sync import vllm_compat

        try:
            parameters = vllm_compat.SamplingParams(
                **{**sampling, "logprobs": 0}, output_kind=vllm_compat.RequestOutputKind.FINAL_ONLY
            )
            prompt = vllm_compat.TokensPrompt(prompt_token_ids=list(prompt_token_ids))
            final = None
            async for output in self._llm.generate(prompt, parameters, request_id):
                final = output
        except (ValueError, TypeError, vllm_compat.VLLMValidationError) as error:
            raise EngineError(f"request {request_id}: {error}") from error
        if final is None:
            raise EngineError(f"request {request_id}: the engine returned nothing")
        sample = final.outputs[0]
        ids = list(sample.token_ids)
        return Generation(
            token_ids=ids,
            logprobs=[position[token].logprob for token, position in zip(ids, sample.logprobs or [], strict=True)],
            finish_reason=sample.finish_reason or "abort",
            versions=[(span.version, span.start, span.end) for span in sample.weight_versions or []],
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See the protocol."""
        from skyrl_megatron.weight_sync import vllm_compat

        parameters = vllm_compat.SamplingParams(
            max_tokens=1, prompt_logprobs=0, output_kind=vllm_compat.RequestOutputKind.FINAL_ONLY
        )
        prompt = vllm_compat.TokensPrompt(prompt_token_ids=list(token_ids))
        final = None
        async for output in self._llm.generate(prompt, parameters, f"score-{uuid.uuid4().hex}"):
            final = output
        assert final is not None and final.prompt_logprobs is not None
        return [
            position[token].logprob for token, position in zip(token_ids[1:], final.prompt_logprobs[1:], strict=True)
        ]

    async def abort(self, request_id: str) -> None:
        """See the protocol."""
        await self._llm.abort(request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See the protocol. Keeps the KV cache of frozen requests."""
        await self._llm.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        """See the protocol."""
        await self._llm.resume_generation()

    async def connect_weights(self, senders: Sequence[tuple[str, int]], rank_offset: int, world_size: int) -> None:
        """See the protocol."""
        from skyrl_megatron.weight_sync import vllm_compat

        info = {"senders": [list(s) for s in senders], "rank_offset": rank_offset, "world_size": world_size}
        await self._llm.init_weight_transfer_engine(vllm_compat.WeightTransferInitRequest(init_info=info))

    async def update_weights(self, metadata: Sequence[Sequence[tuple[str, str, Sequence[int]]]], version: str) -> None:
        """See the protocol. The prefix cache is reset: it holds keys and values of the old weights."""
        from skyrl_megatron.weight_sync import vllm_compat

        await self._llm.start_weight_update()
        info = {"senders": [[[n, d, list(s)] for n, d, s in sender] for sender in metadata]}
        await self._llm.update_weights(vllm_compat.WeightTransferUpdateRequest(update_info=info))
        await self._llm.finish_weight_update(version)
        await self._llm.reset_prefix_cache()

    async def weight_checksums(self) -> list[list[list[int]]]:
        """See the protocol."""
        checksums: list[list[list[int]]] = await self._llm.collective_rpc("skyrl_checksums")
        return checksums

    async def version(self) -> str:
        """See the protocol."""
        return str(await self._llm.get_weight_version())

    async def shutdown(self) -> None:
        """See the protocol."""
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None
