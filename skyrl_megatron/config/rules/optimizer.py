"""Rules of Adam's state: where it lies and in which types (megatron/core/optimizer/optimizer_config.py,
transformer_engine/pytorch/optimizers/fused_adam.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.names import OPTIMIZER_DTYPES
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware

_AWARE, _ON_HOST, _SPREAD = "use_precision_aware_optimizer", "optimizer_cpu_offload", "use_distributed_optimizer"
_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
_MASTERS = "main_params_dtype"


def optimizer_problems(
    options: Mapping[str, Any], section: str, hardware: Hardware, *, bf16: bool
) -> Iterator[Problem]:
    """Yield everything wrong with ``optimizer_config_kwargs``, of ``section``. ``bf16``: the weights are."""
    aware, on_host = options.get(_AWARE), options.get(_ON_HOST)
    spread = options.get(_SPREAD, True)
    if on_host and hardware.is_cpu:
        fix = "there is no GPU to keep the optimizer state away from: leave it out"
        yield Problem(f"{section}{_ON_HOST}", on_host, fix)
    elif on_host and spread and not bf16:
        fix = "Megatron cannot split float32 weights that it updates on the host: use trainer.bf16=true"
        yield Problem(f"{section}{_ON_HOST}", on_host, fix)
    if aware and not spread:
        fix = f"its state is split over data-parallel ranks: use {_SPREAD}=true, or leave this out"
        yield Problem(f"{section}{_AWARE}", aware, fix)
    for name, value in options.items():
        if not name.endswith("_dtype"):
            continue
        if wrong := _type_problem(name, value, aware=bool(aware), on_host=bool(on_host)):
            yield Problem(f"{section}{name}", value, wrong)


def _type_problem(name: str, value: object, *, aware: bool, on_host: bool) -> str | None:
    """Return what to do about a field that holds a type; None where it is right."""
    if not isinstance(value, str) or value not in OPTIMIZER_DTYPES:
        return f"is no type: use {', '.join(OPTIMIZER_DTYPES)}"
    if OPTIMIZER_DTYPES[value] == "float32":
        return None
    if name == "main_grads_dtype":
        return "gradients have the type that ddp_config.grad_reduce_in_fp32 gives them: leave it out"
    if name not in (*_MOMENTS, _MASTERS):
        return None
    if on_host:
        return f"is fp32 with {_ON_HOST}: leave one of them out"
    if not aware:
        return f"needs {_AWARE}=true"
    if name == _MASTERS and OPTIMIZER_DTYPES[value] != "float16":
        return "master weights are fp32 or fp16 in Transformer Engine's Adam: leave it out, or use fp16"
    return None
