"""The numbers of a step: what its rewards, advantages and optimizer steps are summed up to, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from skyrl_megatron.algorithms.metrics import GAP, gap_metrics, metric_values
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.rollout.outputs import select_rows
from skyrl_megatron.rollout.rewards import get_metrics_from_generator_output, total_reward
from skyrl_megatron.types import TrainingBatch


def reward_metrics(
    output: GeneratorOutput, uids: Sequence[str], samples: int, adapters: Sequence[str] = ()
) -> dict[str, float]:
    """Return ``reward/…`` over the prompts, with ``samples`` responses each, and what the generator measured.
    ``adapters``: of each row, where they have names: their own come as ``adapter/<name>/…`` too."""
    metrics = _reward_metrics("reward", output, uids, samples)
    for name in dict.fromkeys(adapters):
        rows = [row for row, adapter in enumerate(adapters) if adapter == name]
        own = select_rows(output, rows)
        metrics |= _reward_metrics(f"adapter/{name}", own, [uids[row] for row in rows], samples)
    return metrics | {name: float(value) for name, value in (output["rollout_metrics"] or {}).items()}


def _reward_metrics(of: str, output: GeneratorOutput, uids: Sequence[str], samples: int) -> dict[str, float]:
    scores = get_metrics_from_generator_output(output, uids)
    metrics = {
        f"{of}/zero_variance_groups": zero_variance(output, uids),
        f"{of}/avg_pass_at_{samples}": scores["pass_at_n"],
        f"{of}/avg_raw_reward": scores["avg_score"],
        f"{of}/mean_positive_reward": scores["mean_positive_reward"],
    }
    return {name: value for name, value in metrics.items() if value is not None}


def zero_variance(output: GeneratorOutput, uids: Sequence[str]) -> float | None:
    """Return the share of prompts with several responses whose rewards are all the same; None without such prompts."""
    last, totals = output.get("is_last_step"), dict[str, list[float]]()
    rewards = output["rewards"]
    for row, uid in enumerate(uids):
        if last is None or last[row]:
            totals.setdefault(uid, []).append(total_reward(rewards[row]))
    several = [each for each in totals.values() if len(each) > 1]
    return sum(max(each) == min(each) for each in several) / len(several) if several else None


def logprob_diff_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return moments of |log-prob of the trainer − of the engine|, nats, over the tokens trained on; {} without the
    engine's."""
    if batch.rollout_logprobs is None or batch.old_logprobs is None:
        return {}
    found = metric_values(gap_metrics(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask))
    return {f"policy/{name}": value for name, value in found.items()}


def sequence_lengths(output: GeneratorOutput) -> np.ndarray:
    """Return the tokens of each row's prompt and response, [B] int."""
    pairs = zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    return np.asarray([len(prompt) + len(response) for prompt, response in pairs], dtype=np.int64)


def route_bytes(batch: TrainingBatch) -> int:
    """Return the bytes that the routes of a batch take."""
    return sum(routes.nbytes for routes in batch.rollout_routes if routes is not None)


def advantage_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return means of the advantages over the tokens trained on, and of the rewards behind them."""
    assert batch.advantages is not None and batch.rewards is not None
    advantages = batch.advantages[batch.loss_mask > 0]
    return {
        "loss/avg_final_rewards": batch.rewards.sum(dim=1).mean().item(),
        "loss/avg_raw_advantages": advantages.mean().item() if len(advantages) else 0.0,
        "loss/avg_raw_advantages_abs": advantages.abs().mean().item() if len(advantages) else 0.0,
    }


def value_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return the share of the returns' variance that the values before the update explain, over the tokens trained on:
    1 of a perfect critic, 0 of one that says the mean, negative of a worse one."""
    assert batch.values is not None and batch.returns is not None
    taken = batch.loss_mask > 0
    values, returns = batch.values[taken], batch.returns[taken]
    if len(returns) < 2 or not returns.var() > 0:
        return {}
    explained = 1 - (returns - values).var() / returns.var()
    return {"critic/explained_variance": explained.item(), "critic/returns_mean": returns.mean().item()}


def optimizer_metrics(role: str, results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return ``policy/…`` or ``critic/…`` of a step, and ``adapter/<name>/…`` of named adapters: means over its
    optimizer steps; of extremes the extreme, of the rate the last, of the gap to the engine the first: later ones are
    of other weights."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]
        if GAP in name:
            value = values[0]
        elif name.endswith("_min"):
            value = min(values)
        elif name.endswith("_max") or name.startswith("peak_"):
            value = max(values)
        elif name == "lr" or name.endswith("/lr"):
            value = values[-1]
        elif name == "skipped" or name.endswith("/skipped"):
            value = sum(values)
        else:
            value = sum(values) / len(values)
        own = name.startswith("adapter/")
        metrics[name if own else f"{role}/{f'{role}_lr' if name == 'lr' else name}"] = value
    return metrics
