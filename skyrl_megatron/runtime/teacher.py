"""What a teacher on ranks says of response tokens: their log-probs, and those of the likeliest tokens in their
place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skyrl_megatron.runtime.forward_step import ForwardStep, LogprobHead, MicroBatch
from skyrl_megatron.runtime.loss_scale import loss_for_schedule
from skyrl_megatron.runtime.top_k import top_logprobs

if TYPE_CHECKING:
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.types import TrainingBatch

EXACT_IN_FP32 = 2**24


@torch.no_grad()
def score_responses(engine: MegatronEngine, batch: TrainingBatch, k: int) -> Tensor:
    """Return [B, T, 1 + 2k] float32: each response token's log-prob in nats, log-probs of the ``k`` likeliest tokens,
    likeliest first, and their ids; 0 elsewhere. At ``algorithm.temperature``; every rank gets its replica's rows."""
    assert k == 0 or engine.model.vocab_size <= EXACT_IN_FP32
    engine.onload("weights")
    return engine.forward_only(TeacherStep(engine.head(), k), batch, width=1 + 2 * k)


class TeacherStep(ForwardStep):
    """Forward only: the schedule's results are [b, T, 1 + 2k] of each micro-batch."""

    def __init__(self, head: LogprobHead, k: int) -> None:
        self.head, self.k = head, k

    def on_last_stage(self, micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = micro_batch.packed
        logprobs, _ = self.head(output, packed)
        scores = logprobs[..., None]
        if self.k:
            best, ids = top_logprobs(output.flatten(0, -2), self.k, packed.groups.tp, self.head.settings)
            scores = torch.cat([scores, packed.to_responses(torch.cat([best, ids.float()], dim=-1))], dim=-1)
        return loss_for_schedule(scores.new_zeros(()), scores)
