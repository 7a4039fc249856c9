"""The forward step of a micro-batch in Megatron's schedule: the model, and on the last stage log-probs or loss.

A :class:`ForwardStep` is Megatron's ``forward_step_func``. It takes an iterator of :class:`MicroBatch` and a model
chunk. It returns the chunk's output and the closure that the schedule calls with the output of the last stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from skyrl_megatron.algorithms.losses import seed_random_picks
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, mismatch_metrics
from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.algorithms.reduction import StepTotals
from skyrl_megatron.runtime.logprobs import (
    SoftmaxSettings,
    fused_logprobs_and_entropy,
    logprobs_and_entropy,
    logprobs_of,
)
from skyrl_megatron.runtime.loss_scale import loss_for_schedule
from skyrl_megatron.runtime.model.moe import routers_of
from skyrl_megatron.runtime.packed_inputs import PackedInputs
from skyrl_megatron.types import OWN_LOGPROBS, PaddedBatch

if TYPE_CHECKING:
    from skyrl_megatron.runtime.parallel_state import ProcessGroups


type ForwardStepFunc[M] = Callable[[Iterator[M], "torch.nn.Module"], tuple["Tensor", Callable[["Tensor"], Any]]]


def run_schedule[M](
    forward_step: ForwardStepFunc[M],
    micro_batches: Sequence[M],
    chunks: Sequence[torch.nn.Module],
    groups: ProcessGroups,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run all micro-batches. On the last stage return one loss-closure result per micro-batch, elsewhere ``[]``.

    Every stage gets every micro-batch. With virtual pipelining each model chunk has its own iterator over them.
    Sequence lengths vary, so stages send shapes before tensors (``variable_seq_lengths``).
    """
    schedule = get_forward_backward_func(groups.parallel.pp, groups.parallel.vpp if len(chunks) > 1 else None)
    # each chunk consumes all micro-batches at its own time, so they cannot share one iterator
    iterators = [iter(micro_batches) for _ in chunks]
    results: list[Any] = schedule(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=1,  # both unused with variable sequence lengths
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


def share_from_last_stage[V](value: V, group: dist.ProcessGroup) -> V:
    """Return the last pipeline stage's ``value`` on every stage. For small objects, such as metrics."""
    if group.size() == 1:
        return value
    objects = [value]
    dist.broadcast_object_list(objects, src=dist.get_global_rank(group, group.size() - 1), group=group)
    return objects[0]


Closure = Callable[[Tensor], Any]
type ExtraLoss = Callable[[MicroBatch, Tensor, StepTotals], tuple[Tensor, ReducibleMetrics]]
"""(micro-batch, log-probs of the policy [b, T], denominators of the step) → (share of the loss, metrics)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed rows of a replica's mini-batch. Without rows it is one sequence of padding with weight 0."""

    rows: np.ndarray
    """[b] int64: indices of the rows in the replica's batch."""
    batch: PaddedBatch
    """The rows themselves."""
    packed: PackedInputs


@dataclass(frozen=True, slots=True)
class LogprobHead:
    """Computes log-probs of response tokens from the model's output."""

    settings: SoftmaxSettings
    weight: Tensor | None = None
    """[V_padded / tp, H]: weight of the LM head if the model returns hidden states, else None."""
    low_rank: Callable[[Tensor], tuple[Tensor, Tensor] | None] | None = None
    """The head's adapter as a function of hidden states (``Adapters.on_hidden``)."""

    def __call__(
        self, output: Tensor, packed: PackedInputs, *, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return (log-probs, entropies) of the response tokens, [b, T] each, equal on all tp and cp ranks.

        ``output``: logits [1, p, V_padded / tp], or hidden states [1, p, H]; with padded inputs [b, S, …].
        """
        output, targets, tp = output.flatten(0, -2), packed.targets, packed.groups.tp
        settings = dataclasses.replace(self.settings, with_entropy=with_entropy)
        if self.weight is None:
            further = packed.further_sources
            logprobs, entropy = logprobs_and_entropy(output, targets, tp, settings, packed.support, further)
        else:
            output = packed.at_edges(output)
            low_rank = self.low_rank(output) if self.low_rank is not None else None
            logprobs, entropy = fused_logprobs_and_entropy(
                output, self.weight, targets, tp, settings, low_rank, packed.support
            )
        return packed.to_responses(logprobs), None if entropy is None else packed.to_responses(entropy)


class ForwardStep:
    """Forward pass of one micro-batch. Subclasses define what the last stage does with its output."""

    def __call__(
        self, micro_batches: Iterator[MicroBatch], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Closure]:
        """Return the chunk's output, or with ``return_schedule_plan`` the plan by which Megatron computes it while the
        previous micro-batch's backward pass runs (``overlap_moe_expert_parallel_comm``)."""
        micro_batch = next(micro_batches)
        arguments = micro_batch.packed.model_arguments()
        if return_schedule_plan:
            # a schedule plan calls the layers itself, so the model's forward, which routers read the padding
            # from, never runs
            for router in routers_of([model]):
                router.planned_padding = micro_batch.packed.padding_mask
            output = model.build_schedule_plan(**arguments)
        else:
            output = model(**arguments)
        self.passed(micro_batch)
        return output, partial(self.on_last_stage, micro_batch)

    def passed(self, micro_batch: MicroBatch) -> None:
        """React to a micro-batch that has passed through a model chunk of this rank."""

    def on_last_stage(self, micro_batch: MicroBatch, output: Tensor) -> Any:
        """Return the result that the schedule stores for the micro-batch (``loss_scale.loss_for_schedule``).

        ``output``: logits [1, p, V_padded / tp], or hidden states [1, p, H]; with padded inputs [b, S, …].
        """
        raise NotImplementedError


class LogprobStep(ForwardStep):
    """Forward pass only. The schedule returns the log-probs [b, T] of each micro-batch."""

    def __init__(self, head: LogprobHead) -> None:
        self.head = head

    def on_last_stage(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (scalar 0, token count 0, log-probs [b, T] in nats); ``output`` as in :class:`ForwardStep`."""
        logprobs, _ = self.head(output, micro_batch.packed)
        return loss_for_schedule(logprobs.new_zeros(()), logprobs)


class TrainingStep(ForwardStep):
    """Forward and backward pass of an objective. The schedule returns the metrics of each micro-batch."""

    failure: Exception | None = None
    """The first error of the loss. Raised inside the schedule it would block the other ranks. The loss of the
    micro-batch is 0 instead, and the engine raises the error on all ranks after the schedule."""


class PolicyStep(TrainingStep):
    """Forward and backward pass of the policy objective."""

    def __init__(
        self,
        head: LogprobHead,
        objective: PolicyObjective,
        totals: StepTotals,
        *,
        entropy: bool,
        seed: tuple[int, ...],
        extra: Sequence[ExtraLoss] = (),
    ) -> None:
        self.extra = extra
        """Losses of parts of the rank, which are added to the objective."""
        self.head, self.objective, self.totals, self.entropy = head, objective, totals, entropy
        self.seed = seed
        """Seed of random choices in a loss, with the micro-batch's number: equal on all tp, cp and pp ranks."""
        self.finished = 0

    def on_last_stage(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, ReducibleMetrics]:
        """Return (scalar loss, token count 0, metrics); ``output`` as in :class:`ForwardStep`."""
        batch = micro_batch.batch
        logprobs, entropy = self.head(output, micro_batch.packed, with_entropy=self.entropy)
        assert batch.advantages is not None
        old = batch.old_logprobs
        if old is None and batch.metadata.get(OWN_LOGPROBS):
            # the only pass of the step: the log-probs before the update are those of this pass, without
            # gradient
            old = logprobs.detach()
        # from the micro-batch's number, because random choices must be equal on all ranks that share it
        seed_random_picks(*self.seed, self.finished)
        self.finished += 1
        try:
            loss, metrics = self.objective(
                self.totals,
                logprobs,
                batch.advantages,
                batch.loss_mask,
                old_log_probs=old,
                rollout_log_probs=batch.rollout_logprobs,
                ref_log_probs=batch.ref_logprobs,
                entropy=entropy,
                top_log_probs=self.top_log_probs(micro_batch, output),
                observation_mask=batch.observation_mask,
                uids=batch.uids or None,
            )
        except Exception as error:
            # not raised here: the other stages would wait for this one's gradients until their timeout
            self.failure = self.failure or error
            # a loss of 0 that still depends on the output, so that the backward pass runs on all ranks
            loss, metrics = logprobs.sum() * 0.0, {}
        # nobody scored the batch before the step, so the mismatch is measured in this pass
        if batch.old_logprobs is None and batch.rollout_logprobs is not None:
            metrics = metrics | mismatch_metrics(logprobs, batch.rollout_logprobs, batch.loss_mask)
        for extra in self.extra:
            extra_loss, extra_metrics = extra(micro_batch, logprobs.detach(), self.totals)
            loss, metrics = loss + extra_loss, metrics | extra_metrics
        return loss_for_schedule(loss, metrics)

    def top_log_probs(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return log-probs [b, T, K] of the teacher's K most likely tokens: (policy's, teacher's).

        None if the objective does not compare them.
        """
        batch, packed = micro_batch.batch, micro_batch.packed
        if batch.teacher_top_ids is None or batch.teacher_top_logprobs is None or not self.objective.compares_top:
            return None
        ids = packed.to_edges(batch.teacher_top_ids)
        logprobs = logprobs_of(packed.at_edges(output.flatten(0, -2)), ids, packed.groups.tp, self.head.settings)
        return packed.to_responses(logprobs), batch.teacher_top_logprobs
