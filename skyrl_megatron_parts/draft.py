"""Training of the draft head, the layer of multi-token prediction (``mtp.train``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean
from skyrl_megatron.algorithms.reduction import StepTotals
from skyrl_megatron.runtime.forward_step import LogprobHead, MicroBatch
from skyrl_megatron.runtime.logprobs import SoftmaxSettings, fused_logprobs_and_entropy
from skyrl_megatron.runtime.model.attention import local_positions
from skyrl_megatron.runtime.model.mtp import DraftHead, draft_of, send_embedding
from skyrl_megatron.runtime.model.rotary import PackedRotary
from skyrl_megatron.runtime.packed_inputs import PackedInputs, pack
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
        scale = self.setup.settings.megatron_config.mtp.loss_scale
        return DraftLoss(draft, weight, head.settings, scale, getattr(last, "rotary_pos_emb", None))


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
    rotary: Any = None
    """The model's rotary embedding; None if layers have their own."""

    def logprobs(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (log-probs, valid), equal on all tp and cp ranks.

        Log-probs: [b, T] in nats, of each response token as predicted two positions before it. Valid: [b, T] bool,
        True where such a position exists.
        """
        packed = micro_batch.packed
        if packed.row_positions is not None:
            packed = self._of_rows(micro_batch)
        tokens = packed.targets.view(packed.tokens.shape)
        hidden = self.draft(tokens, packed.position_ids)
        # detached: the head's weight is the policy's, which the draft loss must not train
        weight = self.weight.detach()
        logprobs, _ = fused_logprobs_and_entropy(
            hidden, weight, packed.further_targets, packed.groups.tp, self.settings
        )
        return packed.further_responses(logprobs)

    def _of_rows(self, micro_batch: MicroBatch) -> PackedInputs:
        """Give the head whole rows, which are one sequence each, in place of segments; return their inputs.

        After its last token a segment has several next tokens, and the head's layer would differ from there on.
        """
        segments, groups, captured = micro_batch.packed, micro_batch.packed.groups, self.draft.captured
        assert captured is not None
        hidden, arguments = captured
        rows = pack(micro_batch.batch, groups, hidden.device)
        assert rows.params is not None
        tokens = hidden.new_zeros(sum(rows.padded_lengths), 1, hidden.shape[-1])
        starts = np.cumsum(rows.padded_lengths) - rows.padded_lengths
        for start, of_row in zip(starts.tolist(), segments.to_rows(hidden), strict=True):
            tokens[start : start + len(of_row), 0] = of_row
        tokens = tokens[local_positions(rows.padded_lengths, groups.cp.size(), groups.cp.rank()).to(tokens.device)]
        if groups.parallel.sequence_parallel:
            tokens = tokens.chunk(groups.tp.size())[groups.tp.rank()]
        if isinstance(self.rotary, PackedRotary):
            rows.params.rotary = self.rotary.table(rows.params.positions, rows.params.max_seqlen_kv)
        of_rows = {"packed_seq_params": rows.params, "padding_mask": rows.padding_mask}
        changed = {name: value for name, value in of_rows.items() if name in arguments}
        self.draft.captured = tokens, arguments | changed
        return rows

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
