"""The main loop: prompts → responses → rewards → log-probs → advantages → optimizer steps → weights for the engines.

Read :meth:`RayPPOTrainer.train_steps` first. Each step of it is a method of its own; a subclass overrides what it
wants done differently. Scripts written for SkyRL override these by their names there: ``train``, ``build_models``,
``init_weight_sync_state``, ``load_checkpoints``, ``generate``, ``postprocess_generator_output``,
``handle_dynamic_sampling``, ``convert_to_training_input``, ``fwd_logprobs_values_reward``,
``apply_reward_kl_penalty``, ``compute_advantages_and_returns``, ``train_critic_and_policy``, ``eval``,
``save_checkpoints`` and ``save_models``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from skyrl_megatron import progress as start_times
from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns, normalize_advantages
from skyrl_megatron.algorithms.kl import get_kl_controller, penalize_rewards
from skyrl_megatron.algorithms.masked import finite_samples
from skyrl_megatron.algorithms.metrics import metric_values
from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.config.roles import (
    active_roles,
    adapter_names,
    engine_ranks,
    is_frozen,
    needs_reference,
    policy_is_reference,
    role_configs,
    shares_policy_gpus,
    weight_path,
)
from skyrl_megatron.data.packing import PROMPT_UIDS, counted_rows, mini_batches, trainable
from skyrl_megatron.data.prompts import PromptLoader, warn_of_changes
from skyrl_megatron.errors import MemoryAheadError
from skyrl_megatron.interrupts import report_end
from skyrl_megatron.progress import under_way
from skyrl_megatron.rollout.dynamic_sampling import DynamicSampler
from skyrl_megatron.rollout.interface import GeneratorInput, GeneratorOutput, TrainingPhase
from skyrl_megatron.rollout.outputs import prepare_generator_input, to_training_batch
from skyrl_megatron.trainer.callbacks import TrainerCallback, notify
from skyrl_megatron.trainer.checkpoints import export_due, prepare_export, run_checkpointer
from skyrl_megatron.trainer.console import Phases, StartUp
from skyrl_megatron.trainer.dump import dump_batch, dump_path
from skyrl_megatron.trainer.evaluate import evaluate
from skyrl_megatron.trainer.event_loop import LoopThread
from skyrl_megatron.trainer.hang import write_stacks
from skyrl_megatron.trainer.observe import RunWatch
from skyrl_megatron.trainer.recovery import Healing, MemoryAhead, Rewound, Stragglers
from skyrl_megatron.trainer.step_batch import (
    Lessons,
    advantage_metrics,
    for_each_adapter,
    logprob_diff_metrics,
    mask_groups_without_variety,
    optimizer_metrics,
    reward_metrics,
    route_bytes,
    sequence_lengths,
    training_pass_is_enough,
    value_metrics,
    with_token_rewards,
)
from skyrl_megatron.trainer.stopping import StopRequested, StopSignal, leftover, step_limit
from skyrl_megatron.trainer.summary import last_lines, write_curves
from skyrl_megatron.trainer.teachers import Teachers, with_teacher_rewards
from skyrl_megatron.trainer.tracking import as_numbers
from skyrl_megatron.types import OWN_LOGPROBS, TrainingBatch
from skyrl_megatron.workers.policy_rank import policy_ranks, weight_synchronizer
from skyrl_megatron.workers.worker_group import Speed, WorkerGroup

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from skyrl_megatron.config import MegatronConfig, SkyRLTrainConfig
    from skyrl_megatron.runtime.checkpoint.checkpointer import Checkpointer, RoleRanks
    from skyrl_megatron.trainer.tracking import Tracking
    from skyrl_megatron.workers.placement import Placement
    from skyrl_megatron.workers.weight_synchronizer import SyncReport, WeightSynchronizer

SCORES = {"ref": "ref_logprobs", "critic": "values"}
"""Roles besides the policy → what each adds to a batch."""
TURNS = (
    "generate",
    "teacher",
    "fwd_logprobs_values_reward",
    "critic_train",
    "policy_train",
    "update_ref",
    "sync_weights",
)
"""Phases at whose end the memory of roles that take turns is looked at."""


class RayPPOTrainer:
    """Drives policy, reference, critic and engines. Made by :meth:`BasePPOExp.get_trainer`, all arguments by keyword.

    ``generator``: a ``GeneratorInterface``; ``train_dataset``, ``eval_dataset``: ``PromptDataset``; ``tracker``:
    :class:`Tracking`; ``colocate_pg``: the :class:`Placement` of the run.
    """

    def __init__(
        self,
        cfg: SkyRLTrainConfig,
        tracker: Tracking,
        tokenizer: Any,
        train_dataset: Any,
        inference_engine_client: Any,
        generator: Any,
        colocate_pg: Placement,
        eval_dataset: Any = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.cfg, self.tracker, self.tokenizer = cfg, tracker, tokenizer
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.inference_engine_client, self.generator = inference_engine_client, generator
        self.placement, self.callbacks = colocate_pg, list(callbacks)
        self.global_step = 0
        self.train_dataloader = PromptLoader(train_dataset, cfg.trainer.train_batch_size, seed=cfg.trainer.seed)
        self.position = self.train_dataloader.state_dict()
        """Where a checkpoint's successor goes on in the data."""
        self._prompts = _endless(self.train_dataloader)
        self.limit = step_limit(cfg, len(self.train_dataloader))
        self.total_steps = self.limit.steps
        self.leftover = leftover(cfg)
        """What is left to do of a run that took its last step before; None while steps are left."""
        self.epochs = 0
        """Passes over the training prompts that are over."""
        self.kl_controller = get_kl_controller(cfg.trainer.algorithm) if self._kl_in_reward else None
        self.sampler = DynamicSampler(
            cfg.trainer.algorithm.dynamic_sampling, cfg.trainer.train_batch_size, cfg.trainer.seed
        )
        self.phases, self.start_up = Phases(self._held), StartUp(tracker.say)
        self.memory_ahead = MemoryAhead()
        self.watch, self.stragglers = RunWatch(cfg, tokenizer, self.total_steps), Stragglers(tracker.say)
        self.lessons = Lessons()
        self.sampled: list[np.ndarray] = []
        """Tokens of the sequences that were sampled for the step at hand."""
        self.metrics: dict[str, float] = {}
        """Numbers of the step at hand."""
        self.logged_step = 0
        """The last step whose numbers were logged, which happens when its evaluation is over."""
        self.finite = True
        """Whether every optimizer step of the last training step was applied."""
        self.stop, self.loop = StopSignal(), LoopThread()
        self.roles: dict[str, WorkerGroup] = {}
        """Ranks of policy, reference, critic and teachers, once they are built."""
        self.teachers = Teachers(cfg, self.roles, self.loop)
        self.checkpoints: Checkpointer | None = None
        self.resumes = (cfg.trainer.resume_mode, cfg.trainer.resume_path)
        """Where :meth:`load_checkpoints` goes on: as the run was told, or from what it saved itself."""
        self.weights: WeightSynchronizer | None = None
        self.healing = Healing(self)

    REPEATED: ClassVar[tuple[str, ...]] = ("metrics", "global_step", "epochs", "finite", "kl_controller")
    """What a part of a step may have changed when it is repeated."""

    # ------------------------------------------------------------------ the loop
    def train(self) -> None:
        """Run from loading to the report. Raises StopRequested after Ctrl-C, with everything saved."""
        with self.stop, self.loop:
            self.stop.waits = False  # there is no step in work
            try:
                if note := str(self.leftover or self.limit.note):
                    self.tracker.say(note)
                if self.leftover is not None and self.leftover.nothing:
                    return
                self.build_models()
                with under_way("load the checkpoint"):
                    self.load_checkpoints()
                if not self.needs_engines and self.is_last_step:
                    self.watch.begin_steps(self.global_step, self.roles)
                    self.make_up()
                    return
                if self.leftover is not None and not self.is_last_step:  # its checkpoint proved damaged
                    started, self.leftover = self.needs_engines, None
                    if not started:
                        self.start_engines()
                self.init_weight_sync_state()
                self.give_first_weights()
                self.before_training()
                self.healing.begin()
                self.stop.waits = True
                gc.collect()
                gc.freeze()  # what lives now stays: the garbage of each step is not looked for among it
                self.watch.begin_steps(self.global_step, self.roles)
                notify(self.callbacks, "on_train_start", self)
                self.train_steps()
                notify(self.callbacks, "on_train_end", self)
            except (StopRequested, MemoryAheadError):
                self.save_on_stop()
                raise
            finally:
                self.finish()

    def train_steps(self) -> None:
        """Take the steps that are left."""
        self.make_up()
        while not self.is_last_step:
            self.stop.check()
            self.memory_ahead.look()
            notify(self.callbacks, "on_step_start", self)
            try:
                with self.phases("step"):
                    batch = self.collect_experience()
                    self.healing.repeated(partial(self.update_on, batch))
                    self.complete_step()
                    self.healing.repeated(self.publish)
            except Rewound:
                self.metrics, self.sampled = {}, []
                self.phases.metrics()
                continue
            self.metrics |= start_times.first_step()
            self.end_step()

    def make_up(self) -> None:
        """Do for the last step what the run that saved it did not come to, or was not asked for."""
        left = self.leftover
        if self.logged_step < self.global_step:
            self.end_step()
        elif left is not None and left.evaluation and self.eval():
            self.tracker.log(self.metrics | self.phases.metrics(), self.global_step)
            self.metrics = {}
        if left is not None and left.exports:
            self.save_models()

    def update_on(self, batch: TrainingBatch) -> None:
        """Take the optimizer steps of a step."""
        batch = self.healing.fresh(batch)
        self.begin_training()
        with self.phases("fwd_logprobs_values_reward"):
            batch = self.fwd_logprobs_values_reward(batch)
        if self.cfg.trainer.algorithm.distillation.reward_coef:
            self.metrics |= with_teacher_rewards(batch, self.cfg.trainer.algorithm)
        if self.kl_controller is not None:
            batch = self.apply_reward_kl_penalty(batch)
        with self.phases("compute_advantages_and_returns"):
            batch = self.compute_advantages_and_returns(batch)
        self.keep_samples(batch)
        with self.phases("train_critic_and_policy"):
            self.train_critic_and_policy(batch)
        self.healing.keep()

    def publish(self) -> None:
        """Bring the weights of a step to where they are due: the reference, a checkpoint, an export, the engines."""
        self.update_reference()
        due = self._due(self.cfg.trainer.ckpt_interval) or self.is_last_step
        if due and (self.checkpoints is None or self.checkpoints.saved_step != self.global_step):
            self.save_checkpoints()
        if export_due(self.global_step, self.cfg.trainer.hf_save_interval, is_last=self.is_last_step):
            self.save_models()
        self.sync_weights()

    def complete_step(self) -> None:
        """Count a step whose updates were made, and note where the data goes on behind it."""
        for name, role in self.roles.items():
            self.metrics |= {f"{name}/{key}": value for key, value in role.score_speed().items()}
        self.global_step += 1
        self.position = self.train_dataloader.state_dict()

    def end_step(self) -> None:
        """Evaluate the policy when that is due, and log the step."""
        if self._due(self.cfg.trainer.eval_interval) or (self.is_last_step and self.cfg.trainer.eval_interval > 0):
            self.eval()
        self.log_step()
        notify(self.callbacks, "on_step_end", self)

    def collect_experience(self) -> TrainingBatch:
        """Return responses and rewards for a step; dynamic sampling takes as many batches of prompts as it needs."""
        chosen = None
        while chosen is None:
            output, uids = self.sample_batch()
            with self.phases("postprocess_generator_output"):
                output = self.postprocess_generator_output(output, uids)
            chosen = self.handle_dynamic_sampling(output, uids)
            if chosen is None:
                self.lessons.filtered(self.global_step + 1, self.sampler.sampled_batches)
        self.watch.note(chosen[0])
        with self.phases("convert_to_training_input"):
            return self.convert_to_training_input(*chosen)

    def sample_batch(self) -> tuple[GeneratorOutput, list[str]]:
        """Return the rows of a batch of prompts, and the uid of each."""
        generator_input, uids = self.prepare_generator_input(next(self._prompts), "train")
        with self.phases("generate"):
            return self.generate(generator_input), uids

    # ------------------------------------------------------------------ start
    def build_models(self) -> None:
        """Start the ranks of every role and the engines; all load at the same time, unless they share GPUs: an engine
        takes its part of the memory that it finds free, and sleeps while the models are built."""
        logs = str(run_folder(self.cfg) / "workers")
        shared_gpus = self.cfg.trainer.placement.colocate_all
        with self.phases("build_models"):
            if shared_gpus:
                self.start_engines()
            for key, (name, cfg) in role_configs(self.cfg).items():
                self.roles[key] = WorkerGroup(cfg, name, self.placement[key])
                self.roles[key].group.look = lambda: write_stacks(run_folder(self.cfg))
                self.roles[key].start_building(self._updates_of(name), logs)
            if not shared_gpus:
                self.start_engines()
            for role in self.roles.values():
                role.finish_building()
            self.leave_to("policy")
            if shared_gpus:
                with under_way("take host memory for what leaves the GPUs"):
                    self.policy.offload()
        built = ", ".join(f"{name} on {len(role.group)}" for name, role in self.roles.items())
        layers = "".join(f", layers: {kind}" for kind in {role.ranks[0].layers for role in self.roles.values()} - {""})
        beside = "" if shared_gpus or not self.needs_engines else ", loaded beside the engines"
        self.start_up.done(f"models: {built} Megatron ranks{layers}{beside}")
        trained: dict[str, RoleRanks] = {}
        for name, role in self.roles.items():
            if not is_frozen(role.name) or (name == "ref" and self.cfg.trainer.update_ref_every_epoch):
                trained |= role.checkpointed()
        self.checkpoints = run_checkpointer(self.cfg, trained)

    def start_engines(self) -> None:
        """Wait until the engines answer, unless nothing is to be sampled; those that share GPUs with the models sleep
        then. Raises EngineError, LaunchError."""
        if not self.needs_engines:
            return
        starting = self.inference_engine_client.start()
        self.loop.run(starting, "start engines", timeout_s=self.cfg.trainer.phase_timeout_s)
        self.start_up.done(f"engines: {len(self.inference_engine_client.pool.alive())} ready")
        if self.cfg.trainer.placement.colocate_all:
            self.loop.run(self.inference_engine_client.pool.sleep(self.cfg.trainer.phase_timeout_s))

    def load_checkpoints(self) -> None:
        """Continue where ``trainer.resume_mode`` says, or start at step 0, and say which."""
        assert self.checkpoints is not None
        loaded = self.checkpoints.load(*self.resumes)
        if loaded is not None:
            self.global_step = loaded.step
            self.train_dataloader.load_state_dict(loaded.data)
            self.load_trainer_state(loaded.trainer_state)
            self.epochs = self.train_dataloader.finished_epochs
            self.tracker.say(f"resumed from {loaded.folder} (step {loaded.step} of {self.total_steps})")
            self.start_up.done(f"checkpoint: step {self.global_step} loaded")
        self._prompts = _endless(self.train_dataloader)
        self.position = self.train_dataloader.state_dict()
        resumed_from = self.global_step if loaded else None
        logged = self.tracker.open(total_steps=self.total_steps, resumed_from=resumed_from)
        self.watch.open(resumed_from)
        self.logged_step = self.global_step
        if loaded is not None and not logged and (unlogged := loaded.trainer_state.get("unlogged")):
            self.logged_step -= 1
            self.metrics, self.phases.timings = unlogged["metrics"], unlogged["timings"]

    def init_weight_sync_state(self) -> None:
        """Make what gives the engines the policy's weights; the first sync connects ranks and engines."""
        engines = self.inference_engine_client
        self.weights = weight_synchronizer(self.cfg, self.policy, engines.pool, dtype=engines.dtype)
        self.loop.run(engines.watch(self.weights.sync_engine))

    def renew_weight_sync(self) -> None:
        """Let the sync know the policy's ranks as they are now."""
        if self.weights is not None:
            self.loop.run(self.weights.replace_ranks(policy_ranks(self.policy)))

    def give_first_weights(self) -> None:
        """Bring the weights that the run begins with into the engines, and say so."""
        self.sync_weights()
        assert self.weights is not None
        path = weight_path(self.cfg, routed=self.weights.plan is not None)
        self.start_up.done(f"weights: version {self.global_step} in every engine, {path}")

    def before_training(self) -> None:
        """Evaluate the policy as it is, when ``eval_before_train`` and nothing was trained yet."""
        if self.cfg.trainer.eval_before_train and self.global_step == 0:
            if self.eval():
                self.start_up.done(f"evaluation: {len(self.eval_dataset)} held-out prompts")
            self.tracker.log(self.metrics | self.phases.metrics(), 0)
            self.metrics = {}

    # ------------------------------------------------------------------ the parts of a step
    def prepare_generator_input(
        self, prompts: Sequence[Any], phase: TrainingPhase
    ) -> tuple[GeneratorInput, list[str]]:
        """Return (input of the generator with every prompt repeated, uid of each row)."""
        samples, env = self.cfg.generator.n_samples_per_prompt, self.cfg.environment.env_class
        return prepare_generator_input(prompts, samples, None, env, phase, self.global_step)

    def generate(self, generator_input: GeneratorInput) -> GeneratorOutput:
        """Return responses and rewards of the environments, from the generator."""
        work: Coroutine[Any, Any, GeneratorOutput] = self.generator.generate(generator_input)
        return self.loop.run(work, "generate", timeout_s=self.cfg.trainer.phase_timeout_s, stop=self.stop)

    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        """Give each token its reward, and measure rewards and responses."""
        self.sampled.append(sequence_lengths(generator_output))
        samples, adapters = self.cfg.generator.n_samples_per_prompt, self._adapters_of(uids)
        self.metrics |= reward_metrics(generator_output, uids, samples, adapters)
        return with_token_rewards(generator_output)

    def handle_dynamic_sampling(
        self, generator_output: GeneratorOutput, uids: list[str]
    ) -> tuple[GeneratorOutput, list[str]] | None:
        """Return the rows to train on and their uids; None: sample more (``algorithm.dynamic_sampling``)."""
        self.metrics["generate/sampled_batches"] = float(self.sampler.sampled_batches + 1)
        return self.sampler.offer(generator_output, uids)

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingBatch:
        """Return right-aligned tensors; samples that are not finite are masked with ``algorithm.nonfinite=skip``."""
        batch = to_training_batch(generator_output, uids)
        batch.metadata[PROMPT_UIDS] = uids
        batch.adapters = self._adapters_of(uids)
        if batch.rollout_routes:
            self.metrics["generate/route_bytes_per_sample"] = route_bytes(batch) / len(batch)
        keep = finite_samples(batch, self.cfg.trainer.algorithm.nonfinite)
        batch.loss_mask *= keep[:, None]
        self.metrics["generate/nonfinite_samples"] = float((~keep).sum())
        if self.cfg.trainer.dump_data_batch:
            dump_batch(
                batch, dump_path(self.cfg, self.global_step + 1), generator_output.get("rollout_versions") or ()
            )
        return batch

    def fwd_logprobs_values_reward(self, batch: TrainingBatch) -> TrainingBatch:
        """Add log-probs of the reference, those of the policy before the update (where they are read, and the training
        pass does not give them itself) and the critic's values. Roles with GPUs of their own score at the same time;
        others one after the other."""
        apart = {
            name: self._start_scores(name, batch)
            for name in SCORES
            if name in self.roles and not self._takes_turns(name)
        }
        if policy_is_reference(self.cfg) and needs_reference(self.cfg):
            batch.ref_logprobs = self.policy.start_logprobs(batch, "reference log-probs", adapters=False)()
        if self._takes_turns("ref"):
            batch.ref_logprobs = self._start_scores("ref", batch)()
            self.leave_to("policy")
        if self.teachers.names:
            with self.phases("teacher"):
                self.teachers.score(batch, self.train_dataset.teachers_of(batch.metadata[PROMPT_UIDS]))
        read = self._old_logprobs_in_reward or PolicyObjective(self.cfg.trainer.algorithm).needs_old_log_probs
        if self._replays_itself:
            batch.rollout_routes = []
        if read and self._policy_learns and training_pass_is_enough(self.cfg, batch):
            batch.metadata[OWN_LOGPROBS] = True
        elif read or (self._replays_itself and self._policy_learns):
            batch.old_logprobs = self._score_before_update(batch)
            self.metrics |= logprob_diff_metrics(batch)
        if self._takes_turns("critic"):  # which trains next
            self.leave_to("critic")
            batch.values = self._start_scores("critic", batch)()
        for name, scores in apart.items():
            setattr(batch, SCORES[name], scores())
        return batch

    def _score_before_update(self, batch: TrainingBatch) -> Tensor:
        """Return the policy's log-probs; with ``moe_routing_replay_source=trainer`` the experts that it takes become
        those of the update."""
        if not self._replays_itself:
            return self.policy.compute_logprobs(batch, "policy log-probs")
        logprobs, batch.rollout_routes = self.policy.logprobs_and_routes(batch, "policy log-probs")
        return logprobs

    def _start_scores(self, name: str, batch: TrainingBatch) -> Callable[[], Tensor]:
        """Begin what a role besides the policy adds to a batch."""
        role = self.roles[name]
        return role.start_values(batch) if name == "critic" else role.start_logprobs(batch, "reference log-probs")

    def apply_reward_kl_penalty(self, batch: TrainingBatch) -> TrainingBatch:
        """Subtract the KL to the reference from each token's reward, and steer its coefficient."""
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
        )
        metrics = metric_values(measured)
        self.kl_controller.update(metrics.get("avg_kl", 0.0), len(batch))
        self.metrics |= {f"loss/{name}": value for name, value in metrics.items()}
        self.metrics["loss/kl_coef"] = self.kl_controller.value
        return batch

    @torch.no_grad()
    def compute_advantages_and_returns(self, batch: TrainingBatch) -> TrainingBatch:
        """Add advantages and returns by the configured estimator; rows of one adapter know nothing of another's."""
        self.metrics |= for_each_adapter(batch, adapter_names(self.cfg), self._add_advantages)
        self.metrics |= advantage_metrics(batch)
        if not self.teachers.names:
            self.lessons.look(self.global_step + 1, batch)
        return batch

    def _add_advantages(self, batch: TrainingBatch) -> dict[str, float]:
        algorithm, metrics = self.cfg.trainer.algorithm, {}
        assert batch.rewards is not None
        if algorithm.zero_variance_filter:
            metrics["loss/zero_variance_rows"] = mask_groups_without_variety(batch)
        batch.advantages, batch.returns = compute_advantages_and_returns(
            token_level_rewards=batch.rewards,
            response_mask=batch.response_mask,
            index=batch.uids,
            adv_estimator=algorithm.advantage_estimator,
            config=algorithm,
            values=batch.values,
            grpo_norm_by_std=algorithm.grpo_norm_by_std,
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
            loss_mask=batch.loss_mask,
            truncated=batch.truncated,
            **({} if batch.is_last_step is None else {"is_last_step": batch.is_last_step}),
        )
        if algorithm.advantage_batch_normalize:
            batch.advantages = normalize_advantages(batch.advantages, batch.loss_mask)
        return metrics

    def keep_samples(self, batch: TrainingBatch) -> None:
        """Keep some rows for those who look at the run, where it is this step's turn. Log-probs that the training pass
        would give are computed for these rows alone, unless the policy has left its GPUs to the critic."""
        there = not self._takes_turns("critic")
        score = (lambda rows: self.policy.compute_logprobs(rows, "samples").numpy()) if there else None
        with self.phases("keep_samples"):
            rows = self.watch.keep_samples(self.global_step + 1, batch, score)
            if rows and self.tracker.takes_samples:
                self.tracker.samples(self.watch.samples.texts(batch, rows), self.global_step + 1)

    def train_critic_and_policy(self, batch: TrainingBatch) -> None:
        """Train the critic, if there is one, and the policy; until ``critic_warmup_steps`` the critic alone."""
        self.finite = True
        if self.critic is not None:
            self.leave_to("critic")
            with self.phases("critic_train"):
                results = self._train(self.critic, batch)
            self.metrics |= optimizer_metrics("critic", results) | value_metrics(batch)
            self.leave_to("policy")
        if self._policy_learns:
            with self.phases("policy_train"):
                results = self._train(self.policy, batch)
            self.metrics |= optimizer_metrics("policy", results)
        self.metrics["trainer/tokens"] = float(batch.lengths.sum())

    def update_reference(self) -> None:
        """Give the reference the policy's weights, when this step was the last of an epoch and
        ``update_ref_every_epoch`` asks for it."""
        finished = self.train_dataloader.finished_epochs
        if finished > self.epochs and self.cfg.trainer.update_ref_every_epoch and self.ref is not None:
            with self.phases("update_ref"):
                if self._takes_turns("ref"):
                    self.policy.offload("gradients", "optimizer")
                self.ref.copy_weights(self.policy)
                self.leave_to("policy")
        self.epochs = finished

    def _train(self, role: WorkerGroup, batch: TrainingBatch) -> list[dict[str, float]]:
        """Pass over a role's mini-batches ``update_epochs_per_batch`` times, an optimizer step each."""
        trainer = self.cfg.trainer
        whole = mini_batches(batch, getattr(trainer, f"{role.name}_mini_batch_size"))
        parts = trainable(whole)
        self.metrics[f"trainer/{role.name}_mini_batches_left_out"] = float(len(whole) - len(parts))
        megatron: MegatronConfig = getattr(trainer, role.name).megatron_config
        if not megatron.moe_aux_loss_coeff:  # which counts every token that is routed
            parts = [counted_rows(part) for part in parts]
        sharded = [role.dispatch(part) for part in parts] * trainer.update_epochs_per_batch
        left = range(len(sharded) - 1, -1, -1)
        results = [role.train_mini_batch(part, more_follow=more > 0) for part, more in zip(sharded, left, strict=True)]
        self.finite = self.finite and not any(result["skipped"] for result in results)
        return results

    def _takes_turns(self, name: str) -> bool:
        return name in self.roles and shares_policy_gpus(self.cfg, self.roles[name].name)

    def _held(self, phase: str) -> dict[str, int]:
        """Return the bytes that each role's state holds on its devices, where all take turns on them."""
        if not self.cfg.trainer.placement.colocate_all or phase not in TURNS:
            return {}
        return {name.replace("/", "_"): role.device_bytes() for name, role in self.roles.items() if role.ranks}

    def leave_to(self, name: str) -> None:
        """Take the other roles off the GPUs that they share with one that is about to work."""
        for other, role in self.roles.items():
            if other != name and (self.cfg.trainer.placement.colocate_all or self._takes_turns(other)):
                role.offload()

    def begin_training(self) -> None:
        """Take the ranks for training: until the next sync, engines that are restarted get no weights."""
        assert self.weights is not None
        self.loop.run(self.weights.begin_training())

    def sync_weights(self) -> SyncReport:
        """Bring the policy's weights into every engine, as version ``global_step``."""
        assert self.weights is not None
        with self.phases("sync_weights"):
            report = self.loop.run(self.weights.sync(str(self.global_step), self.policy.changed_adapters()))
        for failure in report.failures:
            self.tracker.say(f"weight sync: {failure}")
        self.metrics["timing/sync_weights_only_transfer"] = report.seconds["transfer"]
        if report.logprob_diffs:
            self.metrics["trainer/weight_sync_probe_max_abs_diff"] = max(
                g.largest for g in report.logprob_diffs.values()
            )
        self.metrics["trainer/weight_sync_gb_per_second"] = report.gigabytes_per_second
        return report

    # ------------------------------------------------------------------ evaluation, saving, logging
    def eval(self) -> dict[str, float]:
        """Return scores on the evaluation data, and add them to the step's metrics; {} when there is no such data."""
        if self.eval_dataset is None or len(self.eval_dataset) == 0:
            return {}
        work = evaluate(self.cfg, self.eval_dataset, self.generator, self.tokenizer, self.global_step)
        with self.phases("eval"):
            metrics = self.loop.run(work, stop=self.stop)
        self.metrics |= metrics
        notify(self.callbacks, "on_evaluate", self, metrics)
        return metrics

    def save_checkpoints(self) -> None:
        """Save everything that is needed to go on from here."""
        assert self.checkpoints is not None
        state = self.trainer_state()
        with self.phases("save_checkpoints"):
            folder = self.checkpoints.save(self.global_step, self.position, state, last_step_finite=self.finite)
        if folder is not None:
            self.resumes = ("latest", None)
            notify(self.callbacks, "on_save", self, folder)

    def trainer_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the trainer itself, as plain values."""
        state: dict[str, Any] = {"global_step": self.global_step, "sampler_rng": self.sampler.rng.bit_generator.state}
        if (files := getattr(self.eval_dataset, "fingerprint", None)) is not None:
            state["eval_files"] = files
        if self.kl_controller is not None:
            state["kl_coef"] = self.kl_controller.value
        if self.logged_step < self.global_step:
            state["unlogged"] = {"metrics": as_numbers(self.metrics), "timings": self.phases.so_far()}
        return state

    def load_trainer_state(self, state: Mapping[str, Any]) -> None:
        """Take on what :meth:`trainer_state` returned; the position in the data is loaded already."""
        self.sampler.rng.bit_generator.state = state["sampler_rng"]
        if self.eval_dataset is not None:
            warn_of_changes(state.get("eval_files"), getattr(self.eval_dataset, "fingerprint", []))
        if self.kl_controller is not None:
            self.kl_controller.value = state["kl_coef"]

    def save_models(self) -> None:
        """Export policy and critic as Hugging Face folders, ``export_path/global_step_N/{policy,critic}``."""
        with self.phases("save_hf_model"):
            for role in (self.policy, self.critic):
                if role is not None:
                    self.leave_to(role.name)
                    role.export_hf(str(prepare_export(self.cfg.trainer.export_path, self.global_step, role.name)))

    def save_on_stop(self) -> None:
        """Save a checkpoint of the last complete step, unless there is one."""
        if self.global_step > 0 and self.checkpoints is not None and self.checkpoints.saved_step != self.global_step:
            self.save_checkpoints()
        report_end()
        self.tracker.say(f"stopped after step {self.global_step}; the same command continues from there")

    def log_step(self) -> None:
        """Log the step's metrics, and start the next step's with none."""
        timings = self.phases.metrics()
        seconds = timings["timing/step"]
        tokens = self.metrics.pop("trainer/tokens", 0.0)
        ranks = len(self.policy.group)
        for name, role in self.roles.items():
            self.metrics |= self.stragglers.look(name, role.take_own_seconds(), role.group.names)
        self.metrics |= timings | {
            "trainer/epoch": float(self.train_dataloader.epoch),
            "trainer/global_step": float(self.global_step),
            "trainer/tokens_per_second": tokens / seconds,
            "trainer/tokens_per_second_per_gpu": tokens / seconds / ranks,
        }
        self.metrics |= self.generation_speed(timings) | self.healing.metrics()
        self.tracker.log(self.metrics, self.global_step)
        self.logged_step = self.global_step
        notify(self.callbacks, "on_log", self, self.metrics)
        self.metrics = {}
        self.healing.repeated(lambda: self.watch.end_step(self.global_step, self.roles))

    def generation_speed(self, timings: Mapping[str, float]) -> dict[str, float]:
        """Return how fast a rank of the engines sampled. ``timings``: as :meth:`Phases.metrics` gives them; rollouts
        that run ahead have the whole step."""
        engine, ahead = self.cfg.generator.inference_engine, self.cfg.trainer.fully_async.enabled
        seconds = timings["timing/step"] if ahead else timings.get("timing/generate", 0.0)
        speed, sampled, self.sampled = Speed(), self.sampled, []
        for lengths in sampled:
            speed.add(lengths, self.policy.flops)
        ranks = engine.num_engines * engine_ranks(self.cfg)
        return speed.metrics("generate/", ranks, self.policy.peak_flops, seconds)

    def finish(self) -> None:
        """Complete what is being written, end the ranks, draw the report."""
        gc.unfreeze()
        failed = sys.exception()
        try:
            if self.checkpoints is not None:
                self.checkpoints.close()
        finally:
            for role in self.roles.values():
                role.stop()
            try:
                self._leave_report()
            except OSError:
                if failed is None:
                    raise  # else what ended the run is told, not that its disk took no report of it

    def _leave_report(self) -> None:
        """Draw the report, and say what ended the run and where everything is."""
        self.tracker.finish()
        if self.is_last_step and sys.exception() is None:
            setting = self.limit.setting if self.total_steps == self.limit.steps else "no more batches"
            self.tracker.say(f"ended after step {self.global_step} of {self.total_steps}: {setting}")
        if self.global_step:
            write_curves(run_folder(self.cfg))
            self.watch.close()
            saved = None if self.checkpoints is None else self.checkpoints.saved_step
            for line in last_lines(self.cfg, saved, self.global_step):
                self.tracker.say(line)

    # ------------------------------------------------------------------ facts
    @property
    def policy(self) -> WorkerGroup:
        """Ranks of the policy, once they are built."""
        return self.roles["policy"]

    @property
    def ref(self) -> WorkerGroup | None:
        """Ranks of the reference; None when the run has none."""
        return self.roles.get("ref")

    @property
    def critic(self) -> WorkerGroup | None:
        """Ranks of the critic; None when the run has none."""
        return self.roles.get("critic")

    @property
    def updates(self) -> int:
        """Optimizer steps of the policy in the whole run, where a decaying learning rate ends."""
        return self._updates_of("policy") or 0

    def _updates_of(self, name: str) -> int | None:
        """Return the optimizer steps of a role in the whole run; None of one that is not trained."""
        if is_frozen(name):
            return None
        trainer, steps = self.cfg.trainer, self.total_steps
        if name == "policy" and "critic" in active_roles(self.cfg):
            steps = max(steps - trainer.critic_warmup_steps, 0)
        per_step: int = trainer.train_batch_size // getattr(trainer, f"{name}_mini_batch_size")
        return per_step * trainer.update_epochs_per_batch * steps

    @property
    def needs_engines(self) -> bool:
        """Whether anything is sampled: false where a finished run is asked for an export alone."""
        return self.leftover is None or self.leftover.evaluation

    @property
    def can_rewind(self) -> bool:
        """Whether the run can go back to an earlier step without a new process."""
        return True

    @property
    def is_last_step(self) -> bool:
        """Whether :attr:`global_step` is the last one."""
        return self.global_step >= self.total_steps

    @property
    def _policy_learns(self) -> bool:
        """Whether this step trains the policy, not the critic alone."""
        return self.critic is None or self.global_step >= self.cfg.trainer.critic_warmup_steps

    @property
    def _old_logprobs_in_reward(self) -> bool:
        return self._kl_in_reward or bool(self.cfg.trainer.algorithm.distillation.reward_coef)

    @property
    def _replays_itself(self) -> bool:
        megatron = self.cfg.trainer.policy.megatron_config
        return megatron.moe_enable_routing_replay and megatron.moe_routing_replay_source == "trainer"

    @property
    def _kl_in_reward(self) -> bool:
        return self.cfg.trainer.algorithm.use_kl_in_reward

    def _adapters_of(self, uids: Sequence[str]) -> list[str]:
        """Return the adapter that each row belongs to; [] where adapters have no names."""
        named = bool(self.cfg.trainer.policy.model.lora.adapters)
        return list(self.train_dataset.adapters_of(uids)) if named else []

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.global_step % interval == 0


def _endless(loader: PromptLoader) -> Iterator[list[Any]]:
    """Yield batches of prompts, one epoch after the other."""
    while True:
        yield from loader
