"""The batch of a step: token rewards, masks of rows without a learning signal, and the metrics of the step.

Scorers add what models other than policy, reference and critic say of a batch, such as teachers. A step asks each
twice: :meth:`Scorer.score` with the passes of reference and policy, and :meth:`Scorer.reward` once the
policy's log-probs are known. A trainer's ``scorers`` is a list to which a subclass may add.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages import rows_with_variance
from skyrl_megatron.algorithms.groups import Trajectories
from skyrl_megatron.algorithms.length_penalty import LengthPenalty
from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.algorithms.metrics import MISMATCH, metric_values, mismatch_metrics
from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.config import SkyRLTrainConfig, TrainerConfig
from skyrl_megatron.config.roles import distils_in_reward, teacher_names
from skyrl_megatron.config.rules.exact_rules import rollout_gap_limit
from skyrl_megatron.config.schema.algorithm import correction_enabled
from skyrl_megatron.data.splitting import mini_batches, rows_by_adapter
from skyrl_megatron.errors import AlgorithmError, SkyRLMegatronWarning
from skyrl_megatron.plugins import SCORERS
from skyrl_megatron.rollout.dynamic_sampling import zero_variance
from skyrl_megatron.rollout.interface import GeneratorOutput, get_metrics_from_generator_output, has_token_rewards
from skyrl_megatron.rollout.outputs import select_rows
from skyrl_megatron.types import OF_RESPONSES, OF_ROWS, TrainingBatch

if TYPE_CHECKING:
    from skyrl_megatron.trainer.event_loop import LoopThread
    from skyrl_megatron.workers.worker_group import WorkerGroup

SCORERS.register_path("teacher", "skyrl_megatron.trainer.teachers:TeacherScorer")


def reward_metrics(
    output: GeneratorOutput, uids: Sequence[str], samples: int, adapters: Sequence[str] = ()
) -> dict[str, float]:
    """Return ``reward/…`` over the prompts, with ``samples`` responses each, and the metrics of the generator.
    ``adapters``: the adapter name of each row, [] without named adapters; each gets ``adapter/<name>/…`` as well."""
    metrics = _reward_metrics("reward", output, uids, samples)
    for name in dict.fromkeys(adapters):
        rows = [row for row, adapter in enumerate(adapters) if adapter == name]
        of_adapter = select_rows(output, rows)
        metrics |= _reward_metrics(f"adapter/{name}", of_adapter, [uids[row] for row in rows], samples)
    return metrics | {name: float(value) for name, value in (output["rollout_metrics"] or {}).items()}


def _reward_metrics(of: str, output: GeneratorOutput, uids: Sequence[str], samples: int) -> dict[str, float]:
    scores = get_metrics_from_generator_output(output, uids)
    metrics = {
        f"{of}/zero_variance_groups": zero_variance(output, list(uids)),
        f"{of}/avg_pass_at_{samples}": scores["pass_at_n"],
        f"{of}/avg_raw_reward": scores["avg_score"],
        f"{of}/mean_positive_reward": scores["mean_positive_reward"],
    }
    return {name: value for name, value in metrics.items() if value is not None}


def trajectories_of(batch: TrainingBatch) -> Trajectories:
    """Return the trajectories that the rows of a batch belong to."""
    return Trajectories(batch.is_last_step, len(batch))


def trained_trajectories(batch: TrainingBatch, mask: Tensor) -> Tensor:
    """Return [trajectories] bool: whether ``mask`` [R] bool holds for a token of each."""
    return trajectories_of(batch).any(batch.responses.any(mask))


def rewards_of_trajectories(batch: TrainingBatch, mask: Tensor | None = None) -> Tensor:
    """Return the reward of each trajectory, [trajectories] float32: the sum over the tokens of all its rows, or over
    those in ``mask`` [R] bool."""
    assert batch.rewards is not None
    rewards = batch.rewards if mask is None else keep_masked(batch.rewards, mask)
    return trajectories_of(batch).sum(batch.responses.sum(rewards)).to(batch.rewards.dtype)


def trajectory_rewards(batch: TrainingBatch) -> Tensor | None:
    """Return the reward of each row's trajectory, [B]; None before there are rewards."""
    return None if batch.rewards is None else rewards_of_trajectories(batch)[trajectories_of(batch).ids]


