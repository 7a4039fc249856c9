"""Features that are still to come, and those that a user's class has no part in."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature

from skyrl_megatron.config.rules.unavailable import require_available
from skyrl_megatron.entrypoints.checks.planned_run import PlannedRun
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.plugins import GENERATORS


def features(run: PlannedRun) -> Iterator[Problem]:
    """Yield every setting of a feature that no code acts on yet, or that the run's generator does not know of."""
    try:
        require_available(run.cfg)
    except ConfigError as error:
        yield from error.problems
    generator, lora = GENERATORS.find(run.cfg.generator.name), run.cfg.trainer.policy.model.lora
    if generator is not None and len(lora.adapters) > 1:
        options = signature(generator).parameters
        if "adapters" not in options and all(each.kind is not Parameter.VAR_KEYWORD for each in options.values()):
            fix = "takes no adapters=(…), its requests would name none: let its class take them, or train one"
            yield Problem("generator.name", run.cfg.generator.name, fix)
