"""Mini-batches of a step."""

from __future__ import annotations

from itertools import groupby

from skyrl_megatron.types import TrainingBatch

PROMPT_UIDS = "prompt_uids"
"""Metadata of a batch: the prompt of each row, also of rows that have a uid of their own since they failed."""


def mini_batches(batch: TrainingBatch, prompts: int) -> list[TrainingBatch]:
    """``batch`` cut behind every ``prompts`` prompts: rows of a prompt stand together, however many there are."""
    ends = []
    row = 0
    uids = batch.metadata.get(PROMPT_UIDS, batch.uids)
    for number, (_, rows) in enumerate(groupby(uids), 1):
        row += len(list(rows))
        if number % prompts == 0:
            ends.append(row)
    if not ends or ends[-1] != row:
        ends.append(row)
    if len(ends) == 1:
        return [batch]
    starts = [0, *ends[:-1]]
    return [batch.select(range(start, end)) for start, end in zip(starts, ends, strict=True)]


def counted_rows(batch: TrainingBatch) -> TrainingBatch:
    """The rows with a token to train on: the others add nothing to loss or gradients. All, when there is none."""
    rows = batch.loss_mask.any(dim=1).nonzero().flatten()
    return batch.select(rows.numpy()) if 0 < len(rows) < len(batch) else batch
