"""The loss of the draft head (``model/draft.py``): how well it foretells the tokens that the policy is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean
from skyrl_megatron.algorithms.reduction import StepTotals
from skyrl_megatron.runtime.model.draft import DraftHead
from skyrl_megatron.runtime.vocab_parallel import SoftmaxSettings, fused_logprobs_and_entropy

if TYPE_CHECKING:
    from skyrl_megatron.runtime.forward_step import MicroBatch


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """``scale`` times the cross-entropy of the trained tokens, of which a sequence's second is never foretold, over
    all trained tokens of the step: it does not depend on how a batch is cut. At the temperature of ``settings``."""

    draft: DraftHead
    weight: Tensor
    """[V_padded / tp, H]: the model's output layer."""
    settings: SoftmaxSettings
    scale: float

    def logprobs(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (log-probs of response tokens as foretold two positions before, [b, T] in nats; where there are any,
        [b, T] bool), equal on all tp and cp ranks."""
        packed = micro_batch.packed
        tokens = packed.targets.view(packed.tokens.shape)
        hidden = self.draft(tokens, packed.position_ids)
        found, _ = fused_logprobs_and_entropy(
            hidden, self.weight.detach(), packed.further_targets, packed.groups.tp, self.settings
        )
        return packed.further_responses(found)

    def __call__(self, micro_batch: MicroBatch, policy: Tensor, totals: StepTotals) -> tuple[Tensor, ReducibleMetrics]:
        """Return the micro-batch's share of the loss, and its metrics. ``policy``: [b, T], the policy's log-probs.

        ``mtp_acceptance``: mean of min(1, q / p) over sampled tokens, q the draft's probability and p the policy's:
        where the tokens are samples of p, the share of drafts that speculative sampling accepts (arXiv:2211.17192).
        """
        found, valid = self.logprobs(micro_batch)
        mask = micro_batch.batch.loss_mask * valid
        loss = -keep_masked(found, mask).sum() * (self.scale / totals.tokens)
        accepted = (found.detach() - policy).clamp(max=0.0).exp()
        return loss, {"mtp_loss": token_mean(-found, mask), "mtp_acceptance": token_mean(accepted, mask)}
