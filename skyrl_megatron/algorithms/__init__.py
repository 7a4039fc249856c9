"""What is optimised, as tensor maths on [B, T]: advantages, losses, corrections, and how they are averaged.

``objective`` puts it together for the training engine; ``registry`` is where custom functions come in. Nothing here
knows of processes or devices, except that registries travel over Ray when somebody started it.
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
    from skyrl_megatron.algorithms import advantages, losses  # torch, which not every importer of a submodule needs

    return getattr(losses if name == "register_policy_loss" else advantages, name)
