"""The training loop. ``RayPPOTrainer`` is loaded on first use: it brings Ray and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_megatron.trainer.ppo import RayPPOTrainer

__all__ = ["RayPPOTrainer"]


def __getattr__(name: str) -> Any:
    if name == "RayPPOTrainer":
        from skyrl_megatron.trainer.ppo import RayPPOTrainer

        return RayPPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
