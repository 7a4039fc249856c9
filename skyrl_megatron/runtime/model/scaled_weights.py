"""Keep a frozen base model in the 8 bits of its checkpoint; linear layers dequantise their weights when they run.

A layer's weight is a buffer of values and a buffer of scales (:class:`bridges.quantized.ScaledMatrix`). Its parameter
is still the handle of adapters, checkpoints and exports; it has shape and dtype, but no memory. During ``forward`` the
dequantised weight replaces the parameter. Autograd does not save it: the backward pass dequantises it again
(``torch.autograd.graph.saved_tensors_hooks``), so only one layer's weights exist at a time. This works for our layers,
Megatron's and Transformer Engine's.
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
    """An 8-bit parameter. Its values and scales are buffers of ``module``, so they move with the module."""

    module: torch.nn.Module
    name: str
    columns: int
    first: int
    dtype: torch.dtype

    def matrix(self) -> ScaledMatrix:
        """Return the quantised weight: [out, in], or [experts, out, in]."""
        values, scales = (self.module.get_buffer(self.name + end) for end in (VALUES, SCALES))
        return ScaledMatrix(values, scales, self.columns, self.first)

    def dequantized(self) -> Tensor:
        """Return the weight, [out, in] or [experts, out, in], in the dtype of its parameter."""
        return self.matrix().dequantized(self.dtype)

    def part(self, rows: slice, columns: slice, expert: int | None = None) -> Tensor:
        """Return dequantised rows and columns of the weight, or of one expert's weight: [rows, columns]."""
        index = rows if expert is None else (expert, rows)
        return self.matrix().rows(lambda tensor: tensor[index]).dequantized(self.dtype)[:, columns]


def scaled_weight(parameter: Tensor) -> ScaledWeight | None:
    """Return the :class:`ScaledWeight` of an 8-bit parameter […]; None for any other parameter."""
    found: ScaledWeight | None = getattr(parameter, "scaled_weight", None)
    return found


def weight_data(parameter: Tensor) -> Tensor:
    """Return a parameter's data, […] in its dtype, dequantised if it is kept in 8 bits."""
    scaled = scaled_weight(parameter)
    return parameter.data if scaled is None else scaled.dequantized()


def keep_scaled(module: torch.nn.Module, name: str, matrix: ScaledMatrix) -> None:
    """Store ``matrix`` as the parameter ``name`` of ``module``, and freeze the parameter."""
    parameter: Any = module.get_parameter(name)
    assert matrix.values.shape == parameter.shape, (name, matrix.values.shape, parameter.shape)
    for end, tensor in ((VALUES, matrix.values), (SCALES, matrix.scales)):
        # not persistent: checkpoints of a frozen base would otherwise store it
        module.register_buffer(name + end, tensor.to(parameter.device, copy=True), persistent=False)
    parameter.requires_grad_(False)
    # the handle stays: adapters, exports and checkpoints find the weight by its parameter
    parameter.data = without_memory(parameter)
    parameter.scaled_weight = ScaledWeight(module, name, matrix.columns, matrix.first, parameter.dtype)
    # once per module, which may have several such weights
    if "forward" not in vars(module):
        module.forward = _Forward(module, module.forward)


def without_memory(like: Tensor) -> Tensor:
    """Return a tensor […] of the same shape whose entries all share one NaN, so that an accidental read is visible."""
    return like.new_full((), torch.nan).expand(like.shape)


class _Forward:
    """Runs a layer's ``forward`` with dequantised weights."""

    def __init__(self, module: torch.nn.Module, plain: Callable[..., Any]) -> None:
        self.module, self.plain = module, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scaled_parameters = {
            name: p for name, p in self.module._parameters.items() if p is not None and scaled_weight(p)
        }
        dequantized = {name: weight_data(parameter) for name, parameter in scaled_parameters.items()}
        # by storage: autograd saves views of it, a transposed one for example
        of_storage = {tensor.untyped_storage()._cdata: scaled_parameters[name] for name, tensor in dequantized.items()}

        def pack(saved: Tensor) -> Tensor | _SavedView:
            parameter = of_storage.get(saved.untyped_storage()._cdata)
            if parameter is None:
                return saved
            return _SavedView(parameter, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

        parameters: dict[str, Any] = self.module._parameters
        parameters.update(dequantized)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                return self.plain(*args, **kwargs)
        finally:
            # also after an error: the module must never be left with weights that have memory
            parameters.update(scaled_parameters)


@dataclass(frozen=True, slots=True)
class _SavedView:
    """Saved by autograd in place of a view of a dequantised weight."""

    parameter: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _unpack(saved: Tensor | _SavedView) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return weight_data(saved.parameter).as_strided(saved.shape, saved.stride, saved.offset)


def scaled_buffers(chunk: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the values [out, in] and scales of a chunk's weights; experts are a leading axis."""
    for parameter in chunk.parameters():
        if scaled := scaled_weight(parameter):
            matrix = scaled.matrix()
            yield from (matrix.values, matrix.scales)


@contextlib.contextmanager
def built_without_memory() -> Iterator[None]:
    """Build modules with weight matrices that have no memory while the context is active.

    A model larger than the device can then be built; :func:`keep_scaled` and :func:`give_memory` fill it.
    """

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
    """Allocate memory for a parameter that was built without."""
    # stride 0 in all dimensions marks what without_memory made
    if parameter.dim() and not any(parameter.stride()):
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
