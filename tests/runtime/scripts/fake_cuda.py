"""A CUDA device whose tensors have shape, type and place and no contents: torch's FakeTensorMode, with the driver's
answers filled in. An operation on tensors of two devices raises, as it would on a GPU; so does a real tensor of the
host that meets one of the device.

What stands in: numbers that only contents could tell (:class:`Answers`), streams and random states, the autograd
engine, which asks the driver for streams (:func:`backward` calls the same nodes itself), and torch's softmax kernel
for Triton's, which the driver loads (its interpreter runs it in ``triton_softmax.py``).
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.te.meta import HOPPER

CUDA = torch.device("cuda", 0)


class Answers(TorchDispatchMode):
    """Answers what depends on contents: every number is 1; each token of a map [experts, tokens] picks ``topk``."""

    def __init__(self, topk: int) -> None:
        super().__init__()
        self.topk = topk

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.masked_select.default:
            assert args[0].device == args[1].device, "masked_select over two devices"
            return args[0].new_empty(args[1].shape[-1] * self.topk)
        return func(*args, **(kwargs or {}))


class EvenPieces(TorchFunctionMode):
    """Splits by sizes that were counted on the device, and are not known, into pieces of equal size."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.split, Tensor.split) and isinstance(args[1], list | tuple):
            dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", 0)
            whole, pieces = args[0].shape[dim], len(args[1])
            if sum(args[1]) != whole:
                even = [whole // pieces + (place < whole % pieces) for place in range(pieces)]
                args = (args[0], even, *args[2:])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_cuda(topk: int = 1) -> Iterator[FakeTensorMode]:
    """Make this process believe in a Hopper GPU; enter the yielded mode (and :class:`Answers`) to compute on it.

    Outside of the mode, host tensors are real, and ``.to`` the device makes them fake.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    from skyrl_megatron import device
    from skyrl_megatron.runtime import cpu_patches as megatron_patches
    from skyrl_megatron.runtime import logprobs

    get_torch_obj_rule_map()  # torch.compile looks functions up by identity: in a table of the originals
    torch._C._ensureCUDADeviceGuardSet()  # FakeTensorMode does it where there is no GPU
    mode = FakeTensorMode()
    usual_to, usual_move = Tensor.to, token_dispatcher.maybe_move_tensor_to_cpu

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = args[0] if args else kwargs.get("device")
        if getattr(target, "type", None) == "cuda" and type(self) is Tensor:
            self = mode.from_tensor(self)
            with mode:
                return usual_to(self, *args, **kwargs)
        return usual_to(self, *args, **kwargs)

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Split sizes, which would be counted on the device: as if every expert had the same share."""
        if as_numpy and isinstance(tensor, Tensor):
            assert tensor.device == CUDA
            import numpy as np

            return np.full(tensor.shape, move.tokens // tensor.numel())
        return usual_move(tensor, as_numpy, record_stream)

    move.tokens = 0  # type: ignore[attr-defined]
    cuda = megatron_patches._CUDA | {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: HOPPER,
        "get_device_capability": lambda *_: (HOPPER.major, HOPPER.minor),
        "max_memory_allocated": lambda *_: 0,
    }
    places = [(torch.cuda, name, answer) for name, answer in cuda.items()]
    places += [
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0)),
        (random, "_set_cuda_rng_state", _none),
    ]
    places += [(Tensor, "to", to), (Tensor, "record_stream", _none), (Tensor, "pin_memory", lambda x, *_: x)]
    places += [(torch, "get_rng_state", lambda: torch.empty(0)), (torch, "set_rng_state", _none)]
    places += [(torch.nn.Module, "to", _moved), (torch.autograd.Function, "apply", classmethod(_remembered))]
    places += [(token_dispatcher, "maybe_move_tensor_to_cpu", move), (device, "has_cuda", lambda: True)]
    places += [(logprobs, "_triton", _none)]
    with contextlib.ExitStack() as stack:
        for owner, name, value in places:
            stack.callback(setattr, owner, name, inspect.getattr_static(owner, name))
            setattr(owner, name, value)
        torch.compiler.set_stance("force_eager")
        stack.callback(torch.compiler.set_stance, "default")
        mode.moved = move  # type: ignore[attr-defined]
        stack.enter_context(EvenPieces())
        yield mode


def _moved(module: torch.nn.Module, target: torch.device) -> torch.nn.Module:
    """Do what ``Module.to`` does, which takes no fake parameters: give each that is elsewhere a new one."""
    known: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.device != target:
                if id(parameter) not in known:
                    moved = torch.nn.Parameter(parameter.detach().to(target), parameter.requires_grad)
                    moved.__dict__ |= {key: value for key, value in vars(parameter).items() if key not in vars(moved)}
                    known[id(parameter)] = moved
                part._parameters[name] = known[id(parameter)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(target)
    return module


_EDGES = "edges"
_APPLY = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]


def _remembered(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function written in Python; leave with its node which arguments are tensors and have an edge."""
    results = _APPLY(function, *args, **kwargs)
    for result in results if isinstance(results, tuple) else (results,):
        if isinstance(result, Tensor) and isinstance(result.grad_fn, torch.autograd.function.BackwardCFunction):
            result.grad_fn.metadata.setdefault(_EDGES, [isinstance(argument, Tensor) for argument in args])
    return results


def _none(*_: Any, **__: Any) -> None: ...


@torch.no_grad()
def backward(output: Tensor, gradient: Tensor) -> dict[int, Tensor]:
    """Run the backward of ``output`` node by node; return ``id`` of a leaf → its gradient."""
    root = output.grad_fn
    waits: Counter[Any] = Counter()
    seen, stack = {root}, [root]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                waits[following] += 1
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    arrived: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    arrived[root][output.output_nr] = gradient
    leaves: dict[int, Tensor] = {}
    ready = [root]
    while ready:
        node = ready.pop()
        given = arrived.pop(node, {})
        if hasattr(node, "variable"):
            if given:
                assert given[0].device == node.variable.device, node.variable
                leaves[id(node.variable)] = given[0].sum_to_size(node.variable.shape)
            continue
        results: Any = (None,) * len(node.next_functions)
        if given:
            results = _call(node, given)
        for (following, place), result in zip(node.next_functions, results, strict=True):
            if following is None:
                continue
            if result is not None:
                slots = arrived[following]
                slots[place] = slots[place] + result if place in slots else result
            waits[following] -= 1
            if not waits[following]:
                ready.append(following)
    return leaves


def _call(node: Any, given: dict[int, Tensor]) -> tuple[Any, ...]:
    """Call a node as the engine does: gradients that nobody asked for are zeros for functions written in Python."""
    facts = node._input_metadata
    python = isinstance(node, torch.autograd.function.BackwardCFunction)
    arguments = [given.get(place) for place in range(len(facts))]
    if python:
        arguments = [
            torch.zeros(tuple(fact.shape), dtype=fact.dtype, device=fact.device) if value is None else value
            for value, fact in zip(arguments, facts, strict=True)
        ]
    for place, (value, fact) in enumerate(zip(arguments, facts, strict=True)):
        if value is not None:  # the engine, too, sums what was broadcast; a shape that does not fit raises
            assert value.device == fact.device, node
            arguments[place] = value.sum_to_size(tuple(fact.shape)).to(fact.dtype)
    if not python:
        results = node(*arguments)
        return results if isinstance(results, tuple) else (results,)
    results = node.apply(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    edges = node.metadata[_EDGES]
    return tuple(result for result, is_tensor in zip(results, edges, strict=False) if is_tensor)
