"""Re-exports for scripts written for SkyRL that import from ``utils.utils``."""

from typing import Any

from skyrl_megatron import utils


def __getattr__(name: str) -> Any:
    return getattr(utils, name)
