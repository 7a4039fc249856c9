"""The :class:`~skyrl_megatron.inference.protocol.InferenceEngine` that runs vLLM in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from skyrl_megatron import device
from skyrl_megatron.errors import EngineError, EngineGoneError, RequestError, SkyRLMegatronError, WeightSyncError
from skyrl_megatron.inference.protocol import (
    INITIAL_VERSION,
    Generation,
    InferenceEngine,
    OpenAIAnswer,
    PauseMode,
    SampleRequest,
    WeightMetadata,
)
from skyrl_megatron.inference.sampling_params import WrongType, invalid_request, model_of, typed_tokens
from skyrl_megatron.inference.vllm import processes
from skyrl_megatron.inference.vllm.adapter_versions import AdapterVersion, AdapterVersions
from skyrl_megatron.inference.vllm.processes import child_output, last_errors, unless_stopped
from skyrl_megatron.inference.vllm.requests import (
    call_app,
    generation_of,
    refusals,
    sampling_parameters,
    with_config_keys,
)
from skyrl_megatron.inference.vllm.settings import EngineSettings, hf_config, platform_arguments, worker_environment
from skyrl_megatron.weight_sync.tensors import plain_metadata

__all__ = ["EngineSettings", "VLLMEngine"]

BAD_REQUEST = 400
WITHDRAW_S = 10.0
"""How long an engine may take to abort the requests of a failed batch."""


class VLLMEngine(InferenceEngine):
    """vLLM's AsyncLLM with log-probs at the sampling temperature, and with weight updates over our transfer backend.

    The engine cores and workers are child processes of this one. Their output goes to ``log_file``. With
    ``settings.adapters``, the base weights stay as in the model folder, and updates send adapters.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.log_file = (
            settings.log_file or Path(tempfile.gettempdir()) / f"skyrl-megatron-engine-{uuid.uuid4().hex}.log"
        )
        self._llm: Any = None
        self._processes: list[psutil.Process] = []
        self._others: set[psutil.Process] | None = None
        """While vLLM starts its processes: the child processes that existed before."""
        self._metadata: list[list[list[Any]]] | None = None
        self._openai: Any = None
        self._paused, self._pausing = False, asyncio.Lock()
        slots = settings.adapters
        self._cache_salt: str | None = None
        self._adapters = AdapterVersions(slots.slots, slots.names) if slots else None

    # ------------------------------------------------------------------ start and end
    async def start(self) -> None:
        """Start vLLM's processes and load the model. Raises EngineError with the last errors of the processes."""
        settings = self.settings = await asyncio.to_thread(self.settings.on_this_node)
        folder = await asyncio.to_thread(lambda: settings.folder)  # may download a hub model
        hf = hf_config(folder)
        _require_memory(settings)
        if not device.has_cuda():
            processes.start_server()  # it imports vLLM in parallel with this process
        os.environ.update(worker_environment(exact=settings.exact))
        from skyrl_megatron.inference.vllm import compat
        from skyrl_megatron.weight_sync import vllm_backend

        platform = {name: value for name, value in platform_arguments(hf).items() if name not in settings.extra}
        by_extension = settings.exact and not device.has_cuda()
        arguments = {
            "worker_extension_cls": compat.EXACT_EXTENSION if by_extension else compat.WORKER_EXTENSION,
            "weight_transfer_config": {"backend": vllm_backend.BACKEND},
            **({"additional_config": {compat.EXACT_PARTS: settings.exact_parts}} if by_extension else {}),
        } | (settings.arguments() | platform)

        def launch() -> Any:
            if not device.has_cuda():
                processes.start_server()  # before the children are listed: it does not belong to this engine
            with child_output(self.log_file):
                self._others = set(psutil.Process().children(recursive=True))
                try:
                    args = compat.AsyncEngineArgs(**arguments)
                    loggers = compat.ray_stat_loggers() if settings.ray_prometheus_stats else None
                    return compat.AsyncLLM.from_engine_args(args, stat_loggers=loggers)
                finally:
                    self._processes, self._others = self._started(), None

        try:
            self._llm = await asyncio.wait_for(asyncio.to_thread(launch), settings.start_timeout_s)
            compat.end_calls_with_engine(self._llm)
            await self._llm.update_weight_version(INITIAL_VERSION)
            if settings.return_support:
                await self._llm.collective_rpc("skyrl_return_support")
            if settings.enable_return_routed_experts:
                await self._llm.collective_rpc("skyrl_return_routes")
            if settings.logprobs_at_temperature:
                await self._llm.collective_rpc("skyrl_logprobs_at_temperature")
            if arguments["enforce_eager"] and not device.has_cuda():
                await self._llm.collective_rpc("skyrl_compile_nothing")
        except Exception as error:
            if isinstance(error, TimeoutError):
                error = TimeoutError(f"not ready after start_timeout_s={settings.start_timeout_s:g}")
            errors = self._last_errors(error)
            await self.kill()
            raise EngineError(f"vLLM did not start with {settings.model}: {errors}") from error

    async def shutdown(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
        await self.kill()

    async def kill(self) -> None:
        """Kill the processes, also stopped ones (SIGSTOP) and those that are starting."""
        self._processes = self._processes or self._started()
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, self._processes, 10)
        self._processes = []
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, 0.0)
        if self.settings.log_file is None:
            self.log_file.unlink(missing_ok=True)

    def _started(self) -> list[psutil.Process]:
        """List the processes that vLLM has started so far, oldest first."""
        if self._others is None:
            return []
        started = [each for each in psutil.Process().children(recursive=True) if each not in self._others]
        return sorted(started, key=lambda process: process.create_time())

    def process_ids(self) -> list[int]:
        """List the engine's process ids, cores before their workers."""
        return [process.pid for process in self._processes]

    async def health(self) -> None:
        """Ping the core and every worker. Raises EngineGoneError early if a process is stopped (SIGSTOP)."""

        async def answer() -> None:
            await self._llm.check_health()
            await self._llm.collective_rpc("skyrl_ping")

        with self._alive():
            await unless_stopped(answer(), self._processes)

    # ------------------------------------------------------------------ sampling
    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any], adapter: str = ""
    ) -> Generation:
        """Sample one continuation. Tokens are detokenized only if there are stop strings."""
        parameters = sampling_parameters(request_id, sampling, support=self.settings.return_support)
        final, held = await self._finished(request_id, prompt_token_ids, parameters, adapter)
        return generation_of(final, self._version_of(held))

    async def generate_batch(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Sample all requests. The scheduler is paused while they are admitted."""
        from skyrl_megatron.inference.vllm import compat

        support = self.settings.return_support
        prepared = [(r, sampling_parameters(r.request_id, r.sampling, support=support)) for r in requests]
        admitted: list[Any] = []
        with self._alive(), contextlib.ExitStack() as using:
            adapters = [using.enter_context(self._use(request.request_id, request.adapter)) for request in requests]
            try:
                async with self._pausing:
                    if not self._paused:  # else the first step would run with the requests that are admitted so far
                        await compat.pause(self._llm, "keep")
                    for (request, parameters), held in zip(prepared, adapters, strict=True):
                        prompt = self._prompt(request.request_id, request.prompt_token_ids)
                        options = compat.adapter_option(held)
                        with refusals(request.request_id):
                            queue = await self._llm.add_request(request.request_id, prompt, parameters, **options)
                            admitted.append(queue)
                    if not self._paused:
                        await self._llm.resume_generation()
                finals = [await queue.get() for queue in admitted]
            except BaseException:
                with contextlib.suppress(Exception):  # the engine may be dead
                    async with asyncio.timeout(WITHDRAW_S):
                        await self._llm.abort([request.request_id for request, _ in prepared[: len(admitted)]])
                        if not self._paused:
                            await self._llm.resume_generation()
                raise
        # The requests of an adapter version that was evicted were aborted: start over with the serving one.
        return [
            await self.generate(r.request_id, r.prompt_token_ids, r.sampling, r.adapter)
            if held is not None and held.evicted
            else generation_of(final, self._version_of(held))
            for r, final, held in zip(requests, finals, adapters, strict=True)
        ]

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> list[float]:
        """Score with the serving weights, or with those of an update that is not published yet."""
        request_id = f"score-{uuid.uuid4().hex}"
        one = {"max_tokens": 1, "prompt_logprobs": 0, "logprobs": None}  # vLLM samples at least one token
        parameters = sampling_parameters(request_id, one, support=self.settings.return_support)
        candidate = self._adapters.candidates.get(self._adapters.named(adapter)) if self._adapters else None
        final, _ = await self._finished(request_id, token_ids, parameters, adapter, candidate)
        scored = zip(token_ids[1:], final.prompt_logprobs[1:], strict=True)
        return [position[token].logprob for token, position in scored]

    async def _finished(
        self,
        request_id: str,
        token_ids: Sequence[int],
        parameters: Any,
        adapter: str,
        candidate: AdapterVersion | None = None,
    ) -> tuple[Any, AdapterVersion | None]:
        """Return vLLM's output of one request and its adapter version. Start over if that version was evicted."""
        from skyrl_megatron.inference.vllm import compat

        while True:
            output = None
            with self._alive(), refusals(request_id), self._use(request_id, adapter) as serving:
                held = candidate or serving
                prompt = self._prompt(request_id, token_ids)
                options = compat.adapter_option(held)
                async for latest in self._llm.generate(prompt, parameters, request_id, **options):
                    output = latest
            if output is None:
                raise EngineGoneError(f"request {request_id}: the engine returned nothing")
            if held is None or not held.evicted:
                return output, held

    def _prompt(self, request_id: str, token_ids: Sequence[int]) -> Any:
        """Return vLLM's prompt object. Raises RequestError for ids outside of the model's vocabulary."""
        from skyrl_megatron.inference.vllm import compat

        try:
            typed = typed_tokens(token_ids, self._llm.model_config.get_vocab_size())
        except WrongType as error:
            raise invalid_request(request_id, error) from error
        return compat.tokens_input(typed, cache_salt=self._cache_salt)

    @contextlib.contextmanager
    def _use(self, request_id: str, adapter: str) -> Iterator[AdapterVersion | None]:
        """Yield the serving version of a request's adapter. Raises RequestError for an unknown adapter."""
        if self._adapters is not None:
            with self._adapters.use(request_id, adapter) as held:
                yield held
        elif adapter:
            raise RequestError(
                f"request {request_id}: adapter {adapter!r} is unknown, the engine has no adapters: leave it out"
            )
        else:
            yield None

    def _version_of(self, held: AdapterVersion | None) -> str | None:
        """Return the version of all tokens of a request; None if weights may change during a request."""
        if self._adapters is None:
            return None
        return INITIAL_VERSION if held is None else held.version

    async def abort(self, request_id: str) -> None:
        with self._alive():
            await self._llm.abort(request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating. Frozen requests keep their KV cache."""
        from skyrl_megatron.inference.vllm import compat

        with self._alive():
            async with self._pausing:
                self._paused = True
                await compat.pause(self._llm, mode)

    async def resume(self) -> None:
        with self._alive():
            async with self._pausing:
                await self._llm.resume_generation()
                self._paused = False

    async def reset_prefix_cache(self) -> None:
        with self._alive():
            await self._llm.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        """Free memory. With adapters the base weights are kept (level 1), because no update sends them."""
        if self.settings.sleep_mode:
            with self._alive():
                await self._llm.sleep(1 if self._adapters else level, mode="keep")

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        if self.settings.sleep_mode:
            with self._alive():
                await self._llm.wake_up(None if tags is None else list(tags))

    async def openai(self, path: str, body: bytes) -> OpenAIAnswer:
        """Answer a request for the served model or for an adapter by name."""
        from skyrl_megatron.inference.vllm import compat

        served = self.settings.served_model_name or self.settings.model
        with self._alive():
            if self._openai is None:
                parser = self.settings.tool_call_parser
                self._openai = await compat.openai_app(self._llm, str(self.settings.folder), served, parser)
            names = self._adapters.names if self._adapters is not None else ("",)
            model = model_of(body) if names != ("",) else served
            adapter = model if model in names else ""
            with self._use("", adapter) as held:
                compat.serve_adapter(self._openai, adapter or served, held)
                rejected = False
                async for piece in call_app(self._openai, path, body):
                    if isinstance(piece, tuple):
                        rejected = piece[0] == BAD_REQUEST
                    yield with_config_keys(piece) if rejected and isinstance(piece, bytes) else piece

    # ------------------------------------------------------------------ weights
    async def worker_count(self) -> int:
        return self.settings.workers

    async def connect_weights(
        self, senders: Sequence[tuple[str, int]], rank_offset: int, world_size: int, **options: Any
    ) -> None:
        from skyrl_megatron.inference.vllm import compat
        from skyrl_megatron.weight_sync.vllm_backend import WeightTransferInitRequest

        self._metadata = None
        info = {"senders": [list(s) for s in senders], "rank_offset": rank_offset, "world_size": world_size} | options
        with self._alive("connect"):
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
            await compat.on_every_worker(self._llm, "skyrl_connected")

    async def weight_targets(self, metadata: Sequence[Any]) -> list[Any] | str:
        from skyrl_megatron.inference.vllm import compat

        with self._alive("connect"):
            (tensors,) = plain_metadata([metadata])
            method = "skyrl_record_targets" if self._adapters is None else "skyrl_record_adapter_targets"
            routes = await compat.on_every_worker(self._llm, method, tensors)
        return next((route for route in routes if isinstance(route, str)), routes)

    async def start_update(self) -> None:
        with self._alive("start"):
            if self._adapters is None:
                await self._llm.start_weight_update()
            else:
                if aborted := self._adapters.free_slots(len(self._adapters.names)):
                    await self._llm.abort(aborted)
                await self._keep_adapters()

    async def receive_weights(self, metadata: WeightMetadata) -> list[list[list[int]]]:
        """Receive and load the tensors. Metadata are sent to the workers only if they changed."""
        plain = plain_metadata(metadata)
        senders = None if plain == self._metadata else plain
        with self._alive("receive"):
            self._metadata = None
            checksums = await (self._load(senders) if self._adapters is None else self._stage(senders))
            self._metadata = plain
        if len(checksums) != self.settings.workers:
            raise WeightSyncError(f"receive: only {len(checksums)} of {self.settings.workers} workers sent checksums")
        return checksums

    async def _load(self, senders: list[list[list[Any]]] | None) -> list[list[list[int]]]:
        from skyrl_megatron.inference.vllm import compat
        from skyrl_megatron.weight_sync.vllm_backend import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"senders": senders}))
        checksums: list[list[list[int]]] = await compat.on_every_worker(self._llm, "skyrl_checksums")
        return checksums

    async def _stage(self, senders: list[list[list[Any]]] | None) -> list[list[list[int]]]:
        """Receive new adapter versions. Raises WeightSyncError for adapters of modules that the engine ignores."""
        from skyrl_megatron.inference.vllm import compat

        results = await compat.on_every_worker(self._llm, "skyrl_stage_adapters", senders)
        unused = set.intersection(*(set(left) for _, left in results))
        if unused:
            assert self.settings.adapters is not None
            raise WeightSyncError(
                f"receive: the engine would ignore the adapters of {len(unused)} modules, such as {min(unused)}: it "
                f"was started with lora_target_modules={','.join(self.settings.adapters.targets)}"
            )
        return [checksums for checksums, _ in results]

    async def finish_update(self, version: str, adapters: Mapping[str, str] | None = None) -> None:
        """Process the loaded weights. New adapter versions can then be scored, and serve after :meth:`set_version`."""
        from skyrl_megatron.inference.vllm import compat

        with self._alive("finish"):
            if self._adapters is None:
                await self._llm.finish_weight_update(version)
                cleared = await self._llm.reset_prefix_cache(reset_running_requests=self.settings.clear_kv_cache)
                if not cleared:  # frozen requests use blocks; a new salt keeps new requests from matching old prefixes
                    self._cache_salt = version
                return
            versions = {self._adapters.names[0]: version} if adapters is None else adapters
            added = {name: self._adapters.add(adapter_version, name) for name, adapter_version in versions.items()}
            numbers = {name: held.number for name, held in added.items()}
            held_by = await compat.on_every_worker(self._llm, "skyrl_activate_adapters", numbers)
            for worker, active in enumerate(held_by):
                if missing := [held.name for held in added.values() if held.number not in active]:
                    raise WeightSyncError(f"finish: adapter {missing[0]} is not active on worker {worker}")

    async def abort_update(self) -> None:
        """Abort an update. With adapters, the serving versions stay."""
        from skyrl_megatron.inference.vllm import compat

        with self._alive("abort"):
            if self._adapters is None:
                await compat.on_every_worker(self._llm, "skyrl_abort_update")
            else:
                self._adapters.leave()
                await self._keep_adapters()

    async def _keep_adapters(self) -> list[list[int]]:
        """Remove adapters from the workers that are not needed any more. Return each worker's active ones."""
        from skyrl_megatron.inference.vllm import compat

        assert self._adapters is not None
        return await compat.on_every_worker(self._llm, "skyrl_keep_adapters", self._adapters.numbers())

    async def version(self) -> str:
        with self._alive():
            return str(await self._llm.get_weight_version())

    async def set_version(self, version: str) -> None:
        with self._alive():
            if self._adapters is not None:
                self._adapters.commit()
            await self._llm.update_weight_version(version)

    # ------------------------------------------------------------------ errors
    @contextlib.contextmanager
    def _alive(self, phase: str | None = None) -> Iterator[None]:
        """Convert vLLM's errors: EngineGoneError with the processes' last errors if the engine lost a process, else
        WeightSyncError in a ``phase`` of a weight update.

        When a worker dies, pending calls raise EngineDeadError or a plain Exception. An error inside a living worker
        is a plain Exception too, so the processes are checked.
        """
        if self._llm is None:
            raise EngineGoneError(f"the engine with {self.settings.model} is not running")
        try:
            yield
        except SkyRLMegatronError:
            raise
        except Exception as error:
            if self._is_down(error):
                errors = self._last_errors(error)
                raise EngineGoneError(f"the engine with {self.settings.model} died: {errors}") from error
            if phase is not None:
                raise WeightSyncError(f"{phase}: {error}") from error
            raise

    def _is_down(self, error: Exception) -> bool:
        from skyrl_megatron.inference.vllm import compat

        killed = self._llm is None
        return killed or isinstance(error, compat.EngineDeadError) or any(map(_has_ended, self._processes))

    def _last_errors(self, error: BaseException) -> str:
        lines = last_errors(self.log_file)
        return "\n  ".join(lines) if lines else f"{type(error).__name__}: {error}"


def _require_memory(settings: EngineSettings) -> None:
    """Raise EngineError if the machine has too little memory for an engine: vLLM would be killed during its start."""
    if device.has_cuda():
        return
    if settings.kv_cache_bytes is None:
        raise EngineError("an engine on CPU needs a KV cache size: set kv_cache_bytes")
    available, needed = psutil.virtual_memory().available, settings.cpu_bytes
    if available < needed:
        raise EngineError(
            f"memory: {available / 2**30:.1f} GiB available, but the engine with {settings.model} needs about "
            f"{needed / 2**30:.1f} GiB (KV cache {settings.kv_cache_bytes / 2**30:.1f} GiB per worker): lower "
            "generator.inference_engine.engine_init_kwargs.kv_cache_memory_bytes, or end other processes"
        )


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
