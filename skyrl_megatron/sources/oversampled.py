"""Synchronous steps that start more groups than they train, and end at the first complete ones.

:class:`OversampledRollouts` is the source, :class:`OversampledGroups` its bookkeeping, which needs no Ray, engine or
trainer. In each step :meth:`OversampledGroups.begin` says which prompts to sample, :meth:`~OversampledGroups.log` when
sampling may end, and :meth:`~OversampledGroups.end` which groups to train. Groups that are not trained stay open: the
next step continues them, so that in the long run the long ones are trained as often as the short ones. Or they are
dropped, which trains on too many short ones (:class:`SampledLengths`).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning
from skyrl_megatron.rollout.dynamic_sampling import Batch
from skyrl_megatron.rollout.episode import PartialTrajectory, Trajectory
from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
from skyrl_megatron.rollout.outputs import select_rows
from skyrl_megatron.rollout.partial import PartialRollouts
from skyrl_megatron.sources.aged import AgedRollouts
from skyrl_megatron.sources.records import CODEC, PartialGroup
from skyrl_megatron.sources.run_state import RunState, StepParts
from skyrl_megatron.sources.staleness import can_step


class OversampledGroups:
    """The open groups of a run, by the number of their prompt.

    ``batch``: groups of a step; ``ratio``: share of them that is started in addition; ``samples``: trajectories of a
    group; ``bound``: maximum staleness in steps of a trained token, for which a step waits; None: groups that a step
    does not train are dropped. ``prompt``: number → dataset entry; ``ready``: whether a prompt can be asked for yet.
    """

    def __init__(
        self,
        batch: int,
        ratio: float,
        samples: int,
        bound: int | None,
        prompt: Callable[[int], dict[str, Any]],
        ready: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self.batch, self.samples, self.bound = batch, samples, bound
        self.prompt, self.ready = prompt, ready
        self.most = math.ceil(batch * (1 + ratio) - 1e-9)  # less rounding: 10 · 1.1 is 11, not 12
        """Groups that are sampled at the same time."""
        self.open: dict[int, PartialGroup] = {}
        """Number → group that was started and is not trained or dropped."""
        self.next = 0
        """Number of the next prompt."""
        self.lengths = SampledLengths()
        self.counts: Counter[str] = Counter()
        self._ages: list[int] = []
        self._saved: tuple[dict[str, Any], dict[int, PartialGroup]]
        self.complete_step()

    # ------------------------------------------------------------------ a step
    def begin(self, version: int) -> list[dict[str, Any]]:
        """Return the dataset entries of the groups to sample with the weights of a version, the oldest first: engines
        admit requests in this order. Their uids differ."""
        while len(self.open) < self.most and self.ready(self.next):
            uid = self._distinct(str(self.prompt(self.next)["uid"]))
            self.open[self.next] = PartialGroup(uid, version, {})
            self.next += 1
        return [self.prompt(number) | {"uid": self.open[number].uid} for number in self._in_order()]

    def log(self, version: int) -> PartialRollouts:
        """Return the log of the step's batch, which ends it when :meth:`end` finds enough complete groups."""
        numbers = {group.uid: number for number, group in self.open.items()}
        needed = min(self.batch, len(numbers))

        def enough(complete: list[str]) -> bool:
            if len(complete) < needed or self.bound is None:
                return len(complete) >= needed
            done = {numbers[uid] for uid in complete}
            finished = Counter(group.started for number, group in self.open.items() if number in done)
            running = Counter(group.started for number, group in self.open.items() if number not in done)
            return can_step(batch=self.batch, bound=self.bound, version=version, running=running, finished=finished)

        groups = {self.open[number].uid: self.open[number].samples for number in self._in_order()}
        return PartialRollouts(groups, self.samples, enough)

    def end(self, log: PartialRollouts, version: int) -> tuple[dict[int, str], list[int]]:
        """Return the groups to train, number → uid, oldest first, and the numbers of those that are dropped. The
        others stay open."""
        complete = set(log.complete)
        numbers = [number for number in self._in_order() if self.open[number].uid in complete][: self.batch]
        self._ages += [version - self.open[number].started for number in numbers]
        taken = {number: self.open.pop(number) for number in numbers}
        self.lengths.add(group.samples.values() for group in taken.values())
        dropped = []
        if self.bound is None:
            dropped = sorted(self.open)
            self.lengths.drop((group.samples.values() for group in self.open.values()), self.samples)
            self.open = {}
        self.counts += Counter(dropped=len(dropped)) + log.counts
        return {number: group.uid for number, group in taken.items()}, dropped

    def complete_step(self) -> None:
        """Let a checkpoint have the state of now, also if the next step has begun when it is saved."""
        samples = {
            number: {repetition: replace(sample) for repetition, sample in group.samples.items()}
            for number, group in self.open.items()
        }
        groups = {number: replace(group, samples=samples[number]) for number, group in self.open.items()}
        self._saved = {"next": self.next, "lengths": self.lengths.state()}, groups

    def metrics(self) -> dict[str, float]:
        """Return ``oversampling/…``: groups that stay open, counts since the last call, ages of the groups that were
        trained since then, and lengths over the whole run."""
        ages, counts = self._ages, self.counts
        self._ages, self.counts = [], Counter()
        metrics = {
            "open_groups": float(len(self.open)),
            "dropped_groups": float(counts["dropped"]),
            "resumed_trajectories": float(counts["resumed"]),
            "restarted_trajectories": float(counts["restarted"]),
            "staleness_mean": float(np.mean(ages)) if ages else 0.0,
            "staleness_max": float(max(ages, default=0)),
        } | self.lengths.metrics((group.samples.values() for group in self.open.values()), self.samples)
        return {f"oversampling/{name}": value for name, value in metrics.items()}

    # ------------------------------------------------------------------ state
    @property
    def oldest(self) -> int:
        """Number of the first prompt that is not trained or dropped."""
        return min(self.open, default=self.next)

    def state(self) -> dict[str, Any]:
        """Return the position and the lengths after the last complete step as plain values."""
        return self._saved[0]

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.next = int(state["next"])
        self.lengths.load_state(state["lengths"])
        self.complete_step()

    def encode(self) -> bytes:
        """Return the groups that the last complete step left open, with all that was sampled."""
        return b"".join(bytes(part) for part in CODEC.encode(list(self._saved[1].items())))

    def decode(self, data: bytes) -> None:
        """Restore what :meth:`encode` returned."""
        self.open = dict(CODEC.decode(data))
        self.complete_step()

    # ------------------------------------------------------------------ bookkeeping
    def _in_order(self) -> list[int]:
        return sorted(self.open, key=lambda number: (self.open[number].started, number))

    def _distinct(self, uid: str) -> str:
        """Return the uid, with another number if an open group has it: small data repeat a prompt soon."""
        used, plain, copy = {group.uid for group in self.open.values()}, uid.partition("#")[0], 0
        while uid in used:
            copy += 1
            uid = f"{plain}#{copy}"
        return uid


