"""Training on preferences: rows with a better and a worse answer → optimizer steps that compare policy and reference.

:class:`PreferenceTrainer` is supervised training (``sft.py``) with another batch and another loss
(``preference_losses.py``). The reference is a model of its own (``trainer.ref``, by default the initial policy),
or the policy without its adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from bridges.families import get_family
from bridges.source import FolderChanges
from skyrl_megatron.algorithms.metrics import Mean, merge_metrics, metric_values
from skyrl_megatron.config.derive import preferences
from skyrl_megatron.config.hf_model import cached_folder, read_hf_config
from skyrl_megatron.config.schema.supervised import DPOConfig
from skyrl_megatron.data.vocabulary import named_tokens, padding_token
from skyrl_megatron.progress import current_task
from skyrl_megatron.trainer.callbacks import notify
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron_supervised.preference_losses import (
    KL,
    REFERENCE,
    Answers,
    PreferenceObjective,
    RewardObjective,
    summed_rows,
)
from skyrl_megatron_supervised.preference_rows import other_answers, preference_batch
from skyrl_megatron_supervised.reference_cache import ReferenceCache
from skyrl_megatron_supervised.sft_trainer import SFTTrainer

MEASURED = ("policy/rewards/", "policy/logps/")
"""Metrics of the ranks that have no prefix in the log."""


class PreferenceTrainer(SFTTrainer):
    """The loop over policy and reference. ``train_dataset``, ``eval_dataset``: ``PairRows`` or ``LabelledRows``."""

    SECTION: ClassVar[str] = "dpo"
    """Prefix of the loss in the metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = preferences(self.cfg) or DPOConfig()
        self.objective: PreferenceObjective = PreferenceObjective(self.settings)
        self.caches: dict[str, ReferenceCache] = {}
        """``train`` and ``eval``, with ``dpo.reference_cache``."""
        self.rows: Sequence[Mapping[str, Any]] = ()
        """The rows of the step."""

    # ------------------------------------------------------------------ a step
    def collect_experience(self) -> TrainingBatch:
        """Return the answers of the step's rows."""
        with self.phases("read_rows"):
            self.rows = next(self.rollouts.prompts)
            batch = preference_batch(self.rows)
        self.keep_samples(batch)
        return batch

    def update_on(self, batch: TrainingBatch) -> None:
        """Take the optimizer steps of a training step."""
        with self.phases("fwd_logprobs_values_reward"):
            self.add_reference(batch, self.rows)
        self.train_policy(batch)
        if KL in batch.metadata:
            self.metrics["dpo/kl"] = batch.metadata[KL]

    def train_policy(self, batch: TrainingBatch) -> None:
        """Take the optimizer steps, and add their metrics."""
        with self.phases("train_critic_and_policy"):
            self.train_critic_and_policy(batch)
        for name in [name for name in self.metrics if name.startswith(MEASURED)]:
            self.metrics[name.removeprefix("policy/")] = self.metrics.pop(name)
        self.metrics[f"{self.SECTION}/loss"] = self.metrics["policy/policy_loss"]

    def add_reference(self, batch: TrainingBatch, rows: Sequence[Mapping[str, Any]], data: str = "train") -> None:
        """Add to the batch of ``rows``, items of the data set ``data``, what the loss reads of the reference."""
        assert batch.preferences is not None
        cache = self.caches.get(data)
        if cache is not None and cache.is_complete:
            sums, reference = cache.sums(rows), cache.others(rows)
        else:
            sums, reference = self.reference_sums(rows)
        batch.preferences[:, REFERENCE] = torch.from_numpy(sums)
        if not self.settings.paired:
            others = other_answers(rows)
            policy = float(summed_rows(others, self.policy_logprobs(others)).sum())
            batch.metadata[KL] = max((policy - float(reference.sum())) / len(rows), 0.0)

    def reference_sums(self, rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the summed log-probs of the reference, float64: of each sequence of ``rows`` [B], and of the answers
        in ``others`` of each row [N], zeros for pairs."""
        batch, reference = preference_batch(rows), np.zeros(len(rows))
        sums = summed_rows(batch, self.reference_logprobs(batch)).numpy()
        if not self.settings.paired:
            others = other_answers(rows)
            of_each = summed_rows(others, self.reference_logprobs(others)).numpy()
            np.add.at(reference, [int(uid) for uid in others.uids], of_each)
        return sums, reference

    def before_training(self) -> None:
        """Fill the caches of the reference, which then ends, and evaluate the initial policy."""
        for cache in self.caches.values():
            if not cache.is_complete:
                with current_task("log-probs of the reference"):
                    cache.fill(self.reference_sums, self.cfg.trainer.eval_batch_size)
        if self.caches and self.ref is not None:
            self.roles.pop("ref").stop()
        super().before_training()

    def policy_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the policy's log-probs [R]."""
        return self.policy.compute_logprobs(batch, "policy log-probs")

    # ------------------------------------------------------------------ evaluation
    def eval(self) -> dict[str, float]:
        """Return the loss and the rewards of held-out rows, ``eval/<data set>/…`` and of ``all``; {} without data."""
        if self.eval_dataset is None:
            return {}
        measurements: dict[str, list[Any]] = {}
        size = self.cfg.trainer.eval_batch_size
        with self.phases("eval"):
            for start in range(0, len(self.eval_dataset), size):
                self.stop.check()
                rows = [self.eval_dataset[row] for row in range(start, min(start + size, len(self.eval_dataset)))]
                batch = preference_batch(rows)
                self.add_reference(batch, rows, "eval")
                values = self.policy_values(batch)
                names = np.asarray([str(row["name"]) for row in rows for _ in row["sequences"]])
                for name in dict.fromkeys(names.tolist()):
                    of_name = np.flatnonzero(names == name)
                    of_rows = batch.responses.select(values, of_name)
                    measured = self._measured(batch.select(of_name), of_rows)
                    for key in (name, "all"):
                        measurements.setdefault(key, []).append(measured)
        metrics = {
            f"eval/{key}/{name}": value
            for key, parts in measurements.items()
            for name, value in metric_values(merge_metrics(*parts)).items()
        }
        self.metrics |= metrics
        notify(self.callbacks, "on_evaluate", self, metrics)
        return metrics

    def policy_values(self, batch: TrainingBatch) -> torch.Tensor:
        """Return what the loss reads of the policy, [R]."""
        return self.policy_logprobs(batch)

    def _measured(self, batch: TrainingBatch, values: torch.Tensor) -> dict[str, Any]:
        assert batch.preferences is not None
        sums, counts = summed_rows(batch, values), batch.responses.sum(batch.loss_mask).long()
        answers = Answers.of(sums, counts, batch.preferences, batch.uids)
        losses = self.objective.losses(answers, batch.metadata.get(KL, 0.0))
        return {"loss": Mean(losses.sum(), losses.new_tensor(len(losses))), **self.objective.measured(answers)}


class RewardTrainer(PreferenceTrainer):
    """The loop over a reward model, which has the policy's ranks. ``train_dataset``, ``eval_dataset``:
    ``ScoredRows``."""

    SECTION: ClassVar[str] = "reward"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.objective = RewardObjective()

    def update_on(self, batch: TrainingBatch) -> None:
        """Take the optimizer steps of a training step."""
        self.train_policy(batch)

    def add_reference(self, batch: TrainingBatch, rows: Sequence[Mapping[str, Any]], data: str = "train") -> None:
        """Scores are compared with each other only."""

    def policy_values(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the scores, [R]."""
        return self.policy.start_values(batch)()

    def folder_changes(self, role: str) -> FolderChanges:
        """Return what ``AutoModelForSequenceClassification`` and the folder's tokenizer need.

        transformers reads the score at the last token that is not padding, so the token for padding is none that ends
        an answer, and the tokenizer pads with it too.
        """
        folder = cached_folder(self.cfg, weights=False)
        ends = {*self.train_dataset.chat.stop_ids, *(named_tokens(folder, "eos_token_id") if folder else ())}
        padding = padding_token(self.tokenizer, ends)
        family = get_family(str((read_hf_config(self.cfg) or {}).get("model_type")))
        config = {
            "architectures": [family.architecture.replace("ForCausalLM", "ForSequenceClassification")],
            "id2label": {"0": "score"},
            "label2id": {"score": 0},
            "pad_token_id": padding,
        }
        return FolderChanges(config, str(self.tokenizer.convert_ids_to_tokens(padding)))
