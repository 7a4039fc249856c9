"""The source that takes finished groups from a stream, which samples on the event loop while the ranks train.

A group may then contain tokens of several policy versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from skyrl_megatron.data.samplers import InOrder, Shuffle
from skyrl_megatron.rollout.dynamic_sampling import Batch, distinct_uids, groups, measured_rewards
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.rollout.outputs import concatenate_generator_outputs, row_uids
from skyrl_megatron.sources.aged import AgedRollouts
from skyrl_megatron.sources.group import Group
from skyrl_megatron.sources.replayed import ReplayedRollouts
from skyrl_megatron.sources.rollout_stream import RolloutStream, StalePolicy, StreamLimits
from skyrl_megatron.sources.run_state import RunState, StreamParts
from skyrl_megatron.sources.staleness import Concurrency
from skyrl_megatron.sources.store import DurableGroups, ResumedGroups


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
        """Sample the rows of a group. A prompt that is drawn again may be in flight already, in the same step: its
        trajectories are named ``UID#NUMBER``, in each life of the run."""
        loader = self.loader
        is_new = isinstance(loader.sampler, Shuffle | InOrder) and group.number < len(loader) * loader.batch_size
        name = group.uid if is_new or not self.bound else f"{group.uid.partition('#')[0]}#{group.number}"
        generator_input, uids = self.parts.prepare_generator_input([group.prompt | {"uid": name}], "train")
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
