"""The budget as lines of ``--check``, and as the problems that a run is refused for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_megatron.entrypoints.memory.budget import Budget
from skyrl_megatron.entrypoints.memory.layers import IMBALANCE
from skyrl_megatron.entrypoints.memory.nearest import nearest
from skyrl_megatron.entrypoints.memory.parameters import ParameterTable
from skyrl_megatron.entrypoints.memory.phases import FRAGMENTATION, TRAINING, Phase
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

NAMED_IN_MESSAGES = 4
LEAST_ROOM = 4 * 10**9
"""Bytes under which a training step may run out of memory that its parts leave free: segments of the caching allocator
that no tensor fits into, and experts that get more tokens than is counted."""


def gigabytes(count: float) -> str:
    """Write a number of bytes with the unit that suits it, decimal."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def lines(budget: Budget) -> Iterator[str]:
    """Yield the fullest GPU of each phase and the node, part by part, with the room that is left."""
    for phase in budget.fullest():
        limit = budget.limit(phase)
        of = "" if limit is None else f" of {gigabytes(limit)}, room {gigabytes(limit - phase.total)}"
        yield f"{phase.name}, {phase.where}: {gigabytes(phase.total)}{of}"
        for part in sorted(phase.parts, key=lambda part: -part.nbytes):
            yield f"  {gigabytes(part.nbytes):>11}  {part.what}"
    yield from _room(budget)


def _room(budget: Budget) -> Iterator[str]:
    """Yield what the fullest training phase leaves for what is not counted, and what makes it more where it is
    little."""
    training = [phase for phase in budget.fullest() if phase.name.endswith(TRAINING)]
    fullest = max(training, key=budget.excess, default=None)
    if fullest is None or (limit := budget.limit(fullest)) is None:
        return
    room, trainer = limit - fullest.total, next(iter(budget.models.values())).cfg.trainer
    counted = f"of activations {FRAGMENTATION:.0%}"
    if any(model.parallel.ep > 1 for model in budget.models.values()):
        counted += f", of experts' tokens {IMBALANCE:g} times the average"
    yield (
        f"room for fragmentation and expert imbalance beyond what is counted ({counted}): {gigabytes(room)}, in "
        f"{fullest.name}, {fullest.where}"
    )
    if room < LEAST_ROOM:
        key = (
            "max_tokens_per_microbatch" if trainer.max_tokens_per_microbatch > 0 else "micro_train_batch_size_per_gpu"
        )
        yield (
            f"warning: less than {gigabytes(LEAST_ROOM)} of room: a step with uneven experts may run out of memory; "
            f"lower trainer.{key} ({getattr(trainer, key)})"
        )


def problems(cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], budget: Budget) -> Iterator[Problem]:
    """Yield a problem for each phase that does not fit, the worst one with the nearest setting that does."""
    found = budget.too_large()
    if not found:
        return
    changes = nearest(cfg, tables, budget.hardware)
    if changes is None:
        larger = (
            f"nodes with {gigabytes(budget.node.total)}" if found == [budget.node] else "more GPUs, or larger ones"
        )
        fix = f"no other setting was found that fits: take {larger}"
    else:
        fix = "the nearest setting that fits: " + " ".join(str(change) for change in changes)
    for number, phase in enumerate(found):
        limit = budget.limit(phase)
        assert limit is not None
        key = "host memory" if phase is budget.node else "GPU memory"
        yield Problem(key, gigabytes(limit), _needs(phase, limit) + (f"; {fix}" if number == 0 else ""))


def _needs(phase: Phase, limit: int) -> str:
    largest = sorted(phase.parts, key=lambda part: -part.nbytes)[:NAMED_IN_MESSAGES]
    named = ", ".join(f"{part.what} {gigabytes(part.nbytes)}" for part in largest)
    more = " …" if len(phase.parts) > len(largest) else ""
    return (
        f"{phase.where} needs {gigabytes(phase.total)} in {phase.name}, {gigabytes(phase.total - limit)} too much "
        f"({named}{more})"
    )
