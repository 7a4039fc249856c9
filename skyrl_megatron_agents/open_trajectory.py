"""A trajectory whose agent may call: its access, its calls, and what it has used of its limits."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron_agents.graph import Graph, SampledCall

if TYPE_CHECKING:
    from skyrl_megatron_agents.call_log import LoggedCall
    from skyrl_megatron_agents.rows import Outcome


@dataclass(frozen=True, slots=True)
class TrajectoryLimits:
    """What the agent of one trajectory may use (``generator.agent``). One that wants more has failed."""

    calls: int = 10_000
    """Requests, also those that are refused."""
    samples: int = 2_000
    """Sampled answers."""
    tokens: int = 4_000_000
    """Sampled tokens."""
    connections: int = 64
    """Requests at once. A further one is refused, but no failure."""


@dataclass(frozen=True, slots=True)
class Access:
    """How an agent calls the policy in its trajectory."""

    url: str
    """Anthropic's base URL; OpenAI's is ``url`` + ``/v1``."""
    key: str
    model: str

    def environment(self) -> dict[str, str]:
        """Return the variables that the libraries of OpenAI and Anthropic read."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "AGENT_MODEL": self.model,
        }


SHARE, BURST_S = 0.2, 0.25
"""Share of the gateway's time that one trajectory may take for its requests, and seconds that it may take at once."""
REQUEST_S, BYTE_S, VALUE_S, SAMPLE_S = 2e-3, 2e-7, 2e-5, 1.5e-3
"""Estimated processing of a request: of each, of a byte, of a JSON value and of a sample, in seconds."""


@dataclass(slots=True)
class Pace:
    """How much processing a trajectory asked for, by an estimate that does not depend on what else the machine does.
    Agents that ask for much wait; others do not wait for them."""

    seconds: float = 0.0
    at: float = 0.0

    def charge(self, seconds: float, now: float) -> None:
        """Add so many seconds of processing. ``now``: time of the event loop."""
        self.seconds = max(self.seconds - SHARE * (now - self.at), 0.0) + seconds
        self.at = now

    def wait_s(self, now: float) -> float:
        """Return after how many seconds the next request may be read."""
        self.charge(0.0, now)
        return max(self.seconds - BURST_S, 0.0) / SHARE


@dataclass(eq=False, slots=True)
class Answer:
    """A request that is answered, or will be."""

    done: asyncio.Future[tuple[int, str, bytes]]
    waiting: int = 0
    """Clients that are connected for it."""
    delivered: bool = False


@dataclass(eq=False)
class OpenTrajectory:
    """A trajectory whose agent may call."""

    name: str
    access: Access
    sampling: Mapping[str, Any]
    adapter: str = ""
    seeds: tuple[int, str, int, int] | None = None
    """(seed of the run, uid, repetition, step) of seeded requests."""
    graph: Graph = field(default_factory=Graph)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    texts: list[tuple[str, SampledCall]] = field(default_factory=list)
    too_long: str = ""
    """Why the last prompt was refused, if it did not fit into the context."""
    failures: dict[str, str] = field(default_factory=dict)
    """Request → why it failed by no fault of the agent, unless it was answered later."""
    faults: dict[str, str] = field(default_factory=dict)
    """Request → why what the policy sampled for it could not be written as an answer, unless it was answered later."""
    trained: bool = True
    """Whether samples are trained on, and so must come from a distribution that is accounted for."""
    refused: str = ""
    """Why the last request was refused that would have changed the distribution of samples."""
    limits: TrajectoryLimits = TrajectoryLimits()
    exceeded: str = ""
    """The limit that the agent exceeded; "" if there is none. No further call is answered."""
    calls: int = 0
    """Requests until now."""
    tokens: int = 0
    """Sampled tokens until now."""
    in_flight: int = 0
    """Answers that are sampled now."""
    requests: int = 0
    """Requests that are read or answered now."""
    held: int = 0
    """Bytes of their bodies."""
    pace: Pace = field(default_factory=Pace)
    arriving: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Held while a request waits for the pace."""
    preparing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Held while a request is converted, or its answer written: the trajectories take turns with the processor."""
    first_unmatched: str = ""
    """Where a request with an answer that no path holds first differed from the sampled ones; "" if none did."""
    outcome: Outcome | None = None
    """How it ended; the generator sets it."""
    closed: bool = False
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    samples: Counter[tuple[int, bytes]] = field(default_factory=Counter)

    @property
    def failure(self) -> str:
        """Why a call failed that was not answered later; "" if there is none."""
        return next(iter(self.failures.values()), "")

    @property
    def agents_failure(self) -> str:
        """Why the trajectory has failed by the agent's own doing; "" if it has not."""
        return self.exceeded or next(iter(self.faults.values()), "")

    async def wait_for_pace(self, length: int) -> None:
        """Wait until a request with a body of ``length`` bytes may be read."""
        async with self.arriving:
            now = asyncio.get_running_loop().time()
            if (wait_s := self.pace.wait_s(now)) > 0:
                await asyncio.sleep(wait_s)
            self.pace.charge(REQUEST_S + BYTE_S * length, asyncio.get_running_loop().time())

    def charge(self, values: int, samples: int) -> None:
        """Count the processing of a request that was read."""
        self.pace.charge(VALUE_S * values + SAMPLE_S * samples, asyncio.get_running_loop().time())

    def count_call(self) -> str:
        """Count a request. Return the limit that the agent has exceeded."""
        self.calls += 1
        return self._over("calls", self.calls)

    def count_samples(self, count: int) -> str:
        """Return the limit that so many further samples exceed."""
        return self._over("samples", len(self.graph.calls) + self.in_flight + count) or self._over(
            "tokens", self.tokens + 1
        )

    def _over(self, name: str, used: int) -> str:
        most = getattr(self.limits, name)
        if used > most and not self.exceeded:
            self.exceeded = f"the agent wants more than generator.agent.max_{name}={most}"
        return self.exceeded


def continue_calls(trajectory: OpenTrajectory, before: OpenTrajectory) -> None:
    """Give a trajectory the calls of an earlier attempt of this process."""
    trajectory.graph, trajectory.texts, trajectory.samples = before.graph, before.texts, before.samples
    trajectory.tokens = before.tokens
    for request, answers in before.answers.items():
        trajectory.answers[request] = [Answer(each.done) for each in answers]


def restore_call(trajectory: OpenTrajectory, call: LoggedCall) -> None:
    """Add a call of the log to a trajectory."""
    graph = trajectory.graph
    for choice in call.choices:
        parent = None if choice.parent is None else graph.calls[choice.parent]
        end = bytes.fromhex(choice.end)
        text_digest = bytes.fromhex(choice.whole)
        added = SampledCall(
            choice.number,
            parent,
            choice.rest,
            choice.generation,
            end,
            choice.text_only,
            (),
            call.conversation,
            text_digest,
        )
        graph.restore(added)
        trajectory.tokens += len(choice.generation.token_ids)
        if choice.text is not None:
            trajectory.texts.append((choice.text, added))
        if trajectory.seeds is not None:
            turn = 0 if parent is None else len(parent.path())
            tokens = hashlib.blake2b(np.asarray(added.prompt_ids, np.int32).tobytes(), digest_size=16).digest()
            trajectory.samples[turn, tokens] += 1
    if (begins := call.begins) is not None:
        graph.restore_conversation(call.conversation, begins.system, begins.tools, begins.quoted)
    done: asyncio.Future[tuple[int, str, bytes]] = asyncio.get_running_loop().create_future()
    done.set_result((200, call.content_type, call.answer.encode()))
    trajectory.answers.setdefault(call.request, []).append(Answer(done))
