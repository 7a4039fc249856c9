"""Calls to all rank actors of a role. A call returns the results of all ranks, or fails for all."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, UnserializableException

from skyrl_megatron import device
from skyrl_megatron.errors import DistributedError, RankLostError, SkyRLMegatronError, SkyRLMegatronWarning

ACTOR_LOST = (RayActorError, OutOfMemoryError)
"""Errors of a call to an actor whose process died. OutOfMemoryError: Ray's memory monitor killed it."""
CALL_FAILED = (RayTaskError, UnserializableException)
"""Errors of a call that raised. UnserializableException: its exception cannot be unpickled here, which happens to
classes of plugins whose constructor has other parameters than the exception's ``args``."""
GRACE_S = 5.0
"""Seconds that the other ranks get to finish after one has failed."""
POLL_S = 5.0
ALIVE_S = 10.0
"""Deadline in seconds of a rank's health check, which it answers also while it is busy."""
LEAVE_S = 60.0
"""Seconds that a rank gets to leave process groups with a lost rank."""
WATCH = "watch"
"""Concurrency group of replaceable ranks: its calls are answered while others are running."""


@dataclass(slots=True)
class PendingCall:
    """A running call of several ranks, which wait for each other."""

    references: list[Any]
    ranks: Sequence[int]
    """Rank of each reference."""
    names: list[str]
    """Name of each rank in messages."""
    phase: str
    timeout_s: float
    group: ActorGroup
    further: list[list[Any]] = field(default_factory=list)
    """References to further results of each call, which stay in the object store."""
    started: float = field(default_factory=time.monotonic)

    def results(self) -> list[Any]:
        """Return the results in the order of the calls. Raises as :meth:`ActorGroup.call`."""
        waiting = dict(zip(self.references, self.ranks, strict=True))
        failures: dict[int, Exception] = {}
        deadline = self.started + self.timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(left, 0.2 if failures else POLL_S))
            for reference in done or ray.wait(list(waiting), timeout=0)[0]:
                rank = waiting.pop(reference)
                try:
                    ray.get(reference)
                except (*CALL_FAILED, *ACTOR_LOST) as error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                    failures[rank] = error
        if failures:
            self._fail(failures)
        if waiting:
            self._fail_stuck(sorted(waiting.values()))
        results: list[Any] = ray.get(self.references)
        return results

    def _fail(self, failures: dict[int, Exception]) -> None:
        """Raise the failure that explains the others: a dead or stopped process, else the first error."""
        died = [rank for rank, error in failures.items() if isinstance(error, ACTOR_LOST)]
        if died and self.group.replaceable:
            raise self._lost(died, f"the process died ({lost_because(failures[died[0]])})") from failures[died[0]]
        if len(failures) < len(self.references) and (lost := self.group.lost()):
            raise self._lost(lost, "the process does not answer")
        rank = died[0] if died else min(failures)
        try:
            raise_rank_error(failures[rank], self.names[rank], self.phase)
        except Exception as error:
            if died or len(failures) < len(self.references):
                self.group.kill(error)  # the others wait in a collective for a rank that never joins
            raise

    def _fail_stuck(self, stuck: list[int]) -> None:
        details = self.group.look()
        if self.group.replaceable and (lost := self.group.lost()):
            raise self._lost(lost, f"no answer within {self.timeout_s:g} s (trainer.phase_timeout_s){details}")
        names = ", ".join(self.names[rank] for rank in stuck)
        error = DistributedError(
            f"phase {self.phase}: no answer within {self.timeout_s:g} s (trainer.phase_timeout_s) from {names}; "
            f"{len(self.references) - len(stuck)} of {len(self.references)} had finished{details}"
        )
        self.group.kill(error)
        raise error

    def _lost(self, lost: Sequence[int], why: str) -> RankLostError:
        return RankLostError(f"{self.names[lost[0]]}, phase {self.phase}: {why}", self.group.role)


def raise_rank_error(error: Exception, rank: str, phase: str) -> NoReturn:
    """Raise the error of a call to a rank, as described in :meth:`ActorGroup.call`."""
    if isinstance(error, ACTOR_LOST):
        raise DistributedError(f"{rank}, phase {phase}: the process died ({lost_because(error)})") from error
    if isinstance(error, UnserializableException):
        raise DistributedError(f"{rank}, phase {phase}: {unpickled_line(error)}") from error
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, SkyRLMegatronError):
        raise cause from error
    if isinstance(cause, ValueError):
        raise DistributedError(f"{rank}, phase {phase}: {cause}") from error
    if device.is_out_of_memory(cause):
        first_line = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise DistributedError(
            f"{rank}, phase {phase}: out of memory ({first_line}); lower trainer.max_tokens_per_microbatch, set "
            "trainer.gradient_checkpointing=true, or use more ranks; add --check to the command to see how much a "
            "rank needs"
        ) from error
    raise error


