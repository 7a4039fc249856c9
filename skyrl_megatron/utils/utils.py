"""Names for scripts written for SkyRL that import them from ``utils.utils``; nothing lives here."""

from typing import Any

from skyrl_megatron import utils


def __getattr__(name: str) -> Any:
    return getattr(utils, name)
