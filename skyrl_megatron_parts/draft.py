"""Training of the draft head, the layer of multi-token prediction (``mtp.train``)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean
from skyrl_megatron.algorithms.reduction import StepTotals
from skyrl_megatron.runtime.forward_step import LogprobHead, MicroBatch
from skyrl_megatron.runtime.logprobs import SoftmaxSettings, fused_logprobs_and_entropy
from skyrl_megatron.runtime.model.mtp import DraftHead, draft_of, send_embedding
from skyrl_megatron.runtime.parts import PartSetup, RankPart


class DraftTraining(RankPart):
    """Adds the draft head's loss to the policy's. The head itself is built with the model."""

    name = "draft"
    norm_group = "mtp"

    @classmethod
    def acts(cls, setup: PartSetup) -> bool:
        """Return whether the policy trains its draft head."""
        return setup.role == "policy" and bool(setup.settings.megatron_config.mtp.train)

    def begin_pass(self) -> None:
        """Bring the embedding of the first stage, which the last step may have changed, to the draft head."""
        chunks = self.setup.model.chunks
        if (draft := draft_of(chunks)) is not None:
            draft.refresh(chunks)
        else:
            send_embedding(chunks, self.setup.groups)

    def extra_loss(self, head: LogprobHead) -> DraftLoss | None:
        """Return the loss on the last stage; None elsewhere."""
        chunks = self.setup.model.chunks
        if (draft := draft_of(chunks)) is None:
            return None
        last = chunks[-1]
        tied = last.share_embeddings_and_output_weights
        weight = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
        return DraftLoss(draft, weight, head.settings, self.setup.settings.megatron_config.mtp.loss_scale)


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """Loss of the draft head: ``scale`` times the summed cross-entropy, divided by all trained tokens of the step.

    The result does not depend on how a batch is split into micro-batches. The draft head does not predict the second
    token of a sequence. Uses the temperature of ``settings``.
    """

    draft: DraftHead
    weight: Tensor
    """[V_padded / tp, H]: weight of the model's output layer."""
    settings: SoftmaxSettings
    scale: float

    def logprobs(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (log-probs, valid), equal on all tp and cp ranks.

        Log-probs: [b, T] in nats, of each response token as predicted two positions before it. Valid: [b, T] bool,
        True where such a position exists.
        """
        packed = micro_batch.packed
        tokens = packed.targets.view(packed.tokens.shape)
        hidden = self.draft(tokens, packed.position_ids)
        # detached: the head's weight is the policy's, which the draft loss must not train
        weight = self.weight.detach()
        logprobs, _ = fused_logprobs_and_entropy(
            hidden, weight, packed.further_targets, packed.groups.tp, self.settings
        )
        return packed.further_responses(logprobs)

    def __call__(self, micro_batch: MicroBatch, policy: Tensor, totals: StepTotals) -> tuple[Tensor, ReducibleMetrics]:
        """Return the micro-batch's share of the loss, and its metrics. ``policy``: log-probs of the policy, [b, T].

        ``mtp_acceptance`` is the mean of min(1, q / p) over sampled tokens, where q is the draft's probability and p
        the policy's. If the tokens are samples of p, this is the share of draft tokens that speculative sampling
        accepts (arXiv:2211.17192).
        """
        logprobs, valid = self.logprobs(micro_batch)
        mask = micro_batch.batch.loss_mask * valid
        # by all trained tokens, not by those with a draft: the loss then does not depend on how rows are packed
        loss = -keep_masked(logprobs, mask).sum() * (self.scale / totals.tokens)
        # min(1, q / p) without overflow: the difference is cut at 0 before the exponential
        accepted = (logprobs.detach() - policy).clamp(max=0.0).exp()
        return loss, {"mtp_loss": token_mean(-logprobs, mask), "mtp_acceptance": token_mean(accepted, mask)}
