"""Preparing what a step trains on: a reward for each token, rows that teach nothing masked, the batch dumped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages.groups import varied_rows
from skyrl_megatron.data.splitting import rows_by_adapter
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.trainer.metrics import advantage_metrics
from skyrl_megatron.types import TokenSupport, TrainingBatch


def with_token_rewards(output: GeneratorOutput) -> GeneratorOutput:
    """Return ``output`` with a reward for each token: a row's single reward stands on its last token."""
    given: Sequence[float | list[float]] = output["rewards"]
    rewards = [
        reward if isinstance(reward, list) else [*[0.0] * (len(response) - 1), float(reward)][: len(response)]
        for reward, response in zip(given, output["response_ids"], strict=True)
    ]
    return {**output, "rewards": rewards}


def mask_groups_without_variety(batch: TrainingBatch) -> float:
    """Mask the rows of prompts whose rewards are all equal, unless that leaves nothing; return how many there are."""
    assert batch.rewards is not None
    scores = (batch.rewards * batch.response_mask).sum(dim=1)
    varied = varied_rows(scores, batch.uids, batch.loss_mask)
    if (batch.loss_mask * varied[:, None]).any():
        batch.loss_mask *= varied[:, None]
    return float((~varied).sum())


def for_each_adapter(
    batch: TrainingBatch, names: Sequence[str], change: Callable[[TrainingBatch], dict[str, float]]
) -> dict[str, float]:
    """Let ``change`` set tensors of the rows of each adapter, and put them into ``batch``. Returns the sums of what it
    counts; of named adapters also mean reward and advantage, as ``adapter/<name>/…``."""
    if not batch.adapters:
        return change(batch)
    found: dict[str, float] = {}
    for name, rows in rows_by_adapter(batch, names).items():
        if not len(rows):
            continue
        part, index = batch.select(rows), torch.from_numpy(rows)
        for counted, value in change(part).items():
            found[counted] = found.get(counted, 0.0) + value
        for item in dataclasses.fields(batch):
            value = getattr(part, item.name)
            if isinstance(value, Tensor):
                if getattr(batch, item.name) is None:
                    setattr(batch, item.name, value.new_zeros(len(batch), *value.shape[1:]))
                getattr(batch, item.name)[index] = value
        for metric, value in advantage_metrics(part).items():
            found[metric.replace("loss/", f"adapter/{name}/")] = value
    return found


def dump_batch(batch: TrainingBatch, folder: Path, step: int) -> None:
    """Write the tensors of ``batch`` to ``folder/global_step_N.safetensors``; of ``rollout_support`` the vocabulary
    entries, and how many each response token has, row after row."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    fields = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}
    tensors = {name: value.contiguous() for name, value in fields.items() if isinstance(value, Tensor)}
    if batch.rollout_support:
        joined = TokenSupport.joined(batch.rollout_support)
        tensors["rollout_support_ids"] = torch.from_numpy(joined.ids.astype("int32"))
        tensors["rollout_support_counts"] = torch.from_numpy(joined.counts)
    save_file(tensors, str(folder / f"global_step_{step}.safetensors"))
