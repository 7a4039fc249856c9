"""The main loop with sampling that runs ahead: groups are sampled while the ranks train.

It differs from :class:`RayPPOTrainer` only in where a batch comes from: a :class:`RolloutStream` on the event loop,
whose groups may span the versions of several steps. Engines stand still for each weight sync, with requests in flight
frozen. With ``max_staleness_steps=0`` nothing may run ahead, and the run is the synchronous one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from skyrl_megatron.config.rules.training_rules import runs_ahead
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.rollout.dynamic_sampling import distinct_uids, groups
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.rollout.outputs import concatenate_generator_outputs, row_uids
from skyrl_megatron.trainer.ppo import RayPPOTrainer
from skyrl_megatron.trainer.rollout_replay import ReplayedRollouts
from skyrl_megatron.trainer.rollout_store import DurableGroups, Kept
from skyrl_megatron.trainer.rollout_stream import Group, RolloutStream, StalePolicy, StreamLimits
from skyrl_megatron.trainer.staleness import Concurrency, lag_metrics, token_lags

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.types import TrainingBatch
    from skyrl_megatron.workers.weight_synchronizer import SyncReport


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """A trainer whose generation workers run ahead, by at most ``trainer.fully_async.max_staleness_steps``.

    Raises ConfigError unless ``trainer.fully_async.enabled``, on which rules of the configuration depend.
    """

    def __init__(self, cfg: SkyRLTrainConfig, *args: Any, **kwargs: Any) -> None:
        if not cfg.trainer.fully_async.enabled:
            raise ConfigError([Problem("trainer.fully_async.enabled", False, "FullyAsyncRayPPOTrainer needs true")])
        super().__init__(cfg, *args, **kwargs)
        self.stream: RolloutStream | ReplayedRollouts | None = None
        """What samples, or what was sampled before; None where nothing runs ahead."""
        if runs_ahead(cfg):
            replays = cfg.trainer.fully_async.replay_from
            self.stream = ReplayedRollouts(cfg, self.train_dataloader.prompt) if replays else self.make_stream()
        self.groups: DurableGroups | None = None
        """What of the stream outlives the process; from :meth:`load_checkpoints` on."""
        self._taken: list[Group] = []
        self._unused: set[int] = set()  # numbers of taken groups that are not trained on
        self._place: dict[str, Any] = {"oldest": 0, "ahead": []}  # of the stream, behind the last step
        self._kept = Kept()
        self._lags: Tensor | None = None  # [B, T], of the batch at hand

    REPEATED: ClassVar[tuple[str, ...]] = (*RayPPOTrainer.REPEATED, "_lags")

    @property
    def can_rewind(self) -> bool:
        """Whether the run can go back without a new process: what was sampled ahead cannot."""
        return self.stream is None

    def make_stream(self) -> RolloutStream:
        """Make the stream of the run's groups."""
        trainer = self.cfg.trainer
        sampling, ahead = trainer.algorithm.dynamic_sampling, trainer.fully_async
        filters = sampling.type == "filter"
        limits = StreamLimits(
            batch=trainer.train_batch_size,
            steps=self.total_steps,
            bound=ahead.max_staleness_steps,
            workers=ahead.num_parallel_generation_workers,
            stale_policy=cast("StalePolicy", ahead.stale_policy),
            timeout_s=trainer.phase_timeout_s,
            sample_batches=sampling.max_sample_batches if filters else -1,
        )
        return RolloutStream(
            self.sample_group,
            self.train_dataloader.prompt,
            limits,
            useful=has_variety if filters else lambda output: True,
            say=self.tracker.say,
            concurrency=Concurrency(
                ahead.num_parallel_generation_workers,
                self._free_places if ahead.adaptive_concurrency else None,
                self.cfg.generator.n_samples_per_prompt,
            ),
        )

    def _free_places(self) -> int:
        """Count the sequences that engines could decode besides those that they have; negative where some wait."""
        engine = self.cfg.generator.inference_engine
        places = engine.max_num_seqs * engine.data_parallel_size
        return sum(places - len(slot.in_flight) for slot in self.inference_engine_client.pool.alive())

    async def sample_group(self, group: Group) -> GeneratorOutput:
        """Sample the rows of a group."""
        generator_input, uids = self.prepare_generator_input([group.prompt], "train")
        if self.groups is not None:
            generator_input["trajectory_log"] = await self.groups.trajectories(group, len(uids))
        output: GeneratorOutput = await self.generator.generate(generator_input, disable_tqdm=True)
        return output

    # ------------------------------------------------------------------ the loop
    def train_steps(self) -> None:
        """Start the stream, and take the steps that are left."""
        if isinstance(self.stream, ReplayedRollouts):
            self.total_steps = min(self.total_steps, self.stream.last_step)
        if self.stream is not None:
            kept, self._kept = self._kept, Kept()
            start = partial(
                self.stream.start, **self._place, finished=kept.finished, planned=kept.planned, begun=kept.begun
            )
            self.loop.call(start, self.global_step)
        super().train_steps()

    def sample_batch(self) -> tuple[GeneratorOutput, list[str]]:
        """Take the groups of a batch from the stream; the phase ``generate`` is the wait for them."""
        if self.stream is None:
            return super().sample_batch()
        with self.phases("generate"):
            found = self.loop.run(self.stream.take(), stop=self.stop)
        self._taken += found
        self._note_staleness(self.stream, found)
        outputs = [group.output for group in found if group.output is not None]
        uids = [
            row_uids(each, [group.uid] * len(each["response_ids"])) for group, each in zip(found, outputs, strict=True)
        ]
        return concatenate_generator_outputs(outputs), distinct_uids(uids)

    def handle_dynamic_sampling(
        self, generator_output: GeneratorOutput, uids: list[str]
    ) -> tuple[GeneratorOutput, list[str]] | None:
        """Return the rows to train on, or None; groups that are not trained make room for others."""
        chosen = super().handle_dynamic_sampling(generator_output, uids)
        if self.stream is not None:
            batch = self._taken[-self.cfg.trainer.train_batch_size :]
            if chosen is None:
                self.loop.call(self.stream.give_back, batch)
            self._unused |= {group.number for group in batch if chosen is None or self._is_replaced(group)}
        return chosen

    def _is_replaced(self, group: Group) -> bool:
        replaces = self.cfg.trainer.algorithm.dynamic_sampling.type == "replace"
        return replaces and group.output is not None and not has_variety(group.output)

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingBatch:
        """Return the tensors, and note how old each token is."""
        batch = super().convert_to_training_input(generator_output, uids)
        spans = generator_output.get("rollout_versions")
        if self.stream is not None and spans:
            lengths = [len(row) for row in generator_output["response_ids"]]
            self._lags = token_lags(spans, lengths, self.global_step, batch.loss_mask.shape[1])
        return batch

    def fwd_logprobs_values_reward(self, batch: TrainingBatch) -> TrainingBatch:
        """Score the batch, and measure what became of the probabilities of its tokens, by their age."""
        batch = super().fwd_logprobs_values_reward(batch)
        if self._lags is not None:
            self.metrics |= lag_metrics(batch, self._lags, self.cfg.trainer.fully_async.max_staleness_steps)
            self._lags = None
        return batch

    def complete_step(self) -> None:
        """Note which groups are trained, and go on in the data behind them."""
        if self.stream is not None:
            self.metrics |= self.loop.call(self.stream.metrics)
            given_up = self.loop.call(self._end_in_stream, self.stream)
            if self.groups is not None:
                self.metrics |= self.loop.call(self.groups.metrics)
                numbers = [group.number for group in self._taken]
                self.loop.run(self.groups.trained(self.global_step + 1, numbers, self._unused, given_up))
            self._taken, self._unused = [], set()
            self.train_dataloader.seek(self._place["oldest"])
        super().complete_step()

    def _end_in_stream(self, stream: RolloutStream | ReplayedRollouts) -> list[int]:
        """Tell the stream that the step is over, and note its place at the same moment: what is given up later belongs
        to the next step, in the schedule and in the checkpoint."""
        given_up = stream.trained(self._taken)
        self._place = stream.state()
        return given_up

    def sync_weights(self) -> SyncReport:
        """Bring the weights into every engine; the stream's new groups are of that version."""
        report = super().sync_weights()
        if self.stream is not None:
            self.loop.call(self.stream.advance, self.global_step)
            self.metrics["async/pause_seconds"] = report.total_seconds
        return report

    def finish(self) -> None:
        """End the stream, and the run."""
        try:
            if self.stream is not None:
                self.loop.run(self.stream.close())
            if self.groups is not None:
                self.loop.run(self.groups.close())
        finally:
            super().finish()

    # ------------------------------------------------------------------ checkpoints
    def load_checkpoints(self) -> None:
        """Continue from a checkpoint, with the groups that were sampled behind it."""
        super().load_checkpoints()
        if isinstance(self.stream, ReplayedRollouts):
            self.stream.check(self.global_step)
            self.tracker.say(
                f"replay: steps {self.global_step + 1} to {self.stream.last_step} of {self.stream.folder}"
            )
            for key, recorded, here in self.stream.differences():
                self.tracker.say(f"replay: {key}={here} was {recorded}: the numbers will be others")
            return
        if self.stream is None:
            return
        loader = self.train_dataloader
        per_epoch = len(loader) * loader.batch_size
        fresh = self.cfg.trainer.resume_mode in (None, "none")
        groups = DurableGroups(self.cfg, lambda number: number // per_epoch, fresh=fresh)
        self.groups = self.stream.group_log = groups
        self._kept = self.loop.run(groups.recover(self.global_step, loader.prompt))
        if count := len(self._kept.finished):
            self.tracker.say(
                f"rollouts: {count} groups that were sampled and not trained are in {groups.store.folder}"
            )

    def save_checkpoints(self) -> None:
        """Save, and free the groups that no checkpoint needs any more."""
        super().save_checkpoints()
        if self.groups is not None and self.checkpoints is not None:
            complete = [step for step in self.checkpoints.store.complete_steps() if step <= self.global_step]
            self.loop.run(self.groups.checkpoints(complete))

    def trainer_state(self) -> dict[str, Any]:
        """Return the state with the stream's position: what is trained may lie behind what is not."""
        state = super().trainer_state()
        if self.stream is not None:
            state["stream"] = self._place
        return state

    def load_trainer_state(self, state: Mapping[str, Any]) -> None:
        """Take on the position; that of a synchronous run is one without anything trained behind it."""
        super().load_trainer_state(state)
        if self.stream is not None and (position := state.get("stream")) is not None:
            self._place = {"oldest": position["oldest"], "ahead": position["ahead"]}
            self.train_dataloader.seek(self._place["oldest"])
        else:
            self._place = {"oldest": self.train_dataloader.number, "ahead": []}

    def _note_staleness(self, stream: RolloutStream | ReplayedRollouts, found: list[Group]) -> None:
        ages = stream.staleness(found)
        if ages:
            self.metrics |= {
                "async/staleness_mean": sum(ages) / len(ages),
                "async/staleness_max": float(max(ages)),
                "async/staleness_min": float(min(ages)),
            }


def has_variety(output: GeneratorOutput) -> bool:
    """Return whether the rows of one prompt got different rewards."""
    return any(useful for _, useful in groups(output, [""] * len(output["response_ids"])))
