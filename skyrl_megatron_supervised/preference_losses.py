"""Losses of preferences: which of two answers is better, or whether an answer is good. For policies and reward models.

h is the summed log-ratio of policy and reference over the trained tokens of an answer, n their number, and σ the
logistic function. The loss is a mean over the rows of the data of an optimizer step:

    sigmoid   −log σ(β·(h_chosen − h_rejected))                       DPO, arXiv:2305.18290, equation 7
    ipo       (h_chosen/n_chosen − h_rejected/n_rejected − 1/(2β))²   arXiv:2310.12036, equation 17, per token
    kto       w·(1 − σ(β·(h − z))) of a good answer,
              w·(1 − σ(β·(z − h))) of another one                     arXiv:2402.01306, equation 8

    reward    −log σ(s_chosen − s_rejected − margin)                  of scores s; Bradley and Terry, arXiv:2203.02155

z is the KL divergence to the reference, at least 0, which the trainer estimates from answers to other prompts. It has
no gradient.

The rows of a pair stay in one micro-batch (``data.splitting.TOGETHER``), where both sums are known: a rank has the
log-probs of whole sequences, whatever tp, cp and pp are. Loss and gradient are thus those of the training pass, in
every layout. The alternative, a loss linear in the log-probs with the coefficient σ(−margin) of an earlier pass, lets
a pair be split, but needs that pass in each optimizer step, and differs from the loss when dropout is on. Sums over
tokens are taken in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.algorithms.metrics import Mean, ReducibleMetrics
from skyrl_megatron.algorithms.reduction import StepTotals, step_totals
from skyrl_megatron.config.schema.supervised import DPOConfig
from skyrl_megatron.types import TrainingBatch

SIDES = ("chosen", "rejected")
SIDE, REFERENCE, MARGIN = 0, 1, 2
"""Columns of ``TrainingBatch.preferences``."""
KL = "kto_kl"
"""Metadata key of a batch: z of ``kto``, in nats."""


def summed(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over the valid tokens of each row, [B] float64, of ``values`` [B, T]."""
    return keep_masked(values, mask).sum(dim=1, dtype=torch.float64)


