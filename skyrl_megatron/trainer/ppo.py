"""The training loop: prompts → responses → rewards → log-probs → advantages → optimizer steps → weight sync.

Read :meth:`RayPPOTrainer.train_steps` first. Each part of a step is a method; a subclass overrides the parts that it
changes. Scripts written for SkyRL override these by their names there: ``train``, ``build_models``,
``init_weight_sync_state``, ``load_checkpoints``, ``generate``, ``postprocess_generator_output``,
``handle_dynamic_sampling``, ``convert_to_training_input``, ``fwd_logprobs_values_reward``,
``apply_reward_kl_penalty``, ``compute_advantages_and_returns``, ``train_critic_and_policy``, ``eval``,
``save_checkpoints`` and ``save_models``.

What surrounds the loop is in ``training_run.py``, where rollouts come from in ``sources/source.py``, and what happens
when a rank is lost in ``recovery.py``. :class:`FullyAsyncRayPPOTrainer` differs only in the source of its rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import torch

from skyrl_megatron import progress
from skyrl_megatron.algorithms.advantages import batch_advantages, normalize_advantages
from skyrl_megatron.algorithms.kl import penalize_rewards
from skyrl_megatron.algorithms.length_penalty import LengthPenalty
from skyrl_megatron.algorithms.masked import finite_samples
from skyrl_megatron.algorithms.metrics import metric_values
from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.config.resolve import generates_ahead
from skyrl_megatron.config.roles import adapter_names, needs_reference, policy_is_reference
from skyrl_megatron.config.rules.exact_rules import rollout_gap_limit
from skyrl_megatron.data.splitting import (
    MINI_BATCH_PROMPTS,
    PROMPT_UIDS,
    mini_batches,
    parts_with_trained_tokens,
    rows_with_trained_tokens,
    trained_rows,
)
from skyrl_megatron.errors import ConfigError, HostMemoryError, Problem
from skyrl_megatron.plugins import SOURCES
from skyrl_megatron.rollout.interface import GeneratorInput, GeneratorOutput, TrainingPhase
from skyrl_megatron.rollout.outputs import (
    observation_mask,
    prepare_generator_input,
    reward_parts,
    to_training_batch,
)
from skyrl_megatron.sources.source import PromptRollouts
from skyrl_megatron.trainer.callbacks import notify
from skyrl_megatron.trainer.checkpoints import export_due
from skyrl_megatron.trainer.step_batch import (
    advantage_metrics,
    check_rollout_gap,
    for_each_adapter,
    logprob_diff_metrics,
    mask_zero_variance_groups,
    mini_batch_size,
    optimizer_metrics,
    reward_metrics,
    route_bytes,
    sequence_lengths,
    training_logprobs_suffice,
    trajectories_of,
    value_metrics,
    with_length_penalty,
    with_token_rewards,
)
from skyrl_megatron.trainer.stopping import StopRequested
from skyrl_megatron.trainer.training_run import TrainingRun
from skyrl_megatron.types import OWN_LOGPROBS, TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.workers.worker_group import WorkerGroup


class RayPPOTrainer(TrainingRun):
    """The loop over policy, reference, critic and engines. The arguments are those of :class:`TrainingRun`."""

    # ------------------------------------------------------------------ the loop
    def train(self) -> None:
        """Run from loading to the report. Raises StopRequested after Ctrl-C, with everything saved."""
        with self.stop, self.loop:
            try:
                if self.start():
                    notify(self.callbacks, "on_train_start", self)
                    self.train_steps()
                    notify(self.callbacks, "on_train_end", self)
            except (StopRequested, HostMemoryError):
                self.save_on_stop()
                raise
            finally:
                self.finish()

    def train_steps(self) -> None:
        """Take the remaining steps."""
        self.rollouts.start()
        self.finish_last_step()
        while not self.is_last_step:
            self.begin_step()
            with self.recovery.recoverable() as step:
                with self.phases("step"):
                    batch = self.collect_experience()
                    step.train(self.update_on, batch)
                    del batch  # its rows leave the object store before the next ones are sampled
                    self.complete_step()
                    step.run(self.publish)
                self.metrics |= progress.first_step()
                self.end_step()

    def begin_step(self) -> None:
        """Stop here if the user asked for it, or a recorder finds that the run has to end."""
        self.stop.check()
        self.recorders.before_step()
        notify(self.callbacks, "on_step_start", self)

    def collect_experience(self) -> TrainingBatch:
        """Return responses and rewards for a step: sampled now, or taken from the stream (``sources/``)."""
        return self.rollouts.next_batch()

    def update_on(self, batch: TrainingBatch) -> None:
        """Take the optimizer steps of a training step."""
        self.begin_training()
        with self.phases("fwd_logprobs_values_reward"):
            batch = self.fwd_logprobs_values_reward(batch)
            self.metrics |= self.rollouts.staleness_metrics(batch)
        for scorer in self.scorers:
            self.metrics |= scorer.reward(batch)
        self.apply_length_penalty(batch)
        if self.kl_controller is not None:
            batch = self.apply_reward_kl_penalty(batch)
        with self.phases("compute_advantages_and_returns"):
            batch = self.compute_advantages_and_returns(batch)
        self.keep_samples(batch)
        with self.phases("train_critic_and_policy"):
            self.train_critic_and_policy(batch)

    def complete_step(self) -> None:
        """Count the step, and record the position in the data after it."""
        for name, role in self.roles.items():
            self.metrics |= {f"{name}/{key}": value for key, value in role.score_speed().items()}
        self.rollouts.end_step()
        self.metrics |= self.train_dataloader.metrics()
        self.global_step += 1
        self.run_state.position = self.train_dataloader.state_dict()

    def publish(self) -> None:
        """Copy the new weights to where they are due: the reference, a checkpoint, an export, the engines."""
        self.update_reference()
        due = self._is_due(self.cfg.trainer.ckpt_interval) or self.is_last_step
        if due and (self.checkpoints is None or self.checkpoints.saved_step != self.global_step):
            self.save_checkpoints()
        if export_due(self.global_step, self.cfg.trainer.hf_save_interval, is_last=self.is_last_step):
            self.save_models()
        self.sync_weights()

    # ------------------------------------------------------------------ rollouts
    def make_rollouts(self) -> PromptRollouts:
        """Return the source of the rollouts."""
        rollouts: PromptRollouts = SOURCES.require(self.source_name)(self.run_state, self)
        return rollouts

    @property
    def source_name(self) -> str:
        """The name in ``plugins.SOURCES`` of the source of the rollouts."""
        return "oversampled" if self.cfg.trainer.oversampling.ratio else "sampled"

    def sample_batch(self) -> tuple[GeneratorOutput, list[str]]:
        """Return the rows of one batch of prompts and the uid of each row."""
        return self.rollouts.sample()

    def prepare_generator_input(
        self, prompts: Sequence[Any], phase: TrainingPhase
    ) -> tuple[GeneratorInput, list[str]]:
        """Return the generator's input, with every prompt repeated, and the uid of each row."""
        samples, env = self.cfg.generator.n_samples_per_prompt, self.cfg.environment.env_class
        return prepare_generator_input(prompts, samples, None, env, phase, self.global_step)

    def generate(self, generator_input: GeneratorInput) -> GeneratorOutput:
        """Return responses and the rewards of their environments."""
        work: Coroutine[Any, Any, GeneratorOutput] = self.generator.generate(generator_input)
        return self.loop.run(work, "generate", timeout_s=self.cfg.trainer.phase_timeout_s, stop=self.stop)

    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        """Measure rewards and responses, and return the output with a reward for each token."""
        self.sampled.append(sequence_lengths(generator_output))
        samples, adapters = self.cfg.generator.n_samples_per_prompt, self._adapters_of(uids)
        self.metrics |= reward_metrics(generator_output, uids, samples, adapters)
        return with_token_rewards(generator_output)

    def handle_dynamic_sampling(
        self, generator_output: GeneratorOutput, uids: list[str]
    ) -> tuple[GeneratorOutput, list[str]] | None:
        """Return the rows to train on and their uids; None to sample more (``algorithm.dynamic_sampling``)."""
        self.metrics["generate/sampled_batches"] = float(self.sampler.sampled_batches + 1)
        return self.sampler.add(generator_output, uids)

    def note_rows(self, output: GeneratorOutput) -> None:
        """Show the rows that the step trains on to what records the run."""
        self.recorders.on_rollouts(output)

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingBatch:
        """Return the rows as a batch. With ``algorithm.nonfinite=skip`` samples that are not finite are masked."""
        batch = to_training_batch(generator_output, uids)
        batch.metadata |= {PROMPT_UIDS: uids, MINI_BATCH_PROMPTS: mini_batch_size(self.cfg.trainer, "policy")}
        if names := self.estimator.reward_names:
            batch.reward_parts = reward_parts(generator_output, names)
        if self.cfg.trainer.algorithm.observation_loss_coef:
            batch.observation_mask = observation_mask(generator_output, batch)
        batch.adapters = self._adapters_of(uids)
        if batch.rollout_routes:
            self.metrics["generate/route_bytes_per_sample"] = route_bytes(batch) / len(batch)
        trajectories = trajectories_of(batch)
        finite = finite_samples(batch, self.cfg.trainer.algorithm.nonfinite)
        keep = ~trajectories.any(~finite)[trajectories.ids]  # a trajectory is a sample as a whole
        if not keep.all():
            kept = batch.responses.spread(keep)
            batch.loss_mask &= kept
            if batch.observation_mask is not None:
                batch.observation_mask &= kept
        self.metrics["generate/nonfinite_samples"] = float((~keep).sum())
        self.recorders.on_batch(self.global_step + 1, batch, generator_output)
        return batch

    # ------------------------------------------------------------------ scores
    def fwd_logprobs_values_reward(self, batch: TrainingBatch) -> TrainingBatch:
        """Add the reference's log-probs, the critic's values, and the policy's log-probs before the update where they
        are read and the training pass does not compute them itself; then what scorers add, such as teachers. Roles
        with GPUs of their own compute at the same time, others one after another."""
        apart = [
            self._start_scores(name, batch)
            for name in ("ref", "critic")
            if name in self.roles and not self._shares_policy_gpus(name)
        ]
        if policy_is_reference(self.cfg) and needs_reference(self.cfg):
            batch.ref_logprobs = self.policy.start_logprobs(batch, "reference log-probs", adapters=False)()
        if self._shares_policy_gpus("ref"):
            self._start_scores("ref", batch)()
            self.offload_others("policy")
        for scorer in self.scorers:
            with self.phases(scorer.phase):
                self.metrics |= scorer.score(batch)
        self._add_old_logprobs(batch)
        if self._shares_policy_gpus("critic"):  # last: it trains next, and need not be loaded again
            self.offload_others("critic")
            self._start_scores("critic", batch)()
        for finish in apart:
            finish()
        return batch

    def _start_scores(self, name: str, batch: TrainingBatch) -> Callable[[], None]:
        """Start the forward pass of reference or critic. Call the result to wait for it and add it to the batch."""
        role, critic = self.roles[name], name == "critic"
        scores = role.start_values(batch) if critic else role.start_logprobs(batch, "reference log-probs")

        def finish() -> None:
            if critic:
                batch.values = scores()
            else:
                batch.ref_logprobs = scores()

        return finish

    def _add_old_logprobs(self, batch: TrainingBatch) -> None:
        """Add the policy's log-probs before the update if something reads them, and compare them with the engine's.
        Where one optimizer step takes the whole batch, the training pass computes them itself, which saves a pass."""
        algorithm, replays = self.cfg.trainer.algorithm, self._replays_own_routes
        read = (
            algorithm.use_kl_in_reward
            or any(scorer.reads_logprobs for scorer in self.scorers)
            or PolicyObjective(algorithm).needs_old_log_probs
        )
        if replays:
            batch.rollout_routes = []  # those of this pass take the place of the engine's
        if read and self._policy_learns and training_logprobs_suffice(self.cfg, batch):
            batch.metadata[OWN_LOGPROBS] = True
        elif read or rollout_gap_limit(self.cfg) is not None or (replays and self._policy_learns):
            batch.old_logprobs = self._old_logprobs(batch)
            self.metrics |= logprob_diff_metrics(batch)
            check_rollout_gap(self.metrics, self.cfg, self.global_step + 1)

    def _old_logprobs(self, batch: TrainingBatch) -> Tensor:
        """Return the policy's log-probs before the update. With ``moe_routing_replay_source=trainer`` the update
        replays the experts of this pass."""
        if not self._replays_own_routes:
            return self.policy.compute_logprobs(batch, "policy log-probs")
        logprobs, batch.rollout_routes = self.policy.logprobs_and_routes(batch, "policy log-probs")
        return logprobs

    # ------------------------------------------------------------------ advantages
    def apply_length_penalty(self, batch: TrainingBatch) -> None:
        """Subtract the penalty of long responses from their rewards, with ``algorithm.length_penalty``."""
        if penalty := LengthPenalty.of(self.cfg.trainer.algorithm.length_penalty):
            self.metrics |= with_length_penalty(batch, penalty)

    def apply_reward_kl_penalty(self, batch: TrainingBatch) -> TrainingBatch:
        """Subtract the KL to the reference from each token's reward, and update its coefficient."""
        assert self.kl_controller is not None and batch.rewards is not None
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        algorithm = self.cfg.trainer.algorithm
        batch.rewards, measured = penalize_rewards(
            batch.rewards,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.loss_mask,
            self.kl_controller.value,
            algorithm.kl_estimator_type,
            trajectories := trajectories_of(batch),
            rows=batch.responses,
        )
        metrics = metric_values(measured)
        self.kl_controller.update(metrics.get("avg_kl", 0.0), len(trajectories))
        self.metrics |= {f"loss/{name}": value for name, value in metrics.items()}
        self.metrics["loss/kl_coef"] = self.kl_controller.value
        return batch

    @torch.no_grad()
    def compute_advantages_and_returns(self, batch: TrainingBatch) -> TrainingBatch:
        """Add advantages and returns by the configured estimator, for the rows of each adapter separately."""
        self.metrics |= for_each_adapter(batch, adapter_names(self.cfg), self._add_advantages)
        self.metrics |= advantage_metrics(batch)
        if not any(scorer.gives_signal for scorer in self.scorers):
            self.learning_signal.look(self.global_step + 1, batch)
        return batch

    def _add_advantages(self, batch: TrainingBatch) -> dict[str, float]:
        algorithm, metrics = self.cfg.trainer.algorithm, {}
        assert batch.rewards is not None
        if algorithm.zero_variance_filter:
            metrics["loss/zero_variance_rows"] = mask_zero_variance_groups(batch)
        batch.advantages, batch.returns = batch_advantages(
            batch,
            algorithm.advantage_estimator,
            algorithm,
            grpo_norm_by_std=algorithm.grpo_norm_by_std,
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
            **self.estimator.arguments(lambda: self.train_dataset.roles_of(batch.metadata[PROMPT_UIDS])),
        )
        if algorithm.advantage_batch_normalize:
            batch.advantages = normalize_advantages(batch.advantages, batch.loss_mask)
        return metrics

    # ------------------------------------------------------------------ the update
    def keep_samples(self, batch: TrainingBatch) -> None:
        """Let the recorders see the batch before the update. They may have log-probs computed here that only the
        training pass would compute, unless the policy is offloaded for the critic."""
        loaded = not self._shares_policy_gpus("critic")
        score = (lambda rows: self.policy.compute_logprobs(rows, "samples").numpy()) if loaded else None
        with self.phases("keep_samples"):
            self.recorders.before_update(self.global_step + 1, batch, score)

    def train_critic_and_policy(self, batch: TrainingBatch) -> None:
        """Train the critic, if there is one, and then the policy, which waits for ``critic_warmup_steps``."""
        self.run_state.finite = True
        if self.critic is not None:
            self.offload_others("critic")
            with self.phases("critic_train"):
                results = self._train(self.critic, batch)
            self.metrics |= optimizer_metrics("critic", results) | value_metrics(batch)
            self.offload_others("policy")
        if self._policy_learns:
            with self.phases("policy_train"):
                results = self._train(self.policy, batch)
            self.metrics |= optimizer_metrics("policy", results)
        self.metrics["trainer/tokens"] = float(batch.lengths.sum())

    def _train(self, role: WorkerGroup, batch: TrainingBatch) -> list[dict[str, float]]:
        """Take an optimizer step on each mini-batch of a role, in ``update_epochs_per_batch`` passes."""
        trainer = self.cfg.trainer
        batches, trained = mini_batches(batch, mini_batch_size(trainer, role.name)), trained_rows(batch)
        parts = parts_with_trained_tokens(batches, trained)
        self.metrics[f"trainer/{role.name}_mini_batches_left_out"] = float(len(batches) - len(parts))
        model = trainer.critic if role.name == "critic" else trainer.policy
        if not model.megatron_config.moe_aux_loss_coeff:  # the auxiliary loss counts every routed token
            parts = [rows_with_trained_tokens(part, trained) for part in parts]
        sharded = [role.dispatch(batch, rows=rows) for rows in parts] * trainer.update_epochs_per_batch
        left = range(len(sharded) - 1, -1, -1)
        results = [role.train_mini_batch(part, more_follow=more > 0) for part, more in zip(sharded, left, strict=True)]
        self.run_state.finite &= not any(result["skipped"] for result in results)
        return results

    def update_reference(self) -> None:
        """Copy the policy's weights to the reference at the end of an epoch, with ``update_ref_every_epoch``."""
        finished = self.train_dataloader.finished_epochs
        if finished > self.run_state.epochs and self.cfg.trainer.update_ref_every_epoch and self.ref is not None:
            with self.phases("update_ref"):
                if self._shares_policy_gpus("ref"):
                    self.policy.offload("gradients", "optimizer")
                self.ref.copy_weights(self.policy)
                self.offload_others("policy")
        self.run_state.epochs = finished

    # ------------------------------------------------------------------ facts
    @property
    def _policy_learns(self) -> bool:
        """Whether this step trains the policy, not only the critic."""
        return self.critic is None or self.global_step >= self.cfg.trainer.critic_warmup_steps

    @property
    def _replays_own_routes(self) -> bool:
        """Whether the update replays the experts of the trainer's own forward pass."""
        megatron = self.cfg.trainer.policy.megatron_config
        return megatron.moe_enable_routing_replay and megatron.moe_routing_replay_source == "trainer"

    def _adapters_of(self, uids: Sequence[str]) -> list[str]:
        """Return the adapter of each row; [] if adapters have no names."""
        named = bool(self.cfg.trainer.policy.model.lora.adapters)
        return list(self.train_dataset.adapters_of(uids)) if named else []


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """A trainer whose rollouts run ahead by at most ``trainer.fully_async.max_staleness_steps``.

    Raises ConfigError unless ``trainer.fully_async.enabled``, on which rules of the configuration depend.
    """

    def __init__(self, cfg: SkyRLTrainConfig, *args: Any, **kwargs: Any) -> None:
        if not cfg.trainer.fully_async.enabled:
            raise ConfigError([Problem("trainer.fully_async.enabled", False, "FullyAsyncRayPPOTrainer needs true")])
        super().__init__(cfg, *args, **kwargs)

    @property
    def source_name(self) -> str:
        """The stream, or the synchronous source if nothing may run ahead."""
        return "streamed" if generates_ahead(self.cfg) else super().source_name
