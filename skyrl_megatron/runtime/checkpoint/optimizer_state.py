"""What a rank's optimizer holds, parameter by parameter, and its step count.

Megatron's own ``sharded_state_dict`` gathers whole buffers of the distributed optimizer on every rank. Here each rank
sees its own flat ranges in place: nothing is gathered, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from skyrl_megatron.errors import CheckpointError

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


def sharded_parameters(optimizer: MegatronOptimizer | None) -> set[int]:
    """Return ``id`` of every parameter whose optimizer state is spread over the data-parallel group."""
    found: set[int] = set()
    for part in parts(optimizer):
        for buffer in getattr(part, "buffers", []):
            found.update(id(parameter) for parameter in buffer.param_index_map)
    return found


def _distributed(part: Any) -> Iterator[OwnedRange]:
    """Yield ranges of megatron/core/optimizer/distrib_optimizer.py, in its order."""
    copies = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8  # states come unscaled to fp32, in new memory
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    place = ranges["param"]
                    tensors = part._get_main_param_and_optimizer_states(parameter)
                    tensors.pop("step", None)
                    flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
                    put_back = _setter(part, parameter) if copies else None
                    yield OwnedRange(parameter, place.start, place.end, flat, True, put_back)


def _setter(part: Any, parameter: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: part._set_main_param_and_optimizer_states(parameter, {"step": None} | tensors)


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
    part.init_state_fn(part.optimizer, part.config)
    if _counts_per_parameter(part):
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                state[p].setdefault("step", torch.tensor(0.0, dtype=torch.float32))


def _counts_per_parameter(part: Any) -> bool:
    """torch's Adam keeps a step per parameter; Transformer Engine's and Apex's keep one per group."""
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def step_count(optimizer: MegatronOptimizer | None) -> int | None:
    """Optimizer steps taken; None when this rank holds no part of the optimizer. Raises CheckpointError when the
    counts of its parameters differ."""
    counts: set[int] = set()
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            if _counts_per_parameter(part):
                counts.update(int(part.optimizer.state[p]["step"]) for p in group["params"])
            elif group["params"]:
                counts.add(int(group.get("step", 0)))
    if len(counts) > 1:
        raise CheckpointError(f"the optimizer's parameters have taken different numbers of steps: {sorted(counts)}")
    return counts.pop() if counts else None


def set_step_count(optimizer: MegatronOptimizer | None, count: int) -> None:
    """Set the count everywhere. torch's Adam gets a tensor of its own per parameter: one shared tensor would be
    counted up once per parameter, and every bias correction after it would be wrong."""
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            if _counts_per_parameter(part):
                for p in group["params"]:
                    part.optimizer.state[p]["step"] = torch.tensor(float(count), dtype=torch.float32)
            else:
                group["step"] = count


def finish_load(optimizer: MegatronOptimizer | None) -> None:
    """Let an optimizer with states on the host take over what was loaded (mcore's HybridDeviceOptimizer)."""
    for part in parts(optimizer):
        sync = getattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers", None)
        if sync is not None:
            sync()