def logprob_diff_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return statistics of the log-prob mismatch |trainer − engine|, in nats, over the trained tokens; {} if the
    engine returned no log-probs."""
    if batch.rollout_logprobs is None or batch.old_logprobs is None:
        return {}
    values = metric_values(mismatch_metrics(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask))
    return {f"policy/{name}": value for name, value in values.items()}


def sequence_lengths(output: GeneratorOutput) -> np.ndarray:
    """Return the number of prompt and response tokens of each row, [B] int64."""
    pairs = zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    return np.asarray([len(prompt) + len(response) for prompt, response in pairs], dtype=np.int64)


def route_bytes(batch: TrainingBatch) -> int:
    """Return the bytes of the recorded routing of a batch."""
    return sum(routes.nbytes for routes in batch.rollout_routes if routes is not None)


def advantage_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return means of the advantages over the trained tokens, and the mean reward of the trajectories that did not
    fail."""
    assert batch.advantages is not None and batch.rewards is not None
    advantages = batch.advantages[batch.loss_mask]
    rewards = rewards_of_trajectories(batch)[trained_trajectories(batch, batch.response_mask)]
    return {
        "loss/avg_final_rewards": rewards.mean().item() if len(rewards) else 0.0,
        "loss/avg_raw_advantages": advantages.mean().item() if len(advantages) else 0.0,
        "loss/avg_raw_advantages_abs": advantages.abs().mean().item() if len(advantages) else 0.0,
    }


def value_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return the share of the returns' variance that the values before the update explain, over the trained tokens.

    It is 1 for a perfect critic, 0 for one that predicts the mean, and negative for a worse one.
    """
    assert batch.values is not None and batch.returns is not None
    values, returns = batch.values[batch.loss_mask], batch.returns[batch.loss_mask]
    if len(returns) < 2 or not returns.var() > 0:
        return {}
    explained = 1 - (returns - values).var() / returns.var()
    return {"critic/explained_variance": explained.item(), "critic/returns_mean": returns.mean().item()}


def optimizer_metrics(role: str, results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return ``policy/…`` or ``critic/…`` of a step, and ``adapter/<name>/…`` of named adapters.

    A metric is the mean over the optimizer steps, with these exceptions: minima and maxima stay extremes, the learning
    rate is the last one, ``skipped`` is a sum, and the log-prob mismatch to the engine is that of the first optimizer
    step.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]
        if MISMATCH in name:
            value = values[0]  # later optimizer steps use other weights than the engine
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
        has_prefix = name.startswith("adapter/")
        metrics[name if has_prefix else f"{role}/{f'{role}_lr' if name == 'lr' else name}"] = value
    return metrics


class LearningSignal:
    """Warns of batches without a learning signal, once for each reason."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def look(self, step: int, batch: TrainingBatch) -> None:
        """Check the batch of ``step``, whose advantages have been computed."""
        if (missing := missing_signal(batch)) is not None:
            kind, why = missing
            self._warn(kind, f"step {step} learns nothing from its rewards: {why}")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, SkyRLMegatronWarning, stacklevel=4)


def missing_signal(batch: TrainingBatch) -> tuple[str, str] | None:
    """Return (kind, reason) if all trained tokens have advantage 0, otherwise None."""
    assert batch.advantages is not None and batch.rewards is not None
    if not batch.loss_mask.any():
        return "masked", "all of its tokens are masked, because the samples failed, were truncated, or were not finite"
    if torch.any((batch.advantages != 0) & batch.loss_mask):
        return None
    trajectories, scores = trajectories_of(batch), rewards_of_trajectories(batch, batch.response_mask)
    if scores.max() == scores.min():
        return "equal", f"all {len(scores)} samples got reward {scores[0].item():g}. Check the environment's reward"
    groups: dict[str, set[float]] = {}
    for uid, score in zip(trajectories.of_last(batch.uids), scores.tolist(), strict=True):
        groups.setdefault(uid, set()).add(score)
    if all(len(of_prompt) == 1 for of_prompt in groups.values()):
        return "groups", (
            "the samples of each prompt got the same reward, so none is better than another. Use prompts that are "
            "neither too easy nor too hard, or raise generator.n_samples_per_prompt"
        )
    return "advantages", "every advantage is 0 although rewards differ. Check trainer.algorithm.advantage_estimator"


