"""Optional parts of a rank: what acts at fixed moments of its passes and steps, next to the core.

The core names no part. A package registers its parts with :func:`skyrl_megatron.plugins.register_part`; each rank asks
all registered classes whether they act in this run, and calls those that do in the order of registration::

    forward_backward   begin_pass · extra_loss · plan of micro-batches · around("forward_backward") · end_pass
    optim_step         around("optim_step"): begin_step · [clip and update] · updated — then end_step
    after the last step of a batch: end_batch

Every rank of a role has the same parts, so a part may communicate. A part that does raises its errors on all ranks
(``parallel_state.raise_on_all_ranks``); any other error of a part ends all ranks with the name of the part.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from skyrl_megatron.errors import ConfigError
from skyrl_megatron.plugins import PARTS
from skyrl_megatron.runtime.parallel_state import raise_on_all_ranks

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.data.prefixes import SharedPrefixes
    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.runtime.forward_step import ExtraLoss, LogprobHead
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.optimizer import TrainingState
    from skyrl_megatron.runtime.parallel_state import ProcessGroups
    from skyrl_megatron.types import TrainingBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartSetup:
    """What a part is built from: the rank's model with its weights loaded, before buffers and optimizers exist."""

    cfg: SkyRLTrainConfig
    role: str
    model: ModelChunks
    groups: ProcessGroups
    flops: ModelFlops
    """Of the whole model, per sequence."""

    @property
    def settings(self) -> Any:
        """The section ``trainer.<role>``."""
        return getattr(self.cfg.trainer, self.role)


class RankPart:
    """An optional part of a rank. Every method does nothing unless a subclass overrides it."""

    name: ClassVar[str] = "part"
    """Stands in errors."""
    norm_group: ClassVar[str | None] = None
    """Megatron's name (``GRAD_NORM_GROUP_ATTR``) of parameters that are clipped by a norm of their own."""

    @classmethod
    def acts(cls, setup: PartSetup) -> bool:
        """Return whether the part acts in this run. The answer is the same on all ranks of a role."""
        return True

    def __init__(self, setup: PartSetup) -> None:
        self.setup = setup

    route_layers: Sequence[int] = ()
    """Layers whose routes (``TrainingBatch.rollout_routes``) the part reads."""

    def prepared(self, trained: Mapping[str, TrainingState]) -> None:
        """Prepare what needs gradient buffers and optimizers. Called once. ``trained``: those of each adapter by its
        name."""

    # ------------------------------------------------------------------ a pass with gradients
    def begin_pass(self) -> None:
        """Begin a pass with gradients over a mini-batch, or over a part of one."""

    def plan(
        self,
        batch: TrainingBatch,
        units: Sequence[np.ndarray],
        plan: list[np.ndarray],
        rows: int,
        prefixes: SharedPrefixes | None,
    ) -> list[np.ndarray]:
        """Return the units of each micro-batch of this replica; by default ``plan``, which balances tokens.

        Called in every pass, also without gradients. ``units``: rows of ``batch`` that stay together, [n] int64
        each. ``plan``: for each micro-batch the indices of its units, [m] int64. ``rows``: most rows of a micro-batch
        if ``max_tokens_per_microbatch`` is not set. ``prefixes``: what rows share, which a micro-batch has once. All
        replicas return the same number of micro-batches. ``batch`` has the fields that its pass reads
        (``workers/dispatch.py``), never rewards.
        """
        return plan

    def extra_loss(self, head: LogprobHead) -> ExtraLoss | None:
        """Return a loss that is added to a policy's objective, on the last stage; None elsewhere. ``head``: maps the
        model's output to log-probs."""
        return None

    def around(self, phase: str, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager of ``forward_backward`` (Megatron's schedule) or ``optim_step`` (clipping and
        update). ``name``: the phase with the active adapter and the number of its step."""
        return contextlib.nullcontext()

    def end_pass(self, loads: Mapping[int, Tensor]) -> Mapping[str, float]:
        """Return metrics of the pass, equal on all ranks. ``loads``: layer → tokens of each expert, [E] float64, over
        all ranks; empty without experts."""
        return {}

    # ------------------------------------------------------------------ an optimizer step
    def begin_step(self, trained: TrainingState) -> None:
        """Begin a step, whose gradients are summed over all ranks and not yet clipped."""

    def updated(self, trained: TrainingState) -> Mapping[str, float]:
        """Return metrics of the step. The optimizer has changed this rank's weights, and overlapped gathers of
        parameters have not begun. Not called for a skipped step."""
        return {}

    def end_step(self, name: str) -> None:
        """End a step, skipped or not; its gradients are cleared. ``name``: ``step`` with the active adapter and the
        number of steps so far."""

    def end_batch(self, trained: Mapping[str, TrainingState], steps: int) -> Mapping[str, float]:
        """Return metrics. All steps of a batch are done, and weights are whole on all ranks. ``steps``: so far."""
        return {}


def acting_parts(setup: PartSetup) -> list[RankPart]:
    """Build the registered parts that act in this run. Raises on all ranks with the name of a part that fails."""
    parts: list[RankPart] = []
    # In the order of registration, which is the same on all ranks: constructors may communicate.
    for cls in PARTS.all():
        with _all_ranks_know(cls.name):
            if cls.acts(setup):
                parts.append(cls(setup))
    return parts


def call_parts(parts: Sequence[RankPart], method: str, *arguments: Any) -> list[Any]:
    """Call a method of every part that overrides it, and return the results.

    If a part raises on any rank, every rank raises. Without overriding parts there is no communication.
    """
    results = []
    for part in parts:
        # The agreement costs an all-reduce: only for methods that do something.
        if getattr(type(part), method) is not getattr(RankPart, method):
            with _all_ranks_know(part.name):
                results.append(getattr(part, method)(*arguments))
    return results


def planned(
    parts: Sequence[RankPart],
    batch: TrainingBatch,
    units: Sequence[np.ndarray],
    plan: list[np.ndarray],
    rows: int,
    prefixes: SharedPrefixes | None,
) -> list[np.ndarray]:
    """Return the plan of micro-batches, [m] int64 each, after every part has changed it (:meth:`RankPart.plan`)."""
    for part in parts:
        # Each part sees the plan of the one before it, so the last one decides.
        if type(part).plan is not RankPart.plan:
            with _all_ranks_know(part.name):
                plan = part.plan(batch, units, plan, rows, prefixes)
    return plan


def metrics_of(parts: Sequence[RankPart], method: str, *arguments: Any) -> dict[str, float]:
    """Call a method of every part as :func:`call_parts` does; return the metrics of all."""
    return {name: value for result in call_parts(parts, method, *arguments) for name, value in result.items()}


@contextlib.contextmanager
def around(parts: Sequence[RankPart], phase: str, name: str) -> Iterator[None]:
    """Enter the contexts of all parts for a phase (:meth:`RankPart.around`)."""
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(part.around(phase, name))
        yield


@contextlib.contextmanager
def _all_ranks_know(name: str) -> Iterator[None]:
    """Raise an error of the block on all ranks, with the name of the part. Collective over all ranks."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        # The other ranks get the message alone: an error that crosses processes has lost its traceback.
        logger.error("the part %s failed", name, exc_info=error)
        failure = _named(name, error)
    # Also without a failure: the other ranks wait for this one's answer.
    raise_on_all_ranks(failure)


def _named(name: str, error: Exception) -> Exception:
    message = f"part {name}: {error}"
    if isinstance(error, ConfigError):  # is built from problems, not from a message
        return ValueError(message)
    try:
        return type(error)(message)
    except TypeError:
        return RuntimeError(f"{message} ({type(error).__name__})")
