"""The capture gateway: agents call the policy by their own wire, and every token that it samples is recorded.

Each trajectory has a base URL and a key. It serves OpenAI's ``/v1/chat/completions``, ``/v1/completions`` and
``/v1/responses`` and Anthropic's ``/v1/messages`` (with ``count_tokens``), streamed or not. A request goes this way:

1. vLLM's own serving code converts and renders it (``inference/vllm/wire_app.py``). The longest path of the
   trajectory's graph that its messages begin with gives the first tokens, exactly as they were sampled.
2. The engines sample: token ids in, token ids out. The sampling distribution is the run's; a request sets only its
   limit of tokens, stops, structured outputs and biases.
3. vLLM's code writes the answer. Tokens and answer go to the log on disk, and then to the client.

A stream is made of the finished answer, so nothing that a client has seen can be lost. A request whose answer did not
reach its client, or that its library marks as a retry, gets the first answer. Any other is a new sample, also if it is
equal to an earlier one.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.rules.passthrough_keys import MASKS, WEIGHTS
from skyrl_megatron.errors import EngineError, RequestError, SkyRLMegatronError
from skyrl_megatron.rollout.interface import SamplingClient
from skyrl_megatron_agents.agent_call import AgentCall
from skyrl_megatron_agents.answers import COMPLETIONS, error_content, events, message_of_error, messages_of
from skyrl_megatron_agents.call_counts import CallCounts
from skyrl_megatron_agents.call_log import CallLog, LoggedCall, LoggedChoice, LoggedConversation
from skyrl_megatron_agents.graph import Graph
from skyrl_megatron_agents.http_endpoint import HttpServer
from skyrl_megatron_agents.key_guard import COUNT_TOKENS, KeyGuard
from skyrl_megatron_agents.open_trajectory import (
    Access,
    Answer,
    OpenTrajectory,
    TrajectoryLimits,
    continue_calls,
    restore_call,
)
from skyrl_megatron_agents.request_bounds import WIDE_BYTES, CheckedRequest, RefusedRequest, RequestBounds

if TYPE_CHECKING:
    from skyrl_megatron.inference.vllm.wire_app import WireApp

log = logging.getLogger(__name__)
PORT = "port"
__all__ = ["Access", "Gateway"]


class Gateway:
    """The server of a run, on its event loop.

    ``folder``: of the log. ``secret``: of the keys; the same one after a restart keeps them valid. ``sampling``: keys
    of vLLM's ``SamplingParams`` of all requests; ``max_tokens`` is the limit of a call. ``adapters``: names of the
    policy's adapters, which are also names of models. ``limits``: of each trajectory. ``may_set``: of the parameters
    that change the distribution of samples, those that requests may set where samples are trained on. Raises
    LaunchError if the port is taken, JournalError and CheckpointError for the log.
    """

    def __init__(
        self,
        client: SamplingClient,
        wire: WireApp,
        folder: str | Path,
        *,
        secret: str,
        model: str,
        sampling: Mapping[str, Any],
        host: str = "127.0.0.1",
        port: int = 0,
        adapters: Sequence[str] = (),
        limits: TrajectoryLimits | None = None,
        may_set: Collection[str] = (*MASKS, *WEIGHTS),
    ) -> None:
        self.client, self.wire, self.model, self.sampling = client, wire, model, dict(sampling)
        self.adapters = tuple(adapters)
        self.limits, self.bounds = limits or TrajectoryLimits(), RequestBounds(wire.max_model_len)
        self.may_set = frozenset(may_set)
        self._secret = secret.encode()
        self.trajectories: dict[str, OpenTrajectory] = {}
        self._keys: dict[bytes, str] = {}
        self.counts = CallCounts()
        self._changes_named = False
        self._noted: set[str] = set()
        self._thresholds = gc.get_threshold()
        self.log = CallLog(folder)
        try:
            self.server = HttpServer(KeyGuard(self), host, port, PORT)
        except BaseException:
            self.log.close()
            raise

    def note_once(self, text: str) -> None:
        """Log a warning unless one that ends alike was logged."""
        if (known := text.partition(": ")[2]) not in self._noted:
            self._noted.add(known)
            log.warning("%s", text)

    def name_changes(self, names: Sequence[str], trajectory: str) -> None:
        """Log once which parameters of requests change what is sampled, with no support that describes it."""
        if not self._changes_named:
            self._changes_named = True
            log.warning(
                "requests of trajectory %s set %s: tokens are not sampled from the trainer's softmax(logits / "
                "temperature), and neither ratios nor off-policy correction account for that",
                trajectory,
                ", ".join(names),
            )

    async def start(self) -> None:
        """Serve."""
        gc.collect()
        gc.freeze()  # a garbage collection over vLLM's modules would hold all calls for half a second
        gc.set_threshold(2_000, 20, 100)  # and one over 1,000 trajectories would for 0.2 s, at every 500th call
        await self.server.start()

    async def stop(self) -> None:
        """Refuse further calls, cancel those that are sampled, and close the log. Requests that are converted in
        another thread end with it."""
        for trajectory in list(self.trajectories.values()):
            await self.close(trajectory.name)
        await self.server.stop()
        await self.wire.stop()
        gc.set_threshold(*self._thresholds)
        await asyncio.to_thread(self.log.close)

    def is_key(self, given: bytes) -> bool:
        """Return whether this is the key of a trajectory."""
        return given in self._keys

    def key_of(self, name: str) -> str:
        """Return the key of a trajectory."""
        return "sk-" + hmac.new(self._secret, name.encode(), hashlib.blake2s).hexdigest()

    def open(
        self,
        name: str,
        *,
        sampling: Mapping[str, Any] | None = None,
        adapter: str = "",
        seeds: tuple[int, str, int, int] | None = None,
        trained: bool = True,
    ) -> OpenTrajectory:
        """Let an agent call. A name that the log knows, or that was closed and not forgotten, continues with its
        earlier calls, whose answers equal requests get. ``name``: unique in the run; letters, digits and ``-_.`` only.
        ``trained``: whether samples are trained on.
        """
        if not name or not all(character.isalnum() or character in "-_." for character in name):
            raise ValueError(f"trajectory {name!r}: use letters, digits and -_. for its name")
        access = Access(f"{self.server.url}/{name}", self.key_of(name), adapter or self.model)
        merged = {**self.sampling, **(sampling or {})}
        made = OpenTrajectory(name, access, merged, adapter, seeds, limits=self.limits, trained=trained)
        before = self.trajectories.get(name)
        self.trajectories[name] = made
        self._keys[access.key.encode()] = name
        if before is not None:
            continue_calls(made, before)
            return made
        for call in self.log.stored.get(name, ()):
            restore_call(made, call)
        return made

    async def close(self, name: str) -> Graph:
        """Refuse further calls of a trajectory, cancel those that are sampled, and return its graph."""
        trajectory = self.trajectories[name]
        trajectory.closed = True
        for task in list(trajectory.tasks):
            task.cancel()
        if trajectory.tasks:
            await asyncio.wait(list(trajectory.tasks), timeout=30.0)
        return trajectory.graph

    async def forget(self, names: Sequence[str]) -> None:
        """Free closed trajectories, whose rows are elsewhere."""
        for name in names:
            self.trajectories.pop(name, None)
            self._keys.pop(self.key_of(name).encode(), None)
        await self.log.forget(names)

    # ------------------------------------------------------------------ a request
    async def count_tokens(self, trajectory: OpenTrajectory, body: bytes) -> tuple[int, str, bytes]:
        """Answer a request of ``count_tokens``."""
        call = AgentCall(self, trajectory, counts=True)
        await call.take_turn()
        try:
            request, _ = await self._read(COUNT_TOKENS, body)
            trajectory.charge(request.values, 0)
            made = await self.wire.call(COUNT_TOKENS, request.body, call, apart=request.wide)
            return _in_dialect(COUNT_TOKENS, made)
        except Exception as error:
            return _error(COUNT_TOKENS, 400, _why_refused(error))
        finally:
            call.end_turn()

    async def answer_to(self, trajectory: OpenTrajectory, path: str, body: bytes, *, retry: bool) -> Answer:
        """Return the answer of a request, which may not be there yet: that of an equal earlier request if this one is
        a retry of it, else a new one. It is completed also if its client leaves."""
        if over := trajectory.count_call():
            return _answered(_error(path, 403, over))
        try:
            async with trajectory.preparing:
                request, digest = await self._read(path, body)
            trajectory.charge(request.values, request.samples)
        except RefusedRequest as error:
            code = None
            if error.too_long:
                trajectory.too_long, code = str(error), "context_length_exceeded"
            return _answered(_error(path, 400, str(error), code, error.field))
        same = trajectory.answers.setdefault(digest, [])
        earlier = next((answer for answer in same if not answer.delivered and not answer.waiting), None)
        if earlier is None and retry and same:
            earlier = same[-1]
        if earlier is not None:
            self.counts.now["retries"] += 1
            return earlier
        if trajectory.closed:
            return _answered(_error(path, 503, f"trajectory {trajectory.name} has ended"))
        made = Answer(asyncio.get_running_loop().create_future())
        same.append(made)
        task = asyncio.create_task(self._sample(trajectory, path, request, digest, made), name="agent's call")
        trajectory.tasks.add(task)
        task.add_done_callback(trajectory.tasks.discard)
        return made

    async def _read(self, path: str, body: bytes) -> tuple[CheckedRequest, str]:
        """Return a request and its digest. Raises RefusedRequest."""

        def read() -> tuple[CheckedRequest, str]:
            request = self.bounds.check(body)
            return request, hashlib.blake2b(path.encode() + _sorted(request.fields), digest_size=16).hexdigest()

        return await asyncio.to_thread(read) if len(body) > WIDE_BYTES else read()

    async def _sample(
        self, trajectory: OpenTrajectory, path: str, request: CheckedRequest, digest: str, answer: Answer
    ) -> None:
        """Sample for a request, record the call, and set its answer."""
        call = AgentCall(self, trajectory, request.fields)
        made = _error(path, 503, f"trajectory {trajectory.name} has ended")
        try:
            made = await self._sampled(trajectory, path, request, digest, call)
            if made[0] < 400:
                trajectory.failures.pop(digest, None)
                trajectory.faults.pop(digest, None)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if call.failure is None and not call.generations:  # nothing but the request is at fault
                made = _error(path, 400, _why_refused(error))
            elif call.failure is None and not isinstance(error, SkyRLMegatronError | OSError):
                log.warning("an answer of trajectory %s cannot be written: %s", trajectory.name, why)
                trajectory.faults[digest] = f"what the policy sampled cannot be written as an answer: {why}"
                made = _error(path, 500, trajectory.faults[digest])
            else:
                if not isinstance(error, SkyRLMegatronError):
                    log.exception("a call of trajectory %s failed", trajectory.name)
                trajectory.failures[digest] = why
                status = 503 if isinstance(error, EngineError) else 500
                made = _error(path, status, f"the call failed: {type(error).__name__}, see the log of the run")
        finally:
            call.end_turn()
            if made[0] >= 400:
                trajectory.answers[digest].remove(answer)
            answer.done.set_result(made)

    async def _sampled(
        self, trajectory: OpenTrajectory, path: str, request: CheckedRequest, digest: str, call: AgentCall
    ) -> tuple[int, str, bytes]:
        """Return the answer of a request, after its samples were recorded."""
        await call.take_turn()
        started = time.perf_counter()
        answer = await self.wire.call(path, request.body, call, apart=request.wide)
        if isinstance(call.failure, RequestError):
            return _error(path, 403 if trajectory.exceeded else 400, str(call.failure))
        if call.failure is not None:
            raise call.failure
        if answer[0] >= 500:
            raise ValueError(message_of_error(answer[2])[0])
        if call.generations and answer[0] < 400:
            await self._record(trajectory, path, digest, call, answer)
            trajectory.too_long = ""
            self.counts.sampled(time.perf_counter() - started - call.seconds, unmatched=call.text_only)
        return _in_dialect(path, answer, "context_length_exceeded" if call.too_long_message else None)

    async def _record(
        self, trajectory: OpenTrajectory, path: str, digest: str, call: AgentCall, made: tuple[int, str, bytes]
    ) -> None:
        """Add the sampled answers to the graph and to the log. They are on disk on return."""
        status, content_type, body = made
        messages = messages_of(path, content_type, body)
        if len(messages) != len(call.generations):
            raise ValueError(f"the answer has {len(messages)} choices for {len(call.generations)} samples")
        choices = []
        parent, conversation = call.match.parent, call.match.conversation
        begins = None
        if conversation is not None and not conversation.answered:
            begins = LoggedConversation(conversation.system, conversation.tools, sorted(conversation.quoted))
        rest = call.prompt_ids[0 if parent is None else parent.start + len(parent.generation.token_ids) :]
        for message, generation in zip(messages, call.generations, strict=True):
            continues = None if path == COMPLETIONS else message
            added = trajectory.graph.add(call.match, rest, generation, continues)
            added.text_only = call.text_only
            text = None if call.text is None else call.text + str(message["content"])
            if text is not None:
                trajectory.texts.append((text, added))
            number = None if parent is None else parent.number
            choices.append(
                LoggedChoice(
                    added.number,
                    number,
                    added.rest,
                    generation,
                    added.end.hex(),
                    added.text_only,
                    text,
                    added.text.hex(),
                )
            )
        first_call = choices[0].number if choices else 0
        number = trajectory.graph.calls[first_call].conversation
        await self.log.add(LoggedCall(trajectory.name, digest, content_type, body.decode(), choices, number, begins))


def _sorted(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _answered(made: tuple[int, str, bytes]) -> Answer:
    done: asyncio.Future[tuple[int, str, bytes]] = asyncio.get_running_loop().create_future()
    done.set_result(made)
    return Answer(done)


def _error(
    path: str, status: int, message: str, code: str | None = None, param: str | None = None
) -> tuple[int, str, bytes]:
    content = error_content(path, status, message, param=param, code=code)
    return status, "application/json", json.dumps(content).encode()


def _why_refused(error: Exception) -> str:
    """Return the message for a request that vLLM's code fails on."""
    return str(error) if isinstance(error, RequestError) else f"the request cannot be served: {error!r}"


def _in_dialect(path: str, made: tuple[int, str, bytes], code: str | None = None) -> tuple[int, str, bytes]:
    """Return an answer, or an error of vLLM in the form of the wire. A stream that is only an error is one too."""
    status, content_type, body = made
    if status < 400 and content_type.startswith("text/event-stream"):
        try:
            for _ in events(body):
                pass
        except ValueError as error:
            return _error(path, 400, str(error), code)
    if status < 400:
        return made
    message, param = message_of_error(body)
    content = error_content(path, status, message, param=param, code=code)
    return status, content_type, json.dumps(content).encode()
