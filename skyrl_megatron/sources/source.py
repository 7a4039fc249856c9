"""Where the rollouts of a step come from: the one object in which synchronous and asynchronous training differ.

:class:`PromptRollouts` samples the prompts of a step when the step begins: prompts → responses → dynamic sampling.
:class:`OversampledRollouts` starts more prompts, and ends at the first complete groups.
:class:`StreamedRollouts` takes finished groups from a ``RolloutStream``, which samples on the event loop while the
ranks train. A group may then contain tokens of several policy versions.

A source gets the state of the run and the parts of a step (``run_state.py``). The trainer calls it at fixed points of
the run: :meth:`~PromptRollouts.open` after the checkpoint is loaded,
:meth:`~PromptRollouts.start` before the first step, :meth:`~PromptRollouts.next_batch` and
:meth:`~PromptRollouts.end_step` in each step, :meth:`~PromptRollouts.advance` after each weight sync,
:meth:`~PromptRollouts.checkpoint_saved` after each checkpoint, and :meth:`~PromptRollouts.close` at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning
from skyrl_megatron.rollout.dynamic_sampling import Batch, distinct_uids, groups, measured_rewards
from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.rollout.outputs import concatenate_generator_outputs, row_uids, select_rows
from skyrl_megatron.sources.oversampled import OversampledGroups
from skyrl_megatron.sources.replayed import ReplayedRollouts
from skyrl_megatron.sources.run_state import RunState, StepParts, StreamParts
from skyrl_megatron.sources.staleness import Concurrency, token_staleness, token_staleness_metrics
from skyrl_megatron.sources.store import DurableGroups, ResumedGroups
from skyrl_megatron.sources.streamed import Group, RolloutStream, StalePolicy, StreamLimits

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.data.loader import PromptLoader
    from skyrl_megatron.types import TrainingBatch


class PromptRollouts:
    """Samples the prompts of a step when the step begins."""

    can_rewind = True
    """Whether the run can go back to an earlier step in the same process."""

    def __init__(self, run: RunState, parts: StepParts) -> None:
        self.run, self.parts = run, parts
        self.loader: PromptLoader = parts.train_dataloader
        self.prompts = _all_epochs(self.loader)
        """Batches of prompts from the loader's position on."""
        self._warned_of_filtering = False

    # ------------------------------------------------------------------ a step
    def next_batch(self) -> TrainingBatch:
        """Sample until dynamic sampling has a full batch, and return its tensors with a reward for each token."""
        run, parts, selected = self.run, self.parts, None
        while selected is None:
            output, uids = parts.sample_batch()
            parts.sampler.refused = self.observe(output, uids)
            with run.phases("postprocess_generator_output"):
                output = parts.postprocess_generator_output(output, uids)
            selected = parts.handle_dynamic_sampling(output, uids)
            self.filtered(whole_batch=selected is None)
            if selected is None:
                self._warn_of_filtering(parts.sampler.sampled_batches)
        parts.note_rows(selected[0])
        with run.phases("convert_to_training_input"):
            return self.to_batch(*selected)

    def sample(self) -> Batch:
        """Return the rows of the next batch of prompts and the uid of each row."""
        generator_input, uids = self.parts.prepare_generator_input(next(self.prompts), "train")
        with self.run.phases("generate"):
            output = self.parts.generate(generator_input)
        return output, row_uids(output, uids)

    def _warn_of_filtering(self, batches: int) -> None:
        """Warn once if ``batches`` of prompts did not fill a step."""
        if batches < 3 or self._warned_of_filtering:
            return
        self._warned_of_filtering = True
        warnings.warn(
            f"step {self.run.step + 1}: {batches} batches of prompts did not fill one step, because dynamic sampling "
            "removes prompts whose samples all got the same reward. Use other prompts, or raise "
            "generator.n_samples_per_prompt; trainer.algorithm.dynamic_sampling.max_sample_batches is the limit",
            SkyRLMegatronWarning,
            stacklevel=3,
        )

    def observe(self, output: GeneratorOutput, uids: list[str]) -> set[str]:
        """Give the sampler of the prompts the rewards of the batch that was sampled last, and return the uids that a
        gate refused."""
        gates, metrics = self.parts.gates, self.run.metrics
        rewards, refused = measured_rewards(output, uids), set[str]()
        if gates.gates:
            names = row_uids(output, uids)
            counted = dict.fromkeys((f"generate/refused_by_{name}" for name in gates.gates), 0.0)
            for uid in rewards:
                rows = [row for row, name in enumerate(names) if name == uid]
                if (gate := gates.refusal(select_rows(output, rows), self.run.step)) is not None:
                    counted[f"generate/refused_by_{gate}"] += 1
                    refused.add(uid)
                    if not gates.observed(gate):
                        rewards[uid] = []
            for name, count in counted.items():
                metrics[name] = metrics.get(name, 0.0) + count
        self.observe_rewards(rewards)
        return refused

    def observe_rewards(self, rewards: Mapping[str, list[float]]) -> None:
        """Give the sampler of the prompts the rewards, by uid, of the batch that was sampled last."""
        self.loader.observe_batch(rewards)

    def filtered(self, *, whole_batch: bool) -> None:
        """Record the groups that dynamic sampling removed from the last sample; ``whole_batch``: all of them."""

    def to_batch(self, output: GeneratorOutput, uids: list[str]) -> TrainingBatch:
        """Return the tensors of the selected rows."""
        return self.parts.convert_to_training_input(output, uids)

    def staleness_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        """Return metrics by the age of the tokens of the last batch, once its log-probs are known."""
        return {}

    def end_step(self) -> None:
        """Mark the groups of the step as trained. Called before the trainer counts the step."""

    def advance(self, version: int, pause_seconds: float) -> None:
        """Note that engines serve ``version`` now. They were paused for ``pause_seconds``."""

    # ------------------------------------------------------------------ a run
    def open(self) -> None:
        """Continue from the loader's position, after a checkpoint was loaded or none was found."""
        self.prompts = _all_epochs(self.loader)

    def start(self) -> None:
        """Begin to sample ahead."""

    def checkpoint_saved(self, complete_steps: Callable[[], list[int]]) -> None:
        """Free what only earlier checkpoints needed. ``complete_steps``: lists the steps of the complete checkpoints,
        some of which another run may have left."""

    def close(self) -> None:
        """Stop sampling."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as plain values."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned, in this run or in one with another source."""

    def unfinished(self) -> bytes | None:
        """Return the unfinished rollouts for a checkpoint, None if there are never any."""
        return None

    def load_unfinished(self, data: bytes | None) -> None:
        """Restore what :meth:`unfinished` returned, after the state."""