def with_token_rewards(output: GeneratorOutput) -> GeneratorOutput:
    """Return ``output`` with a reward for each token. A single reward of a row is put on its last token."""
    rewards: list[Any] = list(output["rewards"])
    for row, response in enumerate(output["response_ids"]):
        if not has_token_rewards(reward := rewards[row]):
            rewards[row] = np.zeros(len(response))
            rewards[row][-1:] = float(reward)
    return {**output, "rewards": rewards}


def with_length_penalty(batch: TrainingBatch, penalty: LengthPenalty) -> dict[str, float]:
    """Subtract the penalty of each trajectory that is trained on from the reward of its last token, and return the
    mean. Its length is the number of its sampled tokens that are trained on, over all its rows."""
    assert batch.rewards is not None
    trajectories, trained = trajectories_of(batch), trained_trajectories(batch, batch.loss_mask)
    if not trained.any():
        return {}
    lengths = trajectories.sum(batch.responses.sum(batch.loss_mask)).to(batch.rewards.dtype)
    scores = rewards_of_trajectories(batch)
    uids = [uid for uid, kept in zip(trajectories.of_last(batch.uids), trained.tolist(), strict=True) if kept]
    penalties = penalty.penalties(lengths[trained], scores[trained], uids)
    batch.rewards[last_tokens(batch)[trajectories.last[trained]]] -= penalties.to(batch.rewards.dtype)
    return {"loss/avg_length_penalty": penalties.mean().item()}


def mask_zero_variance_groups(batch: TrainingBatch) -> float:
    """Mask the rows of prompts whose trajectories all have the same reward, unless that masks everything; return their
    number."""
    assert batch.rewards is not None
    trajectories, trained = trajectories_of(batch), trained_trajectories(batch, batch.loss_mask)
    scores = rewards_of_trajectories(batch, batch.response_mask)
    varied = rows_with_variance(scores, trajectories.of_last(batch.uids), trained[:, None])[trajectories.ids]
    if (mask := batch.loss_mask & batch.responses.spread(varied)).any():
        batch.loss_mask = mask
    return float((~varied).sum())


def last_tokens(batch: TrainingBatch) -> Tensor:
    """Return the place in [R] of the last response token of each row, [B] int64; of a row without one, that before."""
    return torch.from_numpy(np.cumsum(batch.response_lengths) - 1)


def mini_batch_size(trainer: TrainerConfig, role: str) -> int:
    """Return the prompts of a mini-batch of ``policy`` or ``critic``."""
    return trainer.critic_mini_batch_size if role == "critic" else trainer.policy_mini_batch_size


def for_each_adapter(
    batch: TrainingBatch, names: Sequence[str], change: Callable[[TrainingBatch], dict[str, float]]
) -> dict[str, float]:
    """Apply ``change``, which sets tensors of a batch, to the rows of each adapter.

    Returns the sums of the counts that ``change`` returns, and for named adapters the mean reward and advantage as
    ``adapter/<name>/…``.
    """
    if not batch.adapters:
        return change(batch)
    metrics: dict[str, float] = {}
    for name, rows in rows_by_adapter(batch, names).items():
        if not len(rows):
            continue
        part, index = batch.select(rows), torch.from_numpy(rows)
        tokens = batch.responses.select(torch.arange(len(batch.loss_mask)), rows)
        before = {key: (value, value._version) for key, value in _tensors(part)}
        for counted, count in change(part).items():
            metrics[counted] = metrics.get(counted, 0.0) + count
        # ``change`` may set any tensor of its rows. Those that it left alone are in the object store as they are.
        for key, value in _tensors(part):
            tensor, version = before.get(key, (None, 0))
            if value is not tensor or value._version != version:
                if getattr(batch, key) is None:
                    size = len(batch.loss_mask) if key in OF_RESPONSES else len(batch)
                    setattr(batch, key, value.new_zeros(size, *value.shape[1:]))
                getattr(batch, key).index_copy_(0, tokens if key in OF_RESPONSES else index, value)
        for metric, mean in advantage_metrics(part).items():
            metrics[metric.replace("loss/", f"adapter/{name}/")] = mean
    return metrics