def unpickled_line(error: UnserializableException) -> str:
    """Return type and message of an exception that cannot be unpickled: the last line of its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[-1]} (an exception that cannot be unpickled; its traceback is above)"


class ActorGroup:
    """The rank actors of one role. ``names``: the ranks' names in messages, with pid and node once known."""

    def __init__(self, role: str, actors: Sequence[Any], timeout_s: float) -> None:
        self.role, self.actors, self.timeout_s = role, list(actors), timeout_s
        self.names = [f"{role} rank {rank}" for rank in range(len(self.actors))]
        self.look: Callable[[], str] = lambda: ""
        """Called when ranks exceed a deadline, before they are killed. Returns a text for the error message."""
        self.replaceable = False
        """Whether lost ranks are reported by RankLostError and the others stay alive."""
        self._ended = ""  # why the ranks were ended

    def __len__(self) -> int:
        return len(self.actors)

    def start(
        self,
        method: str,
        *args: Any,
        phase: str = "",
        each: Sequence[Sequence[Any]] | None = None,
        timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,
        returns: Sequence[int] | None = None,
    ) -> PendingCall:
        """Call ``method`` on all ranks or on ``ranks``, without waiting. ``each``: further arguments per rank.
        ``returns``: number of each call's results, by default 1.

        Raises DistributedError if the group has been ended.
        """
        if not self.actors:
            raise DistributedError(f"the {self.role} ranks have been ended{self._ended}: start the run again")
        called = ranks if ranks is not None else range(len(self.actors))
        extra = each if each is not None else [()] * len(called)
        counts = returns if returns is not None else [1] * len(called)
        calls = [
            getattr(self.actors[rank], method).options(num_returns=count).remote(*args, *rank_arguments)
            for rank, rank_arguments, count in zip(called, extra, counts, strict=True)
        ]
        answers = [call if count > 1 else [call] for call, count in zip(calls, counts, strict=True)]
        references, further = [first for first, *_ in answers], [rest for _, *rest in answers]
        timeout_s = timeout_s or self.timeout_s
        return PendingCall(references, called, list(self.names), phase or method, timeout_s, self, further)

    def call(self, method: str, *args: Any, **options: Any) -> list[Any]:
        """Return the results of ``method`` by rank. ``options`` as for :meth:`start`.

        A rank's error is raised for all. A SkyRLMegatronError is raised unchanged. A ValueError and a lack of memory
        become a DistributedError with role, rank, process and phase. Other errors keep their traceback. If ranks wait
        for a failed one, or the deadline passes, all actors of the group are killed first.
        """
        return self.start(method, *args, **options).results()

    def repeat_warnings(self) -> None:
        """Repeat the ranks' warnings since the last call in this process, each text once."""
        for text in dict.fromkeys(text for texts in self.call("take_warnings") for text in texts):
            warnings.warn(text, SkyRLMegatronWarning, stacklevel=2)

    def lost(self, *, stopped: bool = True) -> list[int]:
        """Return the ranks of a replaceable group whose process died. ``stopped``: include those that do not answer
        within :data:`ALIVE_S`."""
        if not self.replaceable or not self.actors:
            return []
        asked = [actor.alive.options(concurrency_group=WATCH).remote() for actor in self.actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ALIVE_S)
        return [rank for rank, each in enumerate(asked) if (_gone(each) if each in answered else stopped)]

    def replace(self, lost: Sequence[int], make: Callable[[int], Any]) -> list[int]:
        """Replace each ``lost`` rank by the actor ``make(rank)``, and let the others leave their process groups.

        A rank that does not leave within :data:`LEAVE_S` is replaced too. Returns the replaced ranks.
        """
        for rank in lost:
            ray.kill(self.actors[rank])
        new = {rank: make(rank) for rank in lost}
        leaving = {actor.leave.remote(): rank for rank, actor in enumerate(self.actors) if rank not in new}
        done, _ = ray.wait(list(leaving), num_returns=len(leaving), timeout=LEAVE_S) if leaving else ([], [])
        for reference, rank in leaving.items():
            if reference not in done or _failed(reference):
                ray.kill(self.actors[rank])
                new[rank] = make(rank)
        self.actors = [new.get(rank, actor) for rank, actor in enumerate(self.actors)]
        return sorted(new)

    def end_waiting(self, error: Exception) -> None:
        """End all ranks after ``error``, because some wait for the failed one, unless lost ranks can be replaced."""
        if not self.lost():
            self.kill(error)

    def kill(self, error: Exception | None = None) -> None:
        """End all ranks. ``error``: the reason, for the message of later calls."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        self._ended = f" ({_in_a_line(error)})" if error else ""


def _gone(answer: Any) -> bool:
    try:
        ray.get(answer)
    except ACTOR_LOST:
        return True
    return False


def _failed(answer: Any) -> bool:
    try:
        ray.get(answer)
    except (*CALL_FAILED, *ACTOR_LOST):
        return True
    return False


def _in_a_line(error: Exception) -> str:
    if isinstance(error, UnserializableException):
        return unpickled_line(error)
    cause = error.cause if isinstance(error, RayTaskError) else error
    first = (str(cause).splitlines() or [""])[0]
    return first if isinstance(cause, SkyRLMegatronError) else f"{type(cause).__name__}: {first}"


def lost_because(error: Exception) -> str:
    """Return in one line why a process died. ``error``: one of :data:`ACTOR_LOST`."""
    if isinstance(error, OutOfMemoryError):
        used = re.search(r"was ([\d.]+ ?[GMT]i?B / [\d.]+ ?[GMT]i?B)", str(error))
        return (
            f"Ray killed it because its node ran out of memory{f': {used[1]} in use' if used else ''}; lower "
            "trainer.max_tokens_per_microbatch or generator.inference_engine.max_num_seqs, use fewer engines or ranks "
            "on that node, or end other processes there"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [
        line for line in lines if "exit" in line.lower() or "killed" in line.lower() or "memory" in line.lower()
    ]
    return (telling or lines or ["unknown reason"])[0].partition(". Some common causes")[0]
