"""Names of the Hugging Face hub: asked for, pinned to a commit, their small files fetched."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from skyrl_megatron import hub
from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.rules.role_layout import active_roles

if TYPE_CHECKING:
    from skyrl_megatron.entrypoints.checks.planned_run import PlannedRun
    from skyrl_megatron.errors import Problem


def pin_hub_names(run: PlannedRun) -> list[Problem]:
    """Fill ``trainer.hub_commits`` and return a problem for each name that is misspelt or cannot be asked for.

    Before the rules are looked at, which read the models' ``config.json`` from the cache.
    """
    cfg = run.cfg
    derive(cfg)  # the reference's model is the policy's unless it is named
    lists = {"data.train_data": cfg.data.train_data if run.training else [], "data.val_data": cfg.data.val_data}
    asked = [*hub.models(cfg, active_roles(cfg))]
    asked += [each for key, entries in lists.items() for each in hub.data_sets(key, entries)]
    if not asked:
        return []
    from skyrl_megatron.trainer.checkpoints import recorded_hub_commits  # torch, which few need to wait for

    return hub.pin(cfg, asked, recorded_hub_commits(cfg), lambda line: print(line, file=sys.stderr, flush=True))
