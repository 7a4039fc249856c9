"""The stream of groups: rollouts that run ahead of training, within the bound on staleness.

It needs no Ray, engine or trainer: a coroutine samples a group, and the caller takes batches and reports the published
version. Call all methods on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_megatron.errors import DataError, DistributedError, EngineError, RowsLostError, SkyRLMegatronError
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.sources.group import Group, GroupLog, GroupStream
from skyrl_megatron.sources.staleness import Concurrency, DoneGroups, can_step, max_new_groups

log = logging.getLogger(__name__)
StalePolicy = Literal["wait", "drop", "retry"]
FAILURES_IN_A_ROW = 32
"""Consecutive failed groups that end the run, or the groups of a batch if those are more."""
CLOSE_TIMEOUT_S = 10.0
GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The limits of a stream."""

    batch: int
    """Groups of a step."""
    steps: int
    """Steps of the whole run. Nothing is sampled for later steps."""
    bound: int
    """Maximum staleness in steps: the trained version minus the version of the oldest trained token."""
    workers: int
    """Maximum number of groups that are sampled at the same time."""
    stale_policy: StalePolicy = "wait"
    """What happens if a group is unfinished at its deadline: the step waits for it, the group and its prompt are
    dropped, or the prompt is sampled again (retry)."""
    timeout_s: float = 1800.0
    """Timeout of a group."""
    sample_batches: int = -1
    """Maximum number of filtered and refused groups per batch, in batches; negative: no limit."""
    oldest: int | None = None
    """Maximum staleness of a group that a step takes; older ones are refused. None: ``bound``."""
    ahead: float | None = None
    """Batches that may be finished, or sampled since the version before the published one; no group is started
    beyond. Groups that take longer do not count. None: as many as ``bound`` allows."""


