"""Features that are still to come."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_megatron.config.rules.unavailable import require_available
from skyrl_megatron.entrypoints.checks.planned_run import PlannedRun
from skyrl_megatron.errors import ConfigError, Problem


def features(run: PlannedRun) -> Iterator[Problem]:
    """Yield every setting of a feature that no code acts on yet."""
    try:
        require_available(run.cfg)
    except ConfigError as error:
        yield from error.problems
