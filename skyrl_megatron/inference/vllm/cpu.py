"""Patches for features that vLLM 0.32 lacks on CPU: delta nets in fp32, temperatures of drafted tokens, experts with
adapters, returned routes, seeds of chunked prompts, and sleep mode.

Returned routes: vLLM stores routes by KV cache block, so that cached prefixes have theirs, and passes them to the
scheduler (vllm/distributed/aux_output_connector). This works with any model runner, but only Model Runner V2 calls it.
Here the CPU's model runner calls it too.

Sleep mode: on GPUs, vLLM frees the pages of its allocator and keeps the addresses (``device_allocator/cumem.py``).
Here a storage is resized to 0 in place and back, so all tensor views stay valid. Weights that oneDNN or a CPU kernel
has packed are copies. They are dropped, and the next weight update packs them again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import LayerNameType
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from skyrl_megatron.runtime.model.delta_rule import chunk_plan, gated_delta_rule, l2_normalize

_stock = gdn_attention.cpu_gdn_attention_core


def compute_delta_nets_in_fp32() -> None:
    """Patch vLLM's delta-net operation to support fp32. Call this before a model is built."""
    gdn_attention.cpu_gdn_attention_core = _core


def _core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    """Compute the gated delta rule into ``core_attn_out`` [tokens, value heads, size].

    ``mixed_qkv``: queries, keys and values [tokens, channels] before the short convolution. ``b``, ``a``: [tokens,
    value heads], learning rate and step.
    """
    if mixed_qkv.dtype == torch.bfloat16:
        _stock(mixed_qkv, b, a, core_attn_out, layer_name)
        return
    context: Any = get_forward_context()
    layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM's memory profiling run
        return
    of = context.attn_metadata[layer.prefix]
    sequences = of.num_decodes + of.num_prefills
    bounds = of.non_spec_query_start_loc[: sequences + 1].tolist()
    lengths = tuple(end - start for start, end in pairwise(bounds))
    slots = of.non_spec_state_indices_tensor[:sequences].long()
    begins_anew = torch.zeros(sequences, dtype=torch.bool)
    if of.num_prefills:
        begins_anew[of.num_decodes :] = ~of.has_initial_state[of.num_decodes : sequences]
    tokens, heads = bounds[-1], core_attn_out.shape[1]
    before = gdn_attention._conv_buffer_view(layer)  # [slots, channels, taps − 1]
    states = gdn_attention._ssm_state_view(layer)  # [slots, value heads, key size, value size]
    before[slots[begins_anew]], states[slots[begins_anew]] = 0, 0
    mixed = _convolved(mixed_qkv[:tokens], before, slots, lengths, gdn_attention._unpacked_conv_weight(layer))
    q, k, v = (x[0] for x in layer.rearrange_mixed_qkv(F.silu(mixed)))
    shape = (q.shape[1], heads // q.shape[1])  # key heads, value heads of each
    step = F.softplus(a[:tokens].float() + layer.dt_bias.float())
    kept = -layer.A_log.float().exp() * step
    out, ends = gated_delta_rule(
        l2_normalize(q),
        l2_normalize(k),
        v.unflatten(1, shape),
        kept.unflatten(1, shape),
        b[:tokens].sigmoid().unflatten(1, shape),
        chunk_plan(lengths, q.device),
        states[slots].unflatten(1, shape),
    )
    states[slots] = ends.flatten(1, 2).to(states.dtype)
    core_attn_out[:tokens] = out.flatten(1, 2)


def _convolved(x: Tensor, before: Tensor, slots: Tensor, lengths: tuple[int, ...], weight: Tensor) -> Tensor:
    """Convolve ``x`` [tokens, channels] along each sequence, continuing after the tokens in its slot of ``before``.

    Updates ``before`` to the last tokens of each sequence.
    """
    results = []
    for slot, part in zip(slots.tolist(), x.split(lengths), strict=True):
        seen = torch.cat([before[slot].to(x.dtype), part.T], dim=1)
        results.append(F.conv1d(seen[None], weight[:, None], groups=len(weight))[0].T)
        before[slot] = seen[:, -before.shape[-1] :]
    return torch.cat(results)


def widen_temperatures_on_cpu() -> None:
    """Patch vLLM to apply each request's sampling parameters to its drafted tokens."""
    rejection_sampler.expand_batch_to_tokens = expand_to_tokens


def expand_to_tokens(
    values: Tensor, ends: Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Repeat each request's value for all of its tokens, [tokens]. ``replace_from`` becomes ``replace_to``.

    ``values``: [requests]. ``ends``: [requests], the cumulative number of tokens.

    >>> expand_to_tokens(torch.tensor([0.5, 0.0]), torch.tensor([1, 3]), 3, 0, 1)
    tensor([0.5000, 1.0000, 1.0000])
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    return replaced.repeat_interleave(counts.long(), output_size=tokens)


def experts_with_tokens(choices: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (expert, its tokens, their index in K). ``choices``: [tokens, K]; −1: the expert is on another rank."""
    flat = choices.flatten()
    order = flat.argsort(stable=True)
    experts, counts = flat[order].unique_consecutive(return_counts=True)
    for expert, places in zip(experts.tolist(), order.split(counts.tolist()), strict=True):
        if expert >= 0:
            yield expert, places // choices.shape[1], places % choices.shape[1]


def choose_experts_with_bias() -> None:
    """Patch vLLM's CPU router to apply the bias of experts without groups, by treating them as one group."""
    original = CPURouter.__init__
    if getattr(original, "sees_bias", False):
        return

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        plain = not self.use_grouped_topk and self.custom_routing_function is None
        if plain and self.e_score_correction_bias is not None and self.scoring_func in ("softmax", "sigmoid"):
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    init.sees_bias = True  # type: ignore[attr-defined]
    CPURouter.__init__ = init


@dataclass(frozen=True, slots=True)
class _Batch:
    """The fields of Model Runner V2's batch that the connector reads."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    num_computed_tokens_np: np.ndarray


def return_routes(runner: Any) -> None:
    """Patch the CPU's model runner to put the routes of each step into its outputs."""
    connector = get_aux_output_connector(runner.model, runner.vllm_config, runner.kv_cache_config)
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    waiting: list[tuple[Any, np.ndarray]] = []

    def execute_and_capture(scheduler_output: Any, *rest: Any, **options: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        answer = execute_model(scheduler_output, *rest, **options)
        if scheduler_output.total_num_scheduled_tokens:
            count = runner.input_batch.num_reqs
            batch = _Batch(
                list(runner.input_batch.req_ids[:count]),
                runner.query_start_loc.np[: count + 1].copy(),
                runner.input_batch.num_computed_tokens_cpu[:count].copy(),
            )
            if (pending := connector.prepare_output(batch)) is not None:
                waiting.append((pending, ~runner.discard_request_mask.np[:count]))
        return answer

    def sample_and_hand_over(*arguments: Any, **options: Any) -> Any:
        answer = sample_tokens(*arguments, **options)
        output = getattr(answer, "_model_runner_output", answer)  # wrapped if scheduling is asynchronous
        if waiting and isinstance(output, ModelRunnerOutput):
            pending, sampled = waiting.pop()
            pending.enqueue_cpu_copy(sampled.astype(np.int64), np.zeros(len(sampled), np.int64))
            output.aux_output_connector_output = pending.process_output()
        return answer

    runner.execute_model, runner.sample_tokens = execute_and_capture, sample_and_hand_over


def allow_routes_on_cpu() -> None:
    """Skip vLLM's check that returned routes need Model Runner V2.

    Its other checks are among the configuration rules of
    ``generator.inference_engine.enable_return_routed_experts``.
    """
    VllmConfig._verify_aux_output_compatibility = lambda self: None


def rewind_seeds_on_cpu() -> None:
    """Patch vLLM to restore random generators after it samples for an unfinished prompt."""
    sample, bookkeeping = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def sample_and_rewind(self: Any, *arguments: Any, **options: Any) -> Any:
        unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        generators = [self.input_batch.generators[row] for row in unfinished if row in self.input_batch.generators]
        states = [generator.get_state() for generator in generators]
        output = sample(self, *arguments, **options)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    def keep_generators(self: Any, *arguments: Any, **options: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeeping(self, *arguments, **options)
        finally:
            self.input_batch.generators = generators

    CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync = sample_and_rewind, keep_generators


WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's sleep tags."""


def sleep_on_cpu() -> None:
    """Patch vLLM to support sleep mode on CPU."""
    CpuPlatform.is_sleep_mode_available = lambda self: True
    CPUWorker.sleep, CPUWorker.wake_up = _sleep, _wake_up


def _sleep(worker: Any, level: int = 1) -> None:
    """Free the KV cache, and with level 2 the weights. Buffers are kept, because no update sends them."""
    asleep: dict[str, list[tuple[torch.UntypedStorage, int]]] = worker.__dict__.setdefault("skyrl_asleep", {})
    parts = {KV_CACHE: _tensors(worker.model_runner.kv_caches)}
    if level > 1:
        model: nn.Module = worker.model_runner.model
        parts[WEIGHTS] = _weights(model, worker.model_config.sleep_preserve_parameter_names)
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = _asleep  # type: ignore[assignment]
    for part, tensors in parts.items():
        if part not in asleep:
            asleep[part] = [(storage, storage.nbytes()) for storage in _storages(tensors)]
            for storage, _ in asleep[part]:
                storage.resize_(0)
    _give_back()


def _wake_up(worker: Any, tags: Sequence[str] | None = None) -> None:
    """Allocate the memory again. The KV cache is zeroed; the next update fills the weights."""
    asleep = worker.__dict__.get("skyrl_asleep", {})
    for part in tags or list(asleep):
        for storage, nbytes in asleep.pop(part, ()):
            storage.resize_(nbytes)
            if part == KV_CACHE:
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _asleep(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    raise RuntimeError("the engine's weights are asleep: sync the weights first")


def _weights(model: nn.Module, kept: Sequence[str]) -> Iterator[Tensor]:
    """Yield the parameters, except those that match a pattern of ``sleep_preserve_parameter_names``."""
    for name, parameter in model.named_parameters():
        if not any(fnmatch(name, pattern) for pattern in kept):
            yield parameter


def _tensors(nested: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists."""
    if isinstance(nested, Tensor):
        yield nested
    else:
        for each in nested:
            yield from _tensors(each)


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yield each resizable storage of the tensors once."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() and storage.resizable():
            seen.add(storage._cdata)
            yield storage


def _give_back() -> None:
    """Let tcmalloc and the C library return free pages to the operating system."""
    library = ctypes.CDLL(None)
    if hasattr(library, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc is preloaded
        library.MallocExtension_ReleaseFreeMemory()
    library.malloc_trim(0)