class RolloutStream(GroupStream):
    """Samples prompts in order and hands out batches of finished groups, oldest first.

    ``sample``: samples a group; if it raises, the group has failed. ``prompt``: number → dataset entry. ``useful``:
    whether a group has a learning signal; other groups are filtered. ``ready``: whether a prompt can be asked for yet.
    ``refusal``: name of the gate that refuses a group's rows at a version, None if none does; ``refused_is_observed``:
    whether the groups that a gate refuses are observed.
    ``observe``: gets the number and the rows of each finished group, None if it is given up without. ``group_log``:
    records each finished group before it can be taken. ``concurrency``: the limit on concurrent groups,
    ``limits.workers`` by default.
    """

    def __init__(
        self,
        sample: Callable[[Group], Awaitable[GeneratorOutput]],
        prompt: Callable[[int], dict[str, Any]],
        limits: StreamLimits,
        *,
        useful: Callable[[GeneratorOutput], bool] = lambda output: True,
        refusal: Callable[[GeneratorOutput, int], str | None] = lambda output, version: None,
        refused_is_observed: Callable[[str], bool] = lambda gate: True,
        ready: Callable[[int], bool] = lambda number: True,
        observe: Callable[[int, GeneratorOutput | None], None] = lambda number, output: None,
        group_log: GroupLog | None = None,
        say: Callable[[str], None] = log.warning,
        concurrency: Concurrency | None = None,
    ) -> None:
        self.concurrency = concurrency or Concurrency(limits.workers)
        self.sample, self.prompt, self.limits = sample, prompt, limits
        self.useful, self.group_log, self.say = useful, group_log, say
        self.ready, self.observe = ready, observe
        self.refusal, self.refused_is_observed = refusal, refused_is_observed
        self.refused: Counter[str] = Counter()
        """Refused groups by gate, since the last :meth:`metrics`."""
        self.version = 0
        """The published version. The next step trains it."""
        self.taken = 0
        """Groups that were handed out since version 0."""
        self.done = DoneGroups()
        """The groups that were trained or given up."""
        self.counts: Counter[str] = Counter()
        """``dropped``, ``retried``, ``failed`` and ``filtered`` groups since the last :meth:`metrics`."""
        self._next, self._retries = 0, deque[int]()
        self._skipped: set[int] = set()  # numbers ≥ _next that must not be started
        self._running: dict[int, Group] = {}
        self._finished: dict[int, Group] = {}
        self._running_by, self._finished_by = Counter[int](), Counter[int]()
        self._begun: dict[int, int] = {}
        self._order: dict[int, int] = {}  # planned group → its position; planned groups are taken first
        self._given_up: list[int] = []
        self._recorded: list[Group] = []  # finished groups of an earlier process, until the start
        self._failed_in_a_row, self._useless = 0, 0
        self._broken: BaseException | None = None
        self._changed = asyncio.Event()
        self._open = False

    # ------------------------------------------------------------------ start and end
    def restore(
        self, finished: Iterable[Group] = (), planned: Iterable[int] = (), begun: Mapping[int, int] | None = None
    ) -> None:
        """Let the stream start with the groups of a log; call it before :meth:`start`.

        ``finished``: groups that are not sampled again; ``planned``: numbers of the finished groups that are taken
        first, in this order, to repeat lost steps; ``begun``: number → version of the oldest recorded token, for
        partially sampled groups.
        """
        self._recorded = list(finished)
        self._order = {number: position for position, number in enumerate(planned)}
        self._begun = dict(begun or {})

    def start(self, version: int, *, oldest: int = 0, ahead: Iterable[int] = ()) -> None:
        """See :class:`GroupStream`."""
        self.version, self.taken = version, version * self.limits.batch
        self.done, self._next = DoneGroups(oldest, ahead), oldest
        self._skipped = set(self.done.ahead)
        for group in self._recorded:
            if group.number not in self.done:
                self._skipped.add(group.number)
                self._put(group)
        self._recorded = []
        self._expire(version - 1)
        self._open = True
        self.concurrency.start()
        self._fill()

    async def close(self) -> None:
        """Cancel the groups that are being sampled."""
        self._open = False
        tasks = [group.task for group in self._running.values() if group.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    def state(self) -> dict[str, Any]:
        """Return the :class:`DoneGroups` as plain values."""
        return self.done.state()

    # ------------------------------------------------------------------ for the trainer
    async def take(self) -> list[Group]:
        """Return the groups of a step, in the order of their prompts, once no remaining group would miss its deadline.

        Raises DataError if too many groups fail in a row or are filtered, EngineError if no engine answers,
        DistributedError if no group finishes, and the errors of the group log.
        """
        while not self._ready():
            self._raise_if_hopeless()
            self._changed.clear()
            try:
                async with asyncio.timeout(self.limits.timeout_s + GRACE_S):
                    await self._changed.wait()
            except TimeoutError as error:
                raise DistributedError(
                    f"phase generate: no group finished within {self.limits.timeout_s:g} s (trainer.phase_timeout_s). "
                    "Raise it, or look for engines or environments that hang"
                ) from error
        groups = sorted(self._finished.values(), key=self._priority)[: self.limits.batch]
        for group in groups:
            self._remove_finished(group)
        self.taken += len(groups)
        self._useless = 0
        self._expire(self.version)
        self._fill()
        return sorted(groups, key=lambda group: group.number)

    def give_back(self, groups: Sequence[Group]) -> None:
        """Record that a batch is not trained. Its groups are not handed out again."""
        self.taken -= len(groups)
        self._fill()

    def trained(self, groups: Sequence[Group]) -> list[int]:
        """Mark the groups of a step as trained. Returns the numbers of the groups that were given up since the
        previous step."""
        for group in groups:
            self.done.add(group.number)
        given_up, self._given_up = self._given_up, []
        return given_up

    def advance(self, version: int) -> None:
        """Record that engines serve ``version`` now."""
        self.version = version
        if self._open:
            self._fill()

    def staleness(self, groups: Iterable[Group]) -> list[int]:
        """Return the staleness in steps of each row, if it were trained now."""
        return [self.version - version for group in groups for version in group.versions]

    def metrics(self) -> dict[str, float]:
        """Return ``async/…``: groups that wait or are in flight, and counts of other groups since the last call."""
        names = ("dropped", "retried", "failed", "filtered")
        counted = {f"async/{name}_groups": float(self.counts[name]) for name in names}
        counted |= {f"generate/refused_by_{gate}": float(count) for gate, count in self.refused.items()}
        self.counts.clear()
        self.refused.clear()
        return counted | {
            "async/buffer_size": float(len(self._finished)),
            "async/in_flight_groups": float(len(self._running)),
            "async/concurrency": float(self.concurrency.limit),
        }

    # ------------------------------------------------------------------ sampling
    def _fill(self) -> None:
        """Start as many groups as the limits allow."""
        limits = self.limits
        while self._open and len(self._running) < self.concurrency.limit and not self._far_ahead():
            accepted, running = self.taken + len(self._finished), len(self._running)
            if (
                max_new_groups(
                    batch=limits.batch,
                    bound=limits.bound,
                    version=self.version,
                    steps=limits.steps,
                    accepted=accepted,
                    running=running,
                )
                <= 0
            ):
                return
            try:
                number = self._retries.popleft() if self._retries else self._next_number()
                if number is None:
                    return
                prompt = self.prompt(number)
            except SkyRLMegatronError as error:
                self._break(error)
                return
            group = Group(number, prompt, min(self._begun.pop(number, self.version), self.version))
            self._running[number] = group
            self._running_by[group.started] += 1
            group.task = asyncio.create_task(self._sample(group), name=f"group {number}")

    def _far_ahead(self) -> bool:
        """Return whether the groups that training will soon have suffice (``limits.ahead``)."""
        if self.limits.ahead is None:
            return False
        soon = sum(count for started, count in self._running_by.items() if started >= self.version - 1)
        return len(self._finished) + soon >= self.limits.ahead * self.limits.batch

    def _next_number(self) -> int | None:
        """Return the number of the next prompt, None if it is not ready."""
        while self._next in self._skipped:
            self._skipped.discard(self._next)
            self._next += 1
        if not self.ready(self._next):
            return None
        self._next += 1
        return self._next - 1

    async def _sample(self, group: Group) -> None:
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                group.finish(await self.sample(group))
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # it expired, or the stream was closed
                return
            if self._is_running(group) and isinstance(error, RowsLostError):
                self._sample_again(group, error)
            elif self._is_running(group):
                self._fail(group, error)
            return
        if self._is_running(group):  # otherwise it expired, and the sampler ignored the cancellation
            await self._accept(group)

    async def _accept(self, group: Group) -> None:
        assert group.output is not None
        self._failed_in_a_row = 0
        try:
            gate = self.refusal(group.output, self.version)
        except SkyRLMegatronError as error:
            self._break(error)
            return
        if gate is not None or not self.useful(group.output):
            self._useless += 1
            if gate is None or self.refused_is_observed(gate):
                self._observe(group.number, group.output)
            if gate is not None:
                self.refused[gate] += 1
            self._give_up(group, "filtered" if gate is None else "refused")
            return
        if self.group_log is not None:
            try:
                await self.group_log.finished(group)
            except RowsLostError as error:
                self._sample_again(group, error)
                return
            except Exception as error:  # an unrecorded group must not be trained on
                self._break(error)
                return
        self._remove_running(group)
        self._put(group)
        self._fill()

    def _observe(self, number: int, output: GeneratorOutput | None) -> None:
        try:
            self.observe(number, output)
        except SkyRLMegatronError as error:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """End the run with the error: the caller may be a group's task, whose errors only end the group."""
        self._broken = error
        self._changed.set()

    def _put(self, group: Group) -> None:
        self._finished[group.number] = group
        self._finished_by[group.oldest] += 1
        self._observe(group.number, group.output)
        self._changed.set()

    def _fail(self, group: Group, error: BaseException) -> None:
        self._failed_in_a_row += 1
        if not self.counts["failed"]:
            self.say(f"prompt {group.uid} is skipped: {_describe(error)}")
        limit = max(FAILURES_IN_A_ROW, self.limits.batch)
        if self._failed_in_a_row >= limit and self._broken is None:
            kind = EngineError if isinstance(error, EngineError) else DataError
            self._broken = kind(f"{limit} groups failed one after another, the last one: {_describe(error)}")
            self._broken.__cause__ = error
        self._give_up(group, "failed")

    def _sample_again(self, group: Group, error: RowsLostError) -> None:
        """Sample a group again, a part of which was lost with its host before it was recorded."""
        self.counts["retried"] += 1
        self.say(f"prompt {group.uid} is sampled again: {_describe(error)}")
        self._remove_running(group)
        self._retries.append(group.number)
        self._changed.set()
        self._fill()

    def _give_up(self, group: Group, why: str) -> None:
        """Give up a group that is being sampled, and its prompt."""
        self.counts[why] += 1
        self._remove_running(group)
        self._give_up_number(group.number)
        self._changed.set()
        self._fill()

    def _give_up_number(self, number: int) -> None:
        self._given_up.append(number)
        self.done.add(number)
        self._observe(number, None)  # without effect if it finished

    def _expire(self, taken: int) -> None:
        """Remove the groups that would be trained too late, after the step at version ``taken``."""
        due = taken - self.limits.bound
        late = [group for group in self._finished.values() if group.oldest <= due]
        for group in late:
            self._remove_finished(group)
        # A running group is as old as its first token may be, which is what its deadline counts from.
        for group in [group for group in self._running.values() if group.started <= due]:
            self._remove_running(group)
            assert group.task is not None
            group.task.cancel()
            late.append(group)
        for group in late:
            if self.limits.stale_policy == "drop":
                self.counts["dropped"] += 1
                self._give_up_number(group.number)
            else:
                self.counts["retried"] += 1
                self._retries.append(group.number)

    # ------------------------------------------------------------------ bookkeeping
    def _priority(self, group: Group) -> tuple[int, int, int]:
        return self._order.get(group.number, len(self._order)), group.oldest, group.number

    def _ready(self) -> bool:
        limits = self.limits
        if self._broken is not None:
            raise self._broken
        if limits.oldest is not None:
            self._refuse_stale(limits.oldest)
        if len(self._finished) < limits.batch:
            return False
        if limits.stale_policy != "wait" or min(self._running_by, default=self.version) >= self.version:
            return True  # no running group has an earlier deadline
        return can_step(
            batch=limits.batch,
            bound=limits.bound,
            version=self.version,
            running=self._running_by,
            finished=self._finished_by,
        )

    def _refuse_stale(self, oldest: int) -> None:
        """Give up the finished groups that are older than a gate admits, now that they would be taken."""
        late = [group for group in self._finished.values() if self.version - group.oldest > oldest]
        for group in late:
            self._remove_finished(group)
            self.refused["staleness"] += 1
            self._give_up_number(group.number)
        if late:
            self._fill()

    def _raise_if_hopeless(self) -> None:
        limit = self.limits.sample_batches
        if 0 <= limit and self._useless >= limit * self.limits.batch:
            raise DataError(
                f"trainer.algorithm.dynamic_sampling.max_sample_batches={limit}: in so many batches too few prompts"
                " had responses with different rewards. The task is too easy or too hard for the policy, or"
                " generator.n_samples_per_prompt is too small"
            )

    def _is_running(self, group: Group) -> bool:
        """Return whether a group is still being sampled: it has not expired, and the stream is open."""
        return self._open and self._running.get(group.number) is group

    def _remove_running(self, group: Group) -> None:
        del self._running[group.number]
        self.concurrency.measure(len(self._running))
        _decrement(self._running_by, group.started)

    def _remove_finished(self, group: Group) -> None:
        del self._finished[group.number]
        _decrement(self._finished_by, group.oldest)


def _decrement(counts: Counter[int], version: int) -> None:
    counts[version] -= 1
    if not counts[version]:
        del counts[version]


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "not sampled within trainer.phase_timeout_s"
    return f"{type(error).__name__}: {error}"
