"""What a step makes of responses: batches and their metrics. Plain functions of the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from skyrl_megatron.algorithms.advantages.groups import varied_rows
from skyrl_megatron.algorithms.metrics import metric_values, moments
from skyrl_megatron.errors import DistributedError
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.rollout.rewards import get_metrics_from_generator_output
from skyrl_megatron.types import TrainingBatch

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

type Metrics = dict[str, float]


def total_steps(cfg: SkyRLTrainConfig, steps_per_epoch: int) -> int:
    """Steps of the whole run."""
    steps = steps_per_epoch * cfg.trainer.epochs
    limit = cfg.trainer.max_training_steps
    return steps if limit is None else min(steps, limit)


def updates_per_step(cfg: SkyRLTrainConfig) -> int:
    """Optimizer steps of the policy in one training step."""
    trainer = cfg.trainer
    return trainer.train_batch_size // trainer.policy_mini_batch_size * trainer.update_epochs_per_batch


def rollout_gap(batch: TrainingBatch) -> Metrics:
    """|log-prob of the trainer − log-prob of the engine| over the tokens trained on; {} without the engine's."""
    if batch.rollout_logprobs is None or batch.old_logprobs is None:
        return {}
    name = "policy/rollout_train_logprobs_abs_diff"
    return metric_values(moments(name, (batch.old_logprobs - batch.rollout_logprobs).abs(), batch.loss_mask))


def mask_groups_without_variety(batch: TrainingBatch) -> float:
    """Take rows out of the loss whose prompt got the same reward throughout; how many. All stay when none would."""
    assert batch.rewards is not None
    scores = (batch.rewards * batch.response_mask).sum(dim=1)
    varied = varied_rows(scores, batch.uids, batch.loss_mask)
    if (batch.loss_mask * varied[:, None]).any():
        batch.loss_mask *= varied[:, None]
    return float((~varied).sum())


def advantage_metrics(batch: TrainingBatch) -> Metrics:
    """Means of advantages over the tokens trained on, and of the rewards that they were made of."""
    assert batch.advantages is not None and batch.rewards is not None
    advantages = batch.advantages[batch.loss_mask > 0]
    return {
        "loss/avg_final_rewards": batch.rewards.sum(dim=1).mean().item(),
        "loss/avg_raw_advantages": advantages.mean().item() if len(advantages) else 0.0,
        "loss/avg_raw_advantages_abs": advantages.abs().mean().item() if len(advantages) else 0.0,
    }


RENAMED = {"lr": "policy_lr"}


def policy_metrics(results: Sequence[Mapping[str, float]], role: str = "policy") -> Metrics:
    """``policy/…``: means over the step's optimizer steps; extremes and the learning rate are what their names say."""
    metrics: Metrics = {}
    for name in results[-1]:
        values = [result[name] for result in results if name in result]
        if name.endswith("_min"):
            value = min(values)
        elif name.endswith("_max") or name.startswith("peak_"):
            value = max(values)
        elif name == "lr":
            value = values[-1]
        elif name == "skipped":
            value = sum(values)
        else:
            value = sum(values) / len(values)
        metrics[f"{role}/{RENAMED.get(name, name)}"] = value
    return metrics


async def within[T](work: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
    """The result of ``work``. Raises DistributedError when it takes longer than ``timeout_s``."""
    try:
        return await asyncio.wait_for(work, timeout_s)
    except TimeoutError as error:
        raise DistributedError(
            f"phase {phase}: not done within {timeout_s:g} s (trainer.phase_timeout_s); raise it, or look for "
            "engines or environments that hang"
        ) from error


def endless(loader: Any) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def token_rewards(output: GeneratorOutput, uids: Sequence[str], samples: int) -> tuple[GeneratorOutput, Metrics]:
    """The output with a reward for each token (a row's one reward stands on its last token), and its metrics."""
    scores = get_metrics_from_generator_output(output, uids)
    metrics = {
        f"reward/avg_pass_at_{samples}": scores["pass_at_n"],
        "reward/avg_raw_reward": scores["avg_score"],
        "reward/mean_positive_reward": scores["mean_positive_reward"],
    }
    rewards = [
        reward if isinstance(reward, list) else [*[0.0] * (len(response) - 1), float(reward)][: len(response)]
        for reward, response in zip(output["rewards"], output["response_ids"], strict=True)
    ]
    rollout = {name: float(value) for name, value in (output["rollout_metrics"] or {}).items()}
    known = {name: value for name, value in metrics.items() if value is not None}
    return {**output, "rewards": rewards}, known | rollout


def dump(batch: TrainingBatch, folder: Path, step: int) -> None:
    """The tensors of a batch as ``folder/global_step_N.safetensors``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    fields = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}
    tensors = {name: value.contiguous() for name, value in fields.items() if isinstance(value, Tensor)}
    save_file(tensors, str(folder / f"global_step_{step}.safetensors"))
