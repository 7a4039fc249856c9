"""Re-exports for scripts written for SkyRL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyrl_megatron.checks import validate_cfg

if TYPE_CHECKING:
    from skyrl_megatron.workers.ray_setup import initialize_ray

__all__ = ["initialize_ray", "validate_cfg"]


def __getattr__(name: str) -> Any:
    if name == "initialize_ray":
        from skyrl_megatron.workers.ray_setup import initialize_ray

        return initialize_ray
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
