"""A frozen base in the 8 bits of its checkpoint: each linear map makes its weight when it computes.

A map's weight is a buffer of values and one of scales (``bridges/scaled.py``), and its parameter, by which adapters,
checkpoints and exports know it, has shape and dtype but no memory. While the map's ``forward`` runs, the dequantised
weight stands in the parameter's place; what autograd would keep of it for the backward pass is made again there
(``torch.autograd.graph.saved_tensors_hooks``), so that one layer's weights exist at a time. Whose layers they are
(ours, Megatron's, Transformer Engine's) does not matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from bridges.quantized import ScaledMatrix

VALUES, SCALES = "_values", "_scales"


@dataclass(slots=True)
class ScaledWeight:
    """Where a parameter's values and scales are: in buffers of its module, which move to other devices."""

    module: torch.nn.Module
    name: str
    columns: int
    first: int
    dtype: torch.dtype

    def matrix(self) -> ScaledMatrix:
        """Return the weight as it is kept: [out, in], or [experts, out, in]."""
        values, scales = (self.module.get_buffer(self.name + end) for end in (VALUES, SCALES))
        return ScaledMatrix(values, scales, self.columns, self.first)

    def dequantized(self) -> Tensor:
        """Return the weight in the dtype of its parameter."""
        return self.matrix().dequantized(self.dtype)

    def part(self, rows: slice, columns: slice, expert: int | None = None) -> Tensor:
        """Return rows and columns of the weight (of one of its experts)."""
        place = rows if expert is None else (expert, rows)
        return self.matrix().rows(lambda tensor: tensor[place]).dequantized(self.dtype)[:, columns]


def scaled_weight(parameter: Tensor) -> ScaledWeight | None:
    """Return where a parameter of 8 bits is kept; None for one that is what it says."""
    found: ScaledWeight | None = getattr(parameter, "scaled_weight", None)
    return found


def weight_data(parameter: Tensor) -> Tensor:
    """Return a parameter's values: its data, or made of 8 bits."""
    scaled = scaled_weight(parameter)
    return parameter.data if scaled is None else scaled.dequantized()


def keep_scaled(module: torch.nn.Module, name: str, matrix: ScaledMatrix) -> None:
    """Keep ``matrix`` as the parameter ``name`` of ``module``, which is frozen from now on."""
    parameter: Any = module.get_parameter(name)
    assert matrix.values.shape == parameter.shape, (name, matrix.values.shape, parameter.shape)
    for end, tensor in ((VALUES, matrix.values), (SCALES, matrix.scales)):
        module.register_buffer(name + end, tensor.to(parameter.device, copy=True), persistent=False)
    parameter.requires_grad_(False)
    parameter.data = without_memory(parameter)
    parameter.scaled_weight = ScaledWeight(module, name, matrix.columns, matrix.first, parameter.dtype)
    if "forward" not in vars(module):
        module.forward = _Forward(module, module.forward)


def without_memory(like: Tensor) -> Tensor:
    """Return a tensor like another whose entries are one in memory, and no number: whoever reads it sees that."""
    return like.new_full((), torch.nan).expand(like.shape)


class _Forward:
    """A map's ``forward``, with its weights for as long as it runs."""

    def __init__(self, module: torch.nn.Module, plain: Callable[..., Any]) -> None:
        self.module, self.plain = module, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = {name: p for name, p in self.module._parameters.items() if p is not None and scaled_weight(p)}
        made = {name: weight_data(parameter) for name, parameter in own.items()}
        of_storage = {tensor.untyped_storage()._cdata: own[name] for name, tensor in made.items()}

        def pack(kept: Tensor) -> Tensor | _Again:
            parameter = of_storage.get(kept.untyped_storage()._cdata)
            if parameter is None:
                return kept
            return _Again(parameter, tuple(kept.shape), kept.stride(), int(kept.storage_offset()))

        parameters: dict[str, Any] = self.module._parameters
        parameters.update(made)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                return self.plain(*args, **kwargs)
        finally:
            parameters.update(own)


@dataclass(frozen=True, slots=True)
class _Again:
    """What autograd keeps in place of a view of a weight that was made."""

    parameter: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _unpack(kept: Tensor | _Again) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return weight_data(kept.parameter).as_strided(kept.shape, kept.stride, kept.offset)


def scaled_buffers(chunk: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the values and scales of a chunk's weights."""
    for parameter in chunk.parameters():
        if scaled := scaled_weight(parameter):
            matrix = scaled.matrix()
            yield from (matrix.values, matrix.scales)


@contextlib.contextmanager
def built_without_memory() -> Iterator[None]:
    """Let modules that are made meanwhile have matrices without memory: a model larger than the device can be built,
    and be filled by :func:`keep_scaled` and :func:`give_memory`."""

    def replace(module: torch.nn.Module, name: str, parameter: Any) -> torch.nn.Parameter | None:
        if parameter is None or not name.startswith("weight") or parameter.dim() < 2:
            return None
        return torch.nn.Parameter(without_memory(parameter), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def give_memory(parameter: torch.nn.Parameter) -> None:
    """Give memory to a parameter that was built without."""
    if parameter.dim() and not any(parameter.stride()):
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
