"""The training loops. The trainers are loaded on first use: they bring Ray and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_megatron.trainer.ppo import FullyAsyncRayPPOTrainer, RayPPOTrainer

__all__ = ["FullyAsyncRayPPOTrainer", "RayPPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyrl_megatron.trainer import ppo

    return getattr(ppo, name)