class AgedRollouts(PromptRollouts):
    """Rollouts whose tokens may be older than the weights that are trained."""

    prefix: ClassVar[str]
    """Of the metrics by age."""
    bound: int
    """Maximum staleness in steps."""
    _token_ages: Tensor | None = None  # [B, T], of the current batch

    def to_batch(self, output: GeneratorOutput, uids: list[str]) -> TrainingBatch:
        """Return the tensors of the selected rows, and keep the age of each token."""
        batch = super().to_batch(output, uids)
        self._token_ages = None
        if spans := output.get("rollout_versions"):
            lengths = [len(row) for row in output["response_ids"]]
            self._token_ages = token_staleness(spans, lengths, self.run.step, batch.loss_mask.shape[1])
        return batch

    def staleness_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        """Return ``…/token_lag…`` and ``…/logprob_diff_lag…`` of the last batch."""
        if self._token_ages is None:
            return {}
        return token_staleness_metrics(batch, self._token_ages, self.bound, self.prefix)


class OversampledRollouts(AgedRollouts):
    """Starts more prompts than a step trains, and ends the step's sampling at the first complete groups
    (``trainer.oversampling``). The others are continued by the next step, or dropped."""

    can_rewind = False
    prefix = "oversampling"

    def __init__(self, run: RunState, parts: StepParts) -> None:
        super().__init__(run, parts)
        cfg, generator = parts.cfg, parts.generator
        given, keeps = cfg.trainer.oversampling, cfg.trainer.oversampling.unfinished == "keep"
        self.bound = given.max_staleness_steps if keeps else 0
        self.groups = OversampledGroups(
            cfg.trainer.train_batch_size,
            given.ratio,
            cfg.generator.n_samples_per_prompt,
            self.bound if keeps else None,
            self.loader.prompt,
            self.loader.ready,
        )
        self._taken: dict[int, str] = {}
        self._dropped: list[int] = []
        if generator is not None and not isinstance(generator, SkyRLGymGenerator):
            warnings.warn(
                f"trainer.oversampling.ratio={given.ratio}: {type(generator).__name__} finishes all trajectories that"
                " it starts, so steps take longer, not shorter: set it to 0",
                SkyRLMegatronWarning,
                stacklevel=2,
            )

    def sample(self) -> Batch:
        """Return the rows of the first complete groups and the uid of each row."""
        version = self.run.step
        generator_input, uids = self.parts.prepare_generator_input(self.groups.begin(version), "train")
        generator_input["trajectory_log"] = log = self.groups.log(version)
        with self.run.phases("generate"):
            output = self.parts.generate(generator_input)
        if not log.complete:
            fix = f"{type(self.parts.generator).__name__} does not record its trajectories: set it to 0"
            raise ConfigError([Problem("trainer.oversampling.ratio", self.parts.cfg.trainer.oversampling.ratio, fix)])
        self._taken, self._dropped = self.groups.end(log, version)
        names = [id.instance_id for id in output.get("trajectory_ids") or []] or uids
        taken = set(self._taken.values())
        rows = [row for row, name in enumerate(names) if name in taken]
        return select_rows(output, rows), [names[row] for row in rows]

    def observe_rewards(self, rewards: Mapping[str, list[float]]) -> None:
        """Give the sampler of the prompts the rewards of the groups that were taken; dropped ones give none."""
        for number, uid in self._taken.items():
            self.loader.observe(number, rewards.get(uid))
        for number in self._dropped:
            self.loader.observe(number, None)

    def end_step(self) -> None:
        """Move the loader to the oldest prompt that is not trained or dropped."""
        self.run.metrics |= self.groups.metrics()
        self.groups.complete_step()
        self.loader.seek(self.groups.oldest)

    def state(self) -> dict[str, Any]:
        """Return the position in the data, and the lengths so far."""
        return {"oversampling": self.groups.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the position; after a run without oversampling, that of the loader."""
        if (position := state.get("oversampling")) is not None:
            self.groups.load_state(position)
        else:
            self.groups.next = self.loader.number
            self.groups.complete_step()

    def unfinished(self) -> bytes:
        """Return the open groups."""
        return self.groups.encode()

    def load_unfinished(self, data: bytes | None) -> None:
        """Restore the open groups."""
        if data is not None:
            self.groups.decode(data)


class StreamedRollouts(AgedRollouts):
    """Takes groups from a stream that samples while the ranks train, at most ``max_staleness_steps`` ahead.

    With ``trainer.fully_async.replay_from`` the groups are those that another run recorded.
    """

    can_rewind = False
    prefix = "async"

    def __init__(self, run: RunState, parts: StreamParts) -> None:
        super().__init__(run, parts)
        self.ahead = parts
        self.bound = parts.cfg.trainer.fully_async.max_staleness_steps
        self.stream: RolloutStream | ReplayedRollouts = (
            ReplayedRollouts(parts.cfg, self.loader.recall, observe=self.observe_group)
            if parts.cfg.trainer.fully_async.replay_from
            else self.make_stream()
        )
        self.groups: DurableGroups | None = None
        """The groups on disk, which outlive the process; set by :meth:`open`."""
        self.taken: list[Group] = []
        """Groups that were taken for the current step."""
        self._unused: set[int] = set()  # numbers of taken groups that are not trained on
        self._position: dict[str, Any] = {"oldest": 0, "ahead": []}  # of the stream, after the last step
        self._recovered = ResumedGroups()

    def make_stream(self) -> RolloutStream:
        """Make the stream of the run."""
        cfg, gates = self.parts.cfg, self.parts.gates
        sampling, ahead = cfg.trainer.algorithm.dynamic_sampling, cfg.trainer.fully_async
        filters = sampling.type == "filter"
        limits = StreamLimits(
            batch=cfg.trainer.train_batch_size,
            steps=self.run.total_steps,
            bound=ahead.max_staleness_steps,
            workers=ahead.num_parallel_generation_workers,
            stale_policy=cast("StalePolicy", ahead.stale_policy),
            timeout_s=cfg.trainer.phase_timeout_s,
            sample_batches=sampling.max_sample_batches if filters or sampling.gates else -1,
            oldest=gates.oldest,
            ahead=ahead.batches_ahead,
        )
        concurrency = Concurrency(
            ahead.num_parallel_generation_workers,
            self.ahead.free_slots if ahead.adaptive_concurrency else None,
            cfg.generator.n_samples_per_prompt,
        )
        useful = has_variance if filters else lambda output: True
        return RolloutStream(
            self.sample_group,
            self.loader.prompt,
            limits,
            useful=useful,
            refusal=lambda output, version: gates.refusal(output, version, leave_out=("staleness",)),
            refused_is_observed=gates.observed,
            ready=self.loader.ready,
            observe=self.observe_group,
            say=self.run.say,
            concurrency=concurrency,
        )

    def observe(self, output: GeneratorOutput, uids: list[str]) -> set[str]:
        """Return nothing: the stream gives the sampler each group when it finishes, and asks the gates."""
        return set()

    def observe_group(self, number: int, output: GeneratorOutput | None) -> None:
        """Give the sampler of the prompts the rewards of a group; None: it was given up."""
        rewards = None if output is None else measured_rewards(output, [""] * len(output["response_ids"]))
        values = None if rewards is None else [reward for of_uid in rewards.values() for reward in of_uid]
        self.loader.observe(number, values)

    async def sample_group(self, group: Group) -> GeneratorOutput:
        """Sample the rows of a group."""
        generator_input, uids = self.parts.prepare_generator_input([group.prompt], "train")
        if self.groups is not None:
            generator_input["trajectory_log"] = await self.groups.trajectories(group, len(uids))
        output: GeneratorOutput = await self.parts.generator.generate(generator_input, disable_tqdm=True)
        return output

    # ------------------------------------------------------------------ a step
    def sample(self) -> Batch:
        """Take the groups of a batch from the stream. The phase ``generate`` is the wait for them."""
        with self.run.phases("generate"):
            groups = self.ahead.wait_for(self.stream.take(), stoppable=True)
        self.taken += groups
        if ages := self.stream.staleness(groups):
            self.run.metrics |= {
                "async/staleness_mean": sum(ages) / len(ages),
                "async/staleness_max": float(max(ages)),
                "async/staleness_min": float(min(ages)),
            }
        outputs = [group.output for group in groups if group.output is not None]
        uids = [
            row_uids(output, [group.uid] * len(output["response_ids"]))
            for group, output in zip(groups, outputs, strict=True)
        ]
        return concatenate_generator_outputs(outputs), distinct_uids(uids)

    def filtered(self, *, whole_batch: bool) -> None:
        """Record which groups of the last sample are not trained on. The stream replaces a whole batch."""
        batch = self.taken[-self.parts.cfg.trainer.train_batch_size :]
        if whole_batch:
            self.ahead.on_loop(self.stream.give_back, batch)
        self._unused |= {group.number for group in batch if whole_batch or self._is_replaced(group)}

    def _is_replaced(self, group: Group) -> bool:
        replaces = self.parts.cfg.trainer.algorithm.dynamic_sampling.type == "replace"
        return replaces and group.output is not None and not has_variance(group.output)

    def end_step(self) -> None:
        """Mark the groups of the step as trained, in the stream and on disk, and move the loader after them."""
        run, call = self.run, self.ahead.on_loop
        run.metrics |= call(self.stream.metrics)
        given_up = call(self._end_step_in_stream)
        if self.groups is not None:
            run.metrics |= call(self.groups.metrics)
            numbers = [group.number for group in self.taken]
            self.ahead.wait_for(self.groups.trained(run.step + 1, numbers, self._unused, given_up))
        self.taken, self._unused = [], set()
        self.loader.seek(self._position["oldest"])

    def _end_step_in_stream(self) -> list[int]:
        """Mark the groups as trained and read the stream's position at the same moment: groups that are given up later
        belong to the next step, in the schedule and in the checkpoint."""
        given_up = self.stream.trained(self.taken)
        self._position = self.stream.state()
        return given_up

    def advance(self, version: int, pause_seconds: float) -> None:
        """Let the stream start groups of ``version``."""
        self.ahead.on_loop(self.stream.advance, version)
        self.run.metrics["async/pause_seconds"] = pause_seconds

    # ------------------------------------------------------------------ a run
    def open(self) -> None:
        """Recover the groups that were sampled after the checkpoint, or check the recorded ones that are replayed."""
        super().open()
        run, loader, cfg = self.run, self.loader, self.parts.cfg
        if isinstance(self.stream, ReplayedRollouts):
            self.stream.check(run.step)
            last, folder = self.stream.last_step, self.stream.folder
            run.say(f"replay: steps {run.step + 1} to {last} of {folder}")
            for key, recorded, here in self.stream.differences():
                run.say(f"replay: {key}={here} was recorded with {recorded}: the numbers will differ")
            return
        per_epoch = len(loader) * loader.batch_size
        fresh, identity = cfg.trainer.resume_mode in (None, "none"), self.ahead.identity
        groups = DurableGroups(cfg, lambda number: number // per_epoch, fresh=fresh, identity=identity)
        self.groups = self.stream.group_log = groups
        self._recovered = self.ahead.wait_for(groups.recover(run.step, loader.recall))
        if count := len(self._recovered.finished):
            run.say(f"rollouts: {count} sampled groups that are not trained on are in {groups.store.folder}")

    def start(self) -> None:
        """Start the stream from the position of the last step."""
        run, stream = self.run, self.stream
        if isinstance(stream, ReplayedRollouts):
            run.total_steps = min(run.total_steps, stream.last_step)
        else:
            recovered, self._recovered = self._recovered, ResumedGroups()
            stream.restore(recovered.finished, recovered.planned, recovered.begun)
        self.ahead.on_loop(partial(stream.start, run.step, **self._position))

    def checkpoint_saved(self, complete_steps: Callable[[], list[int]]) -> None:
        """Free the groups that no complete checkpoint needs any more."""
        if self.groups is not None:
            steps = [step for step in complete_steps() if step <= self.run.step]
            self.ahead.wait_for(self.groups.checkpoints(steps))

    def close(self) -> None:
        """Stop the stream and close the groups on disk."""
        self.ahead.wait_for(self.stream.close())
        if self.groups is not None:
            self.ahead.wait_for(self.groups.close())

    def state(self) -> dict[str, Any]:
        """Return the stream's position. Groups may finish training out of order."""
        return {"stream": self._position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the stream's position. A checkpoint of a synchronous run has no out-of-order groups."""
        if (position := state.get("stream")) is not None:
            self._position = {"oldest": position["oldest"], "ahead": position["ahead"]}
            self.loader.seek(self._position["oldest"])
        else:
            self._position = {"oldest": self.loader.number, "ahead": []}


def has_variance(output: GeneratorOutput) -> bool:
    """Return whether the rows of one prompt got different rewards."""
    return any(useful for _, useful in groups(output, [""] * len(output["response_ids"])))


def _all_epochs(loader: PromptLoader) -> Iterator[list[Any]]:
    """Yield batches of prompts, epoch after epoch."""
    while True:
        yield from loader
