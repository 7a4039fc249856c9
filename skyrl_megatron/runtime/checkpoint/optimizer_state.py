"""What a rank's optimizer holds, parameter by parameter, and its step count.

Megatron's own ``sharded_state_dict`` gathers whole buffers of the distributed optimizer on every rank. Here each rank
sees its own flat ranges in place: nothing is gathered, nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint import fused_adam

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


@dataclass(slots=True)
class OwnedRange:
    """Elements ``[start, stop)`` of a flattened parameter, which this rank's optimizer updates.

    ``tensors``: name → flat tensor of ``stop - start`` elements: ``param`` (fp32 master weight) and the moments.
    ``put_back`` is None when they are the optimizer's own memory, else a function that stores changed ones.
    """

    parameter: torch.Tensor
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    sharded: bool
    """True when the ranks of the data-parallel group own different ranges; False when each holds the whole."""
    put_back: Callable[[dict[str, torch.Tensor]], None] | None = None


def parts(optimizer: MegatronOptimizer | None) -> list[Any]:
    """Return the optimizers of a rank: one for dense and one for expert parameters, where both exist."""
    if optimizer is None:
        return []
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def owned_ranges(optimizer: MegatronOptimizer | None) -> Iterator[OwnedRange]:
    """Yield every range of this rank. Moments that do not exist before the first step are made, as zeros."""
    for part in parts(optimizer):
        if part.config.fp16:
            raise CheckpointError("fp16 with a loss scaler is not checkpointed; train in bf16 or fp32")
        _make_state(part)
        if hasattr(part, "gbuf_ranges"):
            yield from _distributed(part)
        else:
            yield from _replicated(part)


def make_state(optimizer: MegatronOptimizer | None) -> None:
    """Make moments that do not exist before the first step, as zeros."""
    for part in parts(optimizer):
        _make_state(part)


def sharded_parameters(optimizer: MegatronOptimizer | None) -> set[int]:
    """Return ``id`` of every parameter whose optimizer state is spread over the data-parallel group."""
    found: set[int] = set()
    for part in parts(optimizer):
        for buffer in getattr(part, "buffers", []):
            found.update(id(parameter) for parameter in buffer.param_index_map)
    return found


def _distributed(part: Any) -> Iterator[OwnedRange]:
    """Yield ranges of megatron/core/optimizer/distrib_optimizer.py, in its order."""
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    place, put_back = ranges["param"], None
                    if _is_fused(part):
                        group, order = part.model_param_group_index_map[parameter]
                        shard = part.optimizer.param_groups[group]["params"][order]
                        tensors = fused_adam.stored(part.optimizer, shard)
                        put_back = functools.partial(fused_adam.put_back, part.optimizer, shard)
                    else:
                        tensors = part._get_main_param_and_optimizer_states(parameter)
                        for repeated in ("step", "master_param"):  # HybridDeviceOptimizer's is the same again
                            tensors.pop(repeated, None)
                    flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
                    yield OwnedRange(parameter, place.start, place.end, flat, True, put_back)


def _replicated(part: Any) -> Iterator[OwnedRange]:
    """Yield parameters of an optimizer that is not distributed: each data-parallel rank holds the whole state."""
    for parameter, main in _main_parameters(part):
        state = part.optimizer.state[main]
        moments = {name: value for name, value in state.items() if torch.is_tensor(value) and name != "step"}
        tensors = {"param": main} | moments
        flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
        yield OwnedRange(parameter, 0, parameter.numel(), flat, False)


def _main_parameters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(model parameter, the tensor that the optimizer updates)."""
    if hasattr(part, "float16_groups"):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(models, mains, strict=True)
        for group in part.fp32_from_fp32_groups:
            yield from zip(group, group, strict=True)
    else:
        for group in part.optimizer.param_groups:
            yield from zip(group["params"], group["params"], strict=True)


def _make_state(part: Any) -> None:
    """Zero moments for an optimizer that has not stepped. torch's Adam takes a state as complete when it is not
    empty, so it gets its step count too."""
    state = part.optimizer.state
    if all(state[p] for group in part.optimizer.param_groups for p in group["params"]):
        return
    if _is_hybrid(
        part
    ):  # has no init_state_fn (optimizer/__init__.py); its state mirrors that of the optimizers inside
        for inner in part.optimizer.sub_optimizers:
            _make_moments(inner)
        part.optimizer._sync_sub_optimizers_state_to_hdo()
    elif _is_fused(part):
        fused_adam.make_state(part.optimizer)
    else:
        part.init_state_fn(part.optimizer, part.config)
    for inner in _stepping(part):
        if _counts_per_parameter(inner):
            for p in _parameters(inner):
                inner.state[p].setdefault("step", torch.tensor(0.0, dtype=torch.float32))


def _make_moments(inner: torch.optim.Optimizer) -> None:
    for p in _parameters(inner):
        if not inner.state[p]:
            inner.state[p] |= {name: torch.zeros_like(p.data) for name in ("exp_avg", "exp_avg_sq")}


def _parameters(inner: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in inner.param_groups:
        yield from group["params"]


def _is_hybrid(part: Any) -> bool:
    """Tell whether it is Megatron's HybridDeviceOptimizer (``optimizer_cpu_offload``)."""
    return hasattr(part.optimizer, "sub_optimizers")


def _is_fused(part: Any) -> bool:
    """Tell whether it is Transformer Engine's precision-aware Adam (``use_precision_aware_optimizer``)."""
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and not _is_hybrid(part)


def _stepping(part: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that count steps: those inside a hybrid one, whose own groups count none."""
    return list(part.optimizer.sub_optimizers) if _is_hybrid(part) else [part.optimizer]


def _counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """torch's Adam keeps a step per parameter; Transformer Engine's and Apex's keep one per group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def step_count(optimizer: MegatronOptimizer | None) -> int | None:
    """Optimizer steps taken; None when this rank holds no part of the optimizer. Raises CheckpointError when the
    counts of its parameters differ."""
    counts: set[int] = set()
    for inner in (inner for part in parts(optimizer) for inner in _stepping(part)):
        if _counts_per_parameter(inner):
            counts.update(int(inner.state[p]["step"]) for p in _parameters(inner))
        else:
            counts.update(int(group.get("step", 0)) for group in inner.param_groups if group["params"])
    if len(counts) > 1:
        raise CheckpointError(f"the optimizer's parameters have taken different numbers of steps: {sorted(counts)}")
    return counts.pop() if counts else None


def set_step_count(optimizer: MegatronOptimizer | None, count: int) -> None:
    """Set the count everywhere. torch's Adam gets a tensor of its own per parameter: one shared tensor would be
    counted up once per parameter, and every bias correction after it would be wrong."""
    for inner in (inner for part in parts(optimizer) for inner in _stepping(part)):
        if _counts_per_parameter(inner):
            for p in _parameters(inner):
                inner.state[p]["step"] = torch.tensor(float(count), dtype=torch.float32)
        else:
            for group in inner.param_groups:
                group["step"] = count


@torch.no_grad()
def finish_load(optimizer: MegatronOptimizer | None) -> None:
    """Let a hybrid optimizer's copies on the host follow the masters that were loaded. Where it is precision-aware,
    the copies are the masters and were filled themselves."""
    for part in parts(optimizer):
        if _is_hybrid(part):
            for main, inner in part.optimizer.param_to_inner_param.items():
                if inner is not main and inner.dtype == main.dtype:
                    inner.copy_(main)
