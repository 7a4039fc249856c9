"""Preparing what a step trains on: a reward for each token, rows that teach nothing masked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages.groups import varied_rows
from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.schema.algorithm import correction_enabled
from skyrl_megatron.data.splitting import mini_batches, rows_by_adapter
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.trainer.metrics import advantage_metrics
from skyrl_megatron.types import TrainingBatch


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


def training_pass_is_enough(cfg: SkyRLTrainConfig, batch: TrainingBatch) -> bool:
    """Return whether the log-probs before the update are, exactly, those of the training pass.

    One optimizer step is taken on the whole batch, nothing but a built-in loss reads them, and nothing in the training
    pass is random. An off-policy correction, the KL or a teacher in the rewards read them before it.
    """
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    objective = PolicyObjective(algorithm)
    kwargs, lora = trainer.policy.megatron_config.transformer_config_kwargs, trainer.policy.model.lora
    random = any(kwargs.get(name) for name in ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"))
    return (
        objective.builtin is not None
        and not correction_enabled(objective.correction)
        and not algorithm.use_kl_in_reward
        and not algorithm.distillation.reward_coef
        and not random
        and not (lora.rank and lora.dropout)
        and trainer.update_epochs_per_batch == 1
        and len(mini_batches(batch, trainer.policy_mini_batch_size)) == 1
    )