def _tensors(batch: TrainingBatch) -> list[tuple[str, Tensor]]:
    """Return the tensors of a batch that estimators may set, by their names."""
    values = [(name, getattr(batch, name)) for name in (*OF_RESPONSES, *OF_ROWS)]
    return [(name, value) for name, value in values if value is not None]


def training_logprobs_suffice(cfg: SkyRLTrainConfig, batch: TrainingBatch) -> bool:
    """Return whether the training pass itself can compute the log-probs before the update.

    This holds if one optimizer step uses the whole batch, only a built-in loss reads these log-probs, and nothing in
    the training pass is random. An off-policy correction and a KL or teacher term in the rewards need them earlier.
    """
    return training_pass_scores(cfg) and len(mini_batches(batch, cfg.trainer.policy_mini_batch_size)) == 1


def training_pass_scores(cfg: SkyRLTrainConfig) -> bool:
    """Return :func:`training_logprobs_suffice` for a batch that one optimizer step uses whole."""
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    objective = PolicyObjective(algorithm)
    kwargs, lora = trainer.policy.megatron_config.transformer_config_kwargs, trainer.policy.model.lora
    random = any(kwargs.get(name) for name in ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"))
    return (
        objective.builtin is not None
        and not correction_enabled(objective.correction)
        and not algorithm.use_kl_in_reward
        and not distils_in_reward(cfg)
        and not random
        and not (lora.rank and lora.dropout)
        and trainer.update_epochs_per_batch == 1
        and rollout_gap_limit(cfg) is None
    )


def check_rollout_gap(metrics: Mapping[str, float], cfg: SkyRLTrainConfig, step: int) -> None:
    """Raise AlgorithmError, or warn, if a mismatch of :func:`logprob_diff_metrics` is larger than allowed. NaN is."""
    limit, gap = rollout_gap_limit(cfg), metrics.get(f"policy/{MISMATCH}_max")
    if limit is None or gap is None or gap <= limit:
        return
    text = (
        f"step {step}: log-probs of engine and trainer differ by up to {gap:.3g} nats, more than "
        f"trainer.max_rollout_gap={limit:g}: find the cause with skyrl-megatron explain-mismatch"
    )
    if cfg.trainer.rollout_gap_exceeded == "error":
        raise AlgorithmError(text)
    warnings.warn(text, SkyRLMegatronWarning, stacklevel=2)


class Scorer(Protocol):
    """Changes fields of a batch, and measures what it did."""

    phase: str
    """Name of the time that it takes, in ``timing/…``."""
    reads_logprobs: bool
    """Whether :meth:`reward` reads the policy's log-probs before the update."""
    gives_signal: bool
    """Whether the policy learns from it also where all rewards of the environment are the same."""

    def score(self, batch: TrainingBatch) -> dict[str, float]:
        """Add scores to the batch, and return metrics."""

    def reward(self, batch: TrainingBatch) -> dict[str, float]:
        """Change the rewards of tokens, and return metrics."""


def run_scorers(
    cfg: SkyRLTrainConfig, roles: Mapping[str, WorkerGroup], loop: LoopThread, dataset: Any
) -> list[Scorer]:
    """Return the scorers that the configuration asks for. ``roles``: the run's, in which the ranks of teachers will be
    once they are built."""
    demonstrates = cfg.trainer.algorithm.distillation.demonstration is not None
    if not (teacher_names(cfg) or demonstrates or distils_in_reward(cfg)):
        return []
    return [SCORERS.require("teacher")(cfg, roles, loop, dataset)]
