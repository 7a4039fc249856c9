"""Run Megatron-Core without CUDA: CPU GEMMs, linear layers, and patches of the code that requires a GPU.

On a CPU with AVX-512, large fp32 GEMMs use oneDNN: MKL, torch's default, uses AVX-512 on Intel processors only (AMD
Zen 5 core: 240 against 105 GFLOP/s). Without AVX-512, MKL is faster (Zen 3 core: up to 2x for 10 to 2,400 MFLOP).

``parallel_state.initialize`` calls :func:`install`, which does nothing on a machine with CUDA. :func:`installed` is a
context manager that removes the patches at its end. A patch replaces an attribute of a module. It is not a
``TorchFunctionMode``, because a mode costs a microsecond per operation and does not cover the backward pass, where
Megatron's own autograd functions also allocate.

The patches, with the files below ``megatron/core/`` that need them:

- tensors made with ``device="cuda"`` or ``torch.cuda.current_device()``: tensor_parallel/{layers,mappings}.py,
  pipeline_parallel/{schedules,p2p_communication}.py, optimizer/{optimizer,clip_grads,grad_scaler}.py,
  distributed/param_and_grad_buffer.py, transformer/utils.py
- ``pin_memory=True``, ``Tensor.pin_memory``: models/common/embeddings/rope_utils.py, optimizer/cpu_offloading
- ``Tensor.cuda``, ``Tensor.to("cuda")``: models/common/language_module/language_module.py, optimizer/*.py
- streams and events: transformer/moe/token_dispatcher.py, distributed/*.py, pipeline_parallel/*.py
- random state: tensor_parallel/random.py
- ``Tensor.type() == "torch.cuda.FloatTensor"``: optimizer/{clip_grads,optimizer,distrib_optimizer}.py
- GEMMs of linear layers, by a faster library: tensor_parallel/layers.py
- split sizes left on the device: transformer/moe/token_dispatcher.py
- gathering and scattering unequal shards, which gloo cannot: tensor_parallel/mappings.py (etp > 1 with ep > 1)
- ``torch.compile`` of small functions: fusions/*.py, activations.py, transformer/moe/router.py (runs without a C++
  compiler)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.nn import functional as F
from torch.utils._device import _device_constructors

from skyrl_megatron import device
from skyrl_megatron.algorithms import exact_ops

_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
)
# Two packs rarely have the same number of tokens. With the default cache of 1,024 kernels in oneDNN and in torch, the
# memory of a rank grows by 20 MB per step. Both read these variables at the first GEMM.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # setdefault: a user's own limit wins
    os.environ.setdefault(_variable, "64")
_WORTHWHILE = 1e8
"""Minimum FLOPs of a GEMM for oneDNN. oneDNN compiles a kernel for each new shape, which takes a millisecond, and an
expert rarely gets the same number of tokens twice."""


def gemm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x @ weightᵀ: [n, k] × [m, k] → [n, m], any strides, into ``out`` if given. Not differentiable: for
    autograd functions."""
    if (
        _ONEDNN
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * weight.shape[0] > _WORTHWHILE / 2
    ):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        # oneDNN's operator allocates its output; the copy is small against a GEMM of this size
        return result if out is None else out.copy_(result)
    return torch.mm(x, weight.t(), out=out)


def _forward_gemm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute :func:`gemm` in a forward pass, as the engine does with ``trainer.exact_rollouts``."""
    if exact_ops.active():
        result = exact_ops.product(x, weight)
    elif x.is_cuda:  # Megatron's batch-invariant kernels replace aten::mm, but not aten::mm.out
        result = torch.mm(x, weight.t())
    else:
        return gemm(x, weight, out)
    return result if out is None else out.copy_(result)


class _GroupedGemm(torch.autograd.Function):
    """y[rows of expert e] = x[rows of expert e] @ w[e]ᵀ, with one autograd node for all experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        # With a frozen weight the backward pass does not need the input.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.counts = counts
        y = x.new_empty(len(x), weight.shape[1])
        # one by one, because torch has no grouped GEMM on the CPU
        for rows, matrix, out in zip(x.split(counts), weight, y.split(counts), strict=True):
            _forward_gemm(rows, matrix, out)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        shares = grads[0].split(ctx.counts)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = weight.new_empty(len(grads[0]), weight.shape[2])
            for grad, matrix, out in zip(shares, weight, grad_x.split(ctx.counts), strict=True):
                gemm(grad, matrix.t(), out)
        if ctx.needs_input_grad[1]:
            # A GEMM over zero rows gives zeros for an expert without tokens.
            grad_weight = torch.empty_like(weight)
            for grad, rows, out in zip(shares, x.split(ctx.counts), grad_weight, strict=True):
                gemm(grad.t(), rows.t(), out)
        return grad_x, grad_weight, None