def summed_rows(batch: TrainingBatch, values: Tensor) -> Tensor:
    """Return the sum over the trained tokens of each row of a batch, [B] float64, of ``values`` [R]."""
    return batch.responses.sum(keep_masked(values, batch.loss_mask))


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of some rows of data: [N, 2] float64 each, the better answer first. A row with one answer has zeros
    for the other one."""

    sums: Tensor
    """Summed log-probs of the policy in nats, or scores; differentiable."""
    reference: Tensor
    """Those of the reference."""
    tokens: Tensor
    """Trained tokens."""
    margin: Tensor
    """[N] float64."""

    @classmethod
    def of(cls, sums: Tensor, counts: Tensor, preferences: Tensor, uids: Sequence[str]) -> Answers:
        """Group rows by uid. ``sums`` [B] float64: of the trained tokens of each row, ``counts`` [B] their number,
        ``preferences`` [B, 3]. Rows without a trained token are left out. An answer may have several rows."""
        numbers: dict[str, int] = {}
        valid = [row for row, tokens in enumerate(counts.tolist()) if tokens]
        first_slots = [2 * numbers.setdefault(uids[row], len(numbers)) for row in valid]
        rows = torch.tensor(valid, dtype=torch.int64, device=sums.device)
        slots = torch.tensor(first_slots, dtype=torch.int64, device=sums.device)
        chosen = preferences[rows, SIDE] > 0
        slots = slots + (~chosen).long()

        def added(each: Tensor) -> Tensor:
            return each.new_zeros(2 * len(numbers)).index_add(0, slots, each[rows]).view(-1, 2)

        margins = preferences.new_zeros(2 * len(numbers)).index_copy(0, slots, preferences[rows, MARGIN])
        return cls(
            added(sums),
            added(preferences[:, REFERENCE]),
            added(counts.double()),
            margins.view(-1, 2)[:, 0],
        )


def preference_loss(answers: Answers, settings: DPOConfig, kl: float = 0.0) -> Tensor:
    """Return the loss of each row of data, [N] float64. ``kl``: z of ``kto``, in nats."""
    ratios = answers.sums - answers.reference
    if settings.loss == "sigmoid":
        return -logsigmoid(settings.beta * (ratios[:, 0] - ratios[:, 1]))
    if settings.loss == "ipo":
        means = ratios / answers.tokens.clamp(min=1)
        return (means[:, 0] - means[:, 1] - 1 / (2 * settings.beta)).square()
    good = answers.tokens[:, 0] > 0
    gain = torch.where(good, ratios[:, 0] - kl, kl - ratios[:, 1])
    weight = good.double() * settings.desirable_weight + (~good).double() * settings.undesirable_weight
    return weight * (1 - torch.sigmoid(settings.beta * gain))


@torch.no_grad()
def preference_metrics(answers: Answers, settings: DPOConfig) -> ReducibleMetrics:
    """Return rewards β·h and log-probs of the better and the other answers; of pairs also accuracy and margin."""
    present = answers.tokens > 0
    found = reward_metrics(settings.beta * (answers.sums - answers.reference), present, paired=settings.paired)
    return found | {f"logps/{side}": _mean(answers.sums[:, n], present[:, n]) for n, side in enumerate(SIDES)}


def reward_metrics(rewards: Tensor, present: Tensor, *, paired: bool) -> ReducibleMetrics:
    """Return the means of ``rewards`` [N, 2] of both sides, where ``present``; of pairs also accuracy and margin."""
    found: ReducibleMetrics = {f"rewards/{side}": _mean(rewards[:, n], present[:, n]) for n, side in enumerate(SIDES)}
    if paired:
        margins = rewards[:, 0] - rewards[:, 1]
        found["rewards/margins"] = _mean(margins, present[:, 0])
        found["rewards/accuracies"] = _mean((margins > 0).double(), present[:, 0])
    return found


def _mean(values: Tensor, present: Tensor) -> Mean:
    return Mean(keep_masked(values, present).sum(), present.sum().double())


class PreferenceObjective:
    """The loss of preferences of ``settings``, with the interface of an ``Objective``."""

    def __init__(self, settings: DPOConfig) -> None:
        self.settings = settings

    def totals(self, loss_mask: Tensor, *, uids: Sequence[str] | None = None, **_: Any) -> StepTotals:
        """Count a shard of the mini-batch, ``loss_mask`` [B, T]; add the counts up over shards before the step."""
        return step_totals(loss_mask, "prompt_mean", uids)

    def weight(self, totals: StepTotals) -> float:
        """Return the denominator of the mean: the rows of the data."""
        return len(totals.prompt_tokens)

    def __call__(self, totals: StepTotals, answers: Answers, kl: float = 0.0) -> tuple[Tensor, ReducibleMetrics]:
        """Return the loss of a micro-batch, a scalar to call ``backward`` on, and its metrics: ``policy_loss``, its
        share of the step's loss, and :func:`preference_metrics`."""
        losses = self.losses(answers, kl)
        loss = losses.sum() / max(self.weight(totals), 1)
        share = loss.new_tensor(len(losses) / max(self.weight(totals), 1))
        return loss, {"policy_loss": Mean(loss.detach(), share), **self.measured(answers)}

    def losses(self, answers: Answers, kl: float = 0.0) -> Tensor:
        """Return the loss of each row of data, [N] float64."""
        return preference_loss(answers, self.settings, kl)

    def measured(self, answers: Answers) -> ReducibleMetrics:
        """Return the metrics of the answers."""
        return preference_metrics(answers, self.settings)


class RewardObjective(PreferenceObjective):
    """The loss of a reward model. The sums of its answers are their scores."""

    def __init__(self) -> None:
        super().__init__(DPOConfig())  # it reads none of them

    def losses(self, answers: Answers, kl: float = 0.0) -> Tensor:
        """Return the loss of each pair, [N] float64."""
        return -logsigmoid(answers.sums[:, 0] - answers.sums[:, 1] - answers.margin)

    @torch.no_grad()
    def measured(self, answers: Answers) -> ReducibleMetrics:
        """Return scores, accuracy and margin."""
        return reward_metrics(answers.sums, answers.tokens > 0, paired=True)
