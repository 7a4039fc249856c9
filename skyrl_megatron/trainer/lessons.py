"""Steps whose advantages teach nothing, and why: found as they happen, and reported once for each reason."""

from __future__ import annotations

import warnings

import torch

from skyrl_megatron.errors import SkyRLMegatronWarning
from skyrl_megatron.types import TrainingBatch


class Lessons:
    """Warns of the first step of each kind that teaches nothing."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, step: int, batch: TrainingBatch) -> None:
        """Look at the batch of ``step``, whose advantages have been computed."""
        if (found := nothing_taught(batch)) is not None:
            kind, why = found
            self._warn(kind, f"step {step} teaches nothing of its rewards: {why}")

    def filtered(self, step: int, batches: int) -> None:
        """Note that dynamic sampling has asked for another batch of prompts, after ``batches`` of them."""
        if batches >= 3:
            self._warn(
                "filtered",
                f"step {step}: {batches} batches of prompts did not fill one step, because dynamic sampling leaves "
                "out prompts whose samples got the same reward. Take other prompts or more samples of each "
                "(generator.n_samples_per_prompt); trainer.algorithm.dynamic_sampling.max_sample_batches is the limit",
            )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(text, SkyRLMegatronWarning, stacklevel=4)


def nothing_taught(batch: TrainingBatch) -> tuple[str, str] | None:
    """Return (kind, reason) when no trained token has an advantage other than 0; None where one has."""
    assert batch.advantages is not None and batch.rewards is not None
    if not (batch.loss_mask > 0).any():
        return "masked", "all of its tokens are masked (samples that failed, were cut off, or were not finite)"
    if torch.any((batch.advantages != 0) & (batch.loss_mask > 0)):
        return None
    scores = (batch.rewards * batch.response_mask).sum(dim=1)
    if scores.max() == scores.min():
        return "equal", f"all {len(scores)} samples got reward {scores[0].item():g}. Look at the environment's reward"
    groups: dict[str, set[float]] = {}
    for uid, score in zip(batch.uids, scores.tolist(), strict=True):
        groups.setdefault(uid, set()).add(score)
    if all(len(each) == 1 for each in groups.values()):
        return "groups", (
            "the samples of each prompt got the same reward, so that none is better than another. Take prompts that "
            "are neither too easy nor too hard, or more samples of each (generator.n_samples_per_prompt)"
        )
    return "advantages", "every advantage is 0 although rewards differ. Look at trainer.algorithm.advantage_estimator"