type _Samples = Iterable[Iterable[PartialTrajectory]]
"""The samples of several groups."""


class SampledLengths:
    """Lengths of the trained samples of a run, and of all that it started, in sampled tokens.

    The length of a started sample that is not finished is only known to exceed what it has. The mean over all that
    were started is therefore estimated by the product limit (Kaplan and Meier, 1958), which is the plain mean if all
    are finished. If the longest are always dropped, it is a lower bound.
    """

    def __init__(self) -> None:
        self.trained: Counter[int] = Counter()
        """Length → number of trained samples."""
        self.finished: Counter[int] = Counter()
        """Length → number of finished samples of dropped groups."""
        self.cut: Counter[int] = Counter()
        """Length so far → number of unfinished samples of dropped groups."""

    def add(self, groups: _Samples) -> None:
        """Add the samples of trained groups."""
        self.trained += Counter(_tokens(sample) for group in groups for sample in group)

    def drop(self, groups: _Samples, samples: int) -> None:
        """Add those of dropped groups, which have ``samples`` each."""
        finished, cut = _counted(groups, samples)
        self.finished += finished
        self.cut += cut

    def metrics(self, groups: _Samples, samples: int) -> dict[str, float]:
        """Return the mean lengths, and how much shorter than all started samples the trained ones are, as a negative
        share. ``groups``: the open ones, with ``samples`` each."""
        finished, cut = _counted(groups, samples)
        trained = _mean(self.trained, Counter())
        started = _mean(self.trained + self.finished + finished, self.cut + cut)
        return {
            "trained_mean_tokens": trained,
            "started_mean_tokens": started,
            "length_bias": trained / started - 1 if started else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Return everything as plain values."""
        counts = {"trained": self.trained, "finished": self.finished, "cut": self.cut}
        return {name: sorted(lengths.items()) for name, lengths in counts.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        counts = {name: Counter({int(length): int(count) for length, count in state[name]}) for name in state}
        self.trained, self.finished, self.cut = counts["trained"], counts["finished"], counts["cut"]


def _counted(groups: _Samples, samples: int) -> tuple[Counter[int], Counter[int]]:
    """Return (lengths of finished samples, lengths so far of the others), including those without tokens."""
    finished, cut = Counter[int](), Counter[int]()
    for group in groups:
        begun = list(group)
        finished += Counter(_tokens(sample) for sample in begun if sample.trajectory is not None)
        cut += Counter(_tokens(sample) for sample in begun if sample.trajectory is None)
        cut[0] += max(samples - len(begun), 0)
    return finished, cut


def _mean(finished: Counter[int], cut: Counter[int]) -> float:
    """Return the mean by the product limit; ``cut``: lengths that are exceeded."""
    left, share, mean, before = finished.total() + cut.total(), 1.0, 0.0, 0
    for length in sorted(finished | cut):
        mean += share * (length - before)
        share *= 1 - finished[length] / left
        left, before = left - finished[length] - cut[length], length
    return mean


def _tokens(sample: PartialTrajectory) -> int:
    """Return the number of sampled tokens."""
    if sample.trajectory is not None:
        return _sampled(sample.trajectory)
    begun = 0 if sample.begun is None else len(sample.begun.generation.token_ids)
    return begun + sum(len(turn.generation.token_ids) for turn in sample.turns)


def _sampled(trajectory: Trajectory) -> int:
    masks: Sequence[np.ndarray] = [row.loss_mask for row in trajectory.rows]
    return sum(int(np.count_nonzero(mask)) for mask in masks)


class OversampledRollouts(AgedRollouts):
    """Starts more prompts than a step trains, and ends the step's sampling at the first complete groups
    (``trainer.oversampling``). The others are continued by the next step, or dropped."""

    can_rewind = False
    prefix = "oversampling"

    def __init__(self, run: RunState, parts: StepParts) -> None:
        super().__init__(run, parts)
        cfg, generator = parts.cfg, parts.generator
        limits, keeps = cfg.trainer.oversampling, cfg.trainer.oversampling.unfinished == "keep"
        self.bound = limits.max_staleness_steps if keeps else 0
        self.groups = OversampledGroups(
            cfg.trainer.train_batch_size,
            limits.ratio,
            cfg.generator.n_samples_per_prompt,
            self.bound if keeps else None,
            self.loader.prompt,
            self.loader.ready,
        )
        self._taken: dict[int, str] = {}
        self._dropped: list[int] = []
        if generator is not None and not isinstance(generator, SkyRLGymGenerator):
            warnings.warn(
                f"trainer.oversampling.ratio={limits.ratio}: {type(generator).__name__} finishes all trajectories that"
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
