"""A run that repeats another: whether there is what it will be trained on."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_megatron.config.rules.fully_async import runs_ahead
from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import CheckpointError, ConfigError, JournalError, Problem


def replay(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield why the rollouts of ``trainer.fully_async.replay_from`` cannot be trained on from where the run begins."""
    folder = run.cfg.trainer.fully_async.replay_from
    if not (folder and run.training and runs_ahead(run.cfg)):
        return
    from skyrl_megatron.trainer.checkpoints import resumed_step  # these need torch, and few runs replay
    from skyrl_megatron.trainer.stream.replay import KEY, ReplayedRollouts

    try:
        recorded = ReplayedRollouts(run.cfg, lambda number: {})
        try:
            recorded.check(resumed_step(run.cfg))
        finally:
            recorded.store.close()
    except ConfigError as error:
        yield from error.problems
    except (CheckpointError, JournalError) as error:
        yield Problem(KEY, folder, str(error))
