"""Names for scripts written for SkyRL that import them from ``config.config``; nothing lives here."""

from skyrl_megatron.config import *  # noqa: F403
