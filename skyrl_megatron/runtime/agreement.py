"""Failing together: one rank's problem becomes the same error on every rank, and none waits for one that gave up."""

from __future__ import annotations

import torch.distributed as dist

from skyrl_megatron.errors import SkyRLMegatronError


def raise_together(error: type[SkyRLMegatronError], problem: str | None) -> None:
    """Raise ``error`` on every rank when any rank has a ``problem``; collective over all ranks.

    The message is that of the lowest rank with a problem, preceded by its number unless all ranks have one.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [(rank, text) for rank, text in enumerate(problems) if text]
    if found:
        rank, text = found[0]
        raise error(text if len(found) == len(problems) else f"rank {rank}: {text}")
