"""The budget as lines of ``--check``, and as the problems that a run is refused for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_megatron.entrypoints.memory.budget import Budget
from skyrl_megatron.entrypoints.memory.nearest import nearest
from skyrl_megatron.entrypoints.memory.parameters import ParameterTable
from skyrl_megatron.entrypoints.memory.phases import Phase
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

NAMED_IN_MESSAGES = 4


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