def grouped_gemm(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Multiply rows sorted by expert, [n, k], by each expert's matrix, [E, m, k] → [n, m]; differentiable.

    ``tokens_per_expert``: [E], sums to n. In bfloat16 on CUDA this is one ``grouped_mm`` kernel, if strides are
    multiples of 16 bytes; otherwise, and with batch-invariant kernels, one GEMM per expert.
    """
    aligned = (x.shape[1] * x.element_size()) % 16 == 0 and (weight.shape[1] * x.element_size()) % 16 == 0
    if x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.shape[0]:
        from megatron.core.transformer.custom_layers.batch_invariant_kernels import is_batch_invariant_mode_enabled

        # with batch-invariant kernels a row's result must not depend on the number of rows
        if not is_batch_invariant_mode_enabled():
            ends = tokens_per_expert.to(x.device).cumsum(0, dtype=torch.int32)
            return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    # the host waits here for the counts: GEMMs of unequal sizes are launched from it
    result: Tensor = _GroupedGemm.apply(x, weight, tokens_per_expert.tolist())  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """y = x wᵀ + b, where x may be split along its first dimension over tp (sequence parallelism)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        gathered = x
        if sequence_parallel:
            # sequence parallelism: a rank has a tp-th of the tokens, and its columns of the weight need all of
            # them
            gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
            dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        # Megatron gathers the input again in the backward pass to save memory; here it is kept, which saves a
        # collective
        ctx.save_for_backward(gathered if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs no input
        ctx.shape = gathered.shape
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.group = allreduce_dgrad, sequence_parallel, group
        out = _forward_gemm(gathered.flatten(0, -2), weight)
        if bias is not None:
            out += bias
        return out.view(*gathered.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gathered, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = gemm(grad, weight.t()).view(ctx.shape)
            if ctx.allreduce_dgrad:
                dist.all_reduce(grad_x, group=ctx.group)
            elif ctx.sequence_parallel:
                # the gradient of the gather: each rank gets the sum over tp of the rows that it sent
                reduced = grad_x.new_empty(ctx.shape[0] // ctx.group.size(), *ctx.shape[1:])
                dist.reduce_scatter_tensor(reduced, grad_x, group=ctx.group)
                grad_x = reduced
        if needs_weight:
            grad_weight = gemm(grad.t(), gathered.flatten(0, -2).t())
        if needs_bias:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: Any = None,
    wgrad_deferral_limit: Any = None,
    tp_group: dist.ProcessGroup | None = None,
    **_: Any,
) -> Tensor:
    """Replace Megatron's ``linear_with_grad_accumulation_and_async_allreduce``, with the same arguments.

    Also replaces ``linear_with_frozen_weight``, because only the required gradients are computed. ``input``:
    [s, b, in], with sequence parallelism [s / tp, b, in].
    """
    result: Tensor = _Linear.apply(input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group)  # type: ignore[no-untyped-call]
    return result


CPU = torch.device("cpu")
# Functions that Megatron calls with a device or with pin_memory
_MAKERS = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "rand", "randn", "randint"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided"),
)
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")

_saved: list[tuple[Any, str, Any]] = []
_MISSING = object()


def install() -> None:
    """Install the patches for the life of the process. Does nothing with CUDA or when they are installed already."""
    # one set of patches per process: a second call would save patched functions as the originals
    if device.has_cuda() or _saved:
        return
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    # torch.device("meta") as a context and torch.compile look functions up by identity. Fill their tables with the
    # original functions first.
    _device_constructors()
    get_torch_obj_rule_map()
    for name in _MAKERS:
        _replace(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW:
        _replace(Tensor, name, _on_cpu(getattr(Tensor, name)))
    _replace(Tensor, "to", _to_cpu(Tensor.to))
    _replace(Tensor, "type", _type_as_on_cuda(Tensor.type))
    _replace(Tensor, "cuda", lambda self, *args, **kwargs: self)
    _replace(Tensor, "pin_memory", lambda self, *args, **kwargs: self)
    _replace(Tensor, "record_stream", lambda self, stream: None)
    for name, replacement in _CUDA.items():
        _replace(torch.cuda, name, replacement)
    _replace(torch.cuda.random, "get_rng_state", _get_rng_state)
    _replace(random, "_get_cuda_rng_state", _get_rng_state)
    _replace(random, "_set_cuda_rng_state", _set_rng_state)
    _replace(dispatcher, "maybe_move_tensor_to_cpu", _split_sizes)
    for name in ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"):
        _replace(layers, name, linear)
    _replace(mappings, "_gather_along_first_dim", _gather_unequal(mappings._gather_along_first_dim))
    _replace(
        mappings, "_reduce_scatter_along_first_dim", _reduce_scatter_unequal(mappings._reduce_scatter_along_first_dim)
    )
    # Megatron warns if the CPU's state changes where it manages CUDA's; here they are one
    logging.getLogger(random.__name__).addFilter(_expected_rng_change)
    # torch.compile needs a C++ compiler on the CPU, which a machine of a run need not have
    torch.compiler.set_stance("force_eager")


def uninstall() -> None:
    """Remove the patches, newest first."""
    if not _saved:
        return
    # newest first: a name that was replaced twice ends with its first original
    while _saved:
        owner, name, original = _saved.pop()
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    logging.getLogger("megatron.core.tensor_parallel.random").removeFilter(_expected_rng_change)
    torch.compiler.set_stance("default")


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install the patches for the body of a ``with`` statement. Patches installed before it stay."""
    before = bool(_saved)
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _saved.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, replacement)


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``make`` so that a CUDA device becomes the CPU and memory is never pinned."""

    @functools.wraps(make)
    def make_on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        # Megatron calls these functions in every layer: without keywords there is nothing to change
        if kwargs:
            kwargs.pop("pin_memory", None)
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
        return make(*args, **kwargs)

    builtin = _find_builtin(make)
    if builtin is not None:  # torch.jit.script finds torch.zeros and the like by identity
        _register_builtin(make_on_cpu, builtin)
    return make_on_cpu


def _to_cpu(to: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(to)
    def to_on_cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    return to_on_cpu


def _type_as_on_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type()`` so that it returns the CUDA type to Megatron only."""

    @functools.wraps(type_of)
    def type_for_caller(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        is_query = isinstance(result, str) and not args and not kwargs
        # Megatron compares this text to find its fp32 gradients; user code must see the true type
        if is_query and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core."):
            return result.replace("torch.", "torch.cuda.")
        return result

    return type_for_caller


class Event:
    """A CUDA event on the CPU: always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class Stream:
    """A CUDA stream on the CPU. All streams are equal, and entering one has no effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _get_rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return split sizes as numbers, as ``maybe_move_tensor_to_cpu`` does on CUDA: gloo does not take a tensor."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _gather_unequal(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``gather`` so that it pads unequal shards to the longest, gathers them and removes the padding."""

    def gather_unequal(
        local: Tensor, group: dist.ProcessGroup, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(local, group, output_split_sizes, use_global_buffer)
        # gloo's collectives need equal sizes on all ranks
        sizes = [int(size) for size in output_split_sizes]
        padded = local.new_zeros(max(sizes), *local.shape[1:])
        padded[: len(local)] = local
        shards = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(shards, padded, group=group)
        return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])

    return gather_unequal


def _reduce_scatter_unequal(reduce_scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``reduce_scatter`` so that with unequal shards it sums the whole tensor and returns this rank's shard."""

    def reduce_scatter_unequal(
        tensor: Tensor, group: dist.ProcessGroup, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(tensor, group, input_split_sizes, use_global_buffer)
        # summed as a whole: gloo has no reduce_scatter of unequal parts
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        part: Tensor = total.split([int(size) for size in input_split_sizes])[group.rank()]
        return part.clone()

    return reduce_scatter_unequal


def _expected_rng_change(record: logging.LogRecord) -> bool:
    """Drop the warning that the CPU RNG state changed in a CUDA RNG context: without CUDA both are one generator."""
    return "CPU RNG state changed" not in record.getMessage()


def _nothing(*args: object, **kwargs: object) -> None: ...


_CUDA: dict[str, Any] = {
    "current_device": lambda: CPU,
    "set_device": _nothing,
    "synchronize": _nothing,
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "set_stream": _nothing,
    "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
    "Stream": Stream,
    "Event": Event,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": torch.manual_seed,
    "is_current_stream_capturing": lambda: False,
    "memory_allocated": lambda device=None: 0,
}
