"""Command lines, and the experiment that they run."""

import skyrl_megatron.workers as _before_ray  # noqa: F401 - chooses token and address before Ray is imported anywhere
