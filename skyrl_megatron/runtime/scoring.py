"""Scores of given tokens: log-probs at temperature 1 for the probe, optionally with perturbed embeddings; a teacher's
log-probs with those of the most likely tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.runtime.forward_step import ForwardStep, LogprobHead, MicroBatch
from skyrl_megatron.runtime.logprobs import top_logprobs
from skyrl_megatron.runtime.loss_scale import loss_for_schedule
from skyrl_megatron.types import TrainingBatch

if TYPE_CHECKING:
    from skyrl_megatron.runtime.engine import MegatronEngine


def score_tokens(
    engine: MegatronEngine, token_ids: Sequence[int], *, perturbation: float = 0.0, adapter: str = ""
) -> list[float] | None:
    """Return log-probs of tokens 1 … n−1 at temperature 1 in nats, on the collection rank of dp 0; None elsewhere.

    ``perturbation``: relative change of every embedding, up or down, at least half a ulp; 0: none. The resulting
    change of the log-probs estimates the effect of rounding in this model. ``adapter``: name of the adapter, by
    default the first. All ranks call it together.
    """
    # All tokens but the first are a response, so that each has a position that predicts it.
    ones = torch.ones(len(token_ids) - 1, dtype=torch.bool)
    lengths = np.array([len(token_ids)])
    batch = TrainingBatch(torch.tensor(list(token_ids), dtype=torch.int32), lengths, lengths - 1, ones, ones)
    batch.adapters = [adapter] if adapter else []
    with perturbed_embeddings(engine, perturbation) if perturbation else contextlib.nullcontext():
        logprobs = engine.compute_logprobs(batch, temperature=1.0)
    return logprobs.tolist() if engine.is_collection_rank and engine.dp_rank == 0 else None


@contextlib.contextmanager
def perturbed_embeddings(engine: MegatronEngine, change: float) -> Iterator[None]:
    """Multiply every embedding entry by 1 ± ``change``, at least half a ulp, with random signs."""

    def perturb(module: Any, arguments: Any, embedded: Tensor) -> Tensor:
        seeded = torch.Generator().manual_seed(0)  # the same signs on all ranks of a tensor-parallel group
        signs = torch.randint(0, 2, embedded.shape, generator=seeded).to(embedded) * 2 - 1
        return embedded * (1 + signs * max(change, torch.finfo(embedded.dtype).eps / 2))

    first = [chunk for chunk in engine.model.chunks if chunk.pre_process]
    hooks = [chunk.embedding.register_forward_hook(perturb) for chunk in first]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# Token ids travel as fp32 next to the log-probs, in one tensor; larger ids would be rounded.
EXACT_IN_FP32 = 2**24


@torch.no_grad()
def score_responses(engine: MegatronEngine, batch: TrainingBatch, k: int) -> Tensor:
    """Return [R, 1 + 2k] float32 at ``algorithm.temperature``; every rank gets the rows of its replica.

    Per response token: its log-prob in nats, then the log-probs of the ``k`` most likely tokens (most likely first),
    then their ids.
    """
    assert k == 0 or engine.model.vocab_size <= EXACT_IN_FP32
    engine.onload("weights")
    return engine.forward_only(TeacherStep(engine.head(), k), batch, width=1 + 2 * k)


class TeacherStep(ForwardStep):
    """Forward pass only. The schedule returns [b, T, 1 + 2k] of each micro-batch (see :func:`score_responses`)."""

    def __init__(self, head: LogprobHead, k: int) -> None:
        self.head, self.k = head, k

    def on_last_stage(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (scalar 0, token count 0, scores [b, T, 1 + 2k] float32 of :func:`score_responses`); ``output`` as in
        :class:`ForwardStep`."""
        packed = micro_batch.packed
        logprobs, _ = self.head(output, packed)
        scores = logprobs[..., None]
        if self.k:
            # Over all positions of the pack, as the head does: those are picked that predict a response.
            best, ids = top_logprobs(output.flatten(0, -2), self.k, packed.groups.tp, self.head.settings)
            scores = torch.cat([scores, packed.sources_to_responses(torch.cat([best, ids.float()], dim=-1))], dim=-1)
        return loss_for_schedule(scores.new_zeros(()), scores)
