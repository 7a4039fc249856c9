"""RL algorithms as tensor functions on [B, T]: advantages, losses, off-policy corrections and loss reduction.

``objective`` combines them for the training engine. ``registry`` holds custom functions. This package does not depend
on processes or devices, except that the registries synchronise over Ray when Ray is initialised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_megatron.algorithms.advantages import register_advantage_estimator
    from skyrl_megatron.algorithms.losses import register_policy_loss

__all__ = ["register_advantage_estimator", "register_policy_loss"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyrl_megatron.algorithms import advantages, losses  # imports torch, which some submodules do not need

    return getattr(losses if name == "register_policy_loss" else advantages, name)
