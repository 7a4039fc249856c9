"""The training loops. The trainers are loaded on first use: they bring Ray and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_megatron.trainer.fully_async import FullyAsyncRayPPOTrainer
    from skyrl_megatron.trainer.ppo import RayPPOTrainer

__all__ = ["FullyAsyncRayPPOTrainer", "RayPPOTrainer"]


def __getattr__(name: str) -> Any:
    if name == "RayPPOTrainer":
        from skyrl_megatron.trainer.ppo import RayPPOTrainer

        return RayPPOTrainer
    if name == "FullyAsyncRayPPOTrainer":
        from skyrl_megatron.trainer.fully_async import FullyAsyncRayPPOTrainer

        return FullyAsyncRayPPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
