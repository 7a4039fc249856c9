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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import Response
from fastapi.responses import JSONResponse

from skyrl_megatron.agents.answers import COMPLETIONS, error_content, events, message_of_error, messages_of
from skyrl_megatron.agents.call_counts import CallCounts
from skyrl_megatron.agents.call_log import CallLog, LoggedCall, LoggedChoice
from skyrl_megatron.agents.graph import Graph, Match, SampledCall
from skyrl_megatron.config.rules.passthrough_keys import MASKS, WEIGHTS
from skyrl_megatron.errors import EngineError, RequestError, SkyRLMegatronError
from skyrl_megatron.inference.http_endpoint import Guard, HttpServer
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.inference.sampling_params import request_seed
from skyrl_megatron.rollout.interface import SamplingClient

if TYPE_CHECKING:
    from skyrl_megatron.agents.rows import Outcome
    from skyrl_megatron.inference.vllm.wire_app import WireApp

log = logging.getLogger(__name__)
SAMPLING_PATHS = ("/v1/chat/completions", COMPLETIONS, "/v1/messages", "/v1/responses")
COUNT_TOKENS = "/v1/messages/count_tokens"
PORT = "port"
RETRY_HEADER = b"x-stainless-retry-count"
"""Header in which the libraries of OpenAI and Anthropic count their retries."""


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


@dataclass(eq=False, slots=True)
class _Answer:
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
    answers: dict[str, list[_Answer]] = field(default_factory=dict)
    texts: list[tuple[str, SampledCall]] = field(default_factory=list)
    too_long: str = ""
    """Why the last prompt was refused, if it did not fit into the context."""
    failures: dict[str, str] = field(default_factory=dict)
    """Request → why it failed for a reason other than the request, unless it was answered later."""
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


class Gateway:
    """The server of a run, on its event loop.

    ``folder``: of the log. ``secret``: of the keys; the same one after a restart keeps them valid. ``sampling``: keys
    of vLLM's ``SamplingParams`` of all requests; ``max_tokens`` is the limit of a call. ``adapters``: names of the
    policy's adapters, which are also names of models. Raises LaunchError if the port is taken, JournalError and
    CheckpointError for the log.
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
    ) -> None:
        self.client, self.wire, self.model, self.sampling = client, wire, model, dict(sampling)
        self.adapters = tuple(adapters)
        self._secret = secret.encode()
        self.trajectories: dict[str, OpenTrajectory] = {}
        self.counts = CallCounts()
        self._changes_named = False
        self._thresholds = gc.get_threshold()
        self.log = CallLog(folder)
        try:
            self.server = HttpServer(_KeyGuard(self), host, port, PORT)
        except BaseException:
            self.log.close()
            raise

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
        """Refuse further calls, cancel those that are sampled, and close the log."""
        for trajectory in list(self.trajectories.values()):
            await self.close(trajectory.name)
        await self.server.stop()
        gc.set_threshold(*self._thresholds)
        await asyncio.to_thread(self.log.close)

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
    ) -> OpenTrajectory:
        """Let an agent call. A name that the log knows, or that was closed and not forgotten, continues with its
        earlier calls, whose answers equal requests get. ``name``: unique in the run; letters, digits and ``-_.`` only.
        """
        if not name or not all(each.isalnum() or each in "-_." for each in name):
            raise ValueError(f"trajectory {name!r}: use letters, digits and -_. for its name")
        access = Access(f"{self.server.url}/{name}", self.key_of(name), adapter or self.model)
        made = OpenTrajectory(name, access, {**self.sampling, **(sampling or {})}, adapter, seeds)
        before = self.trajectories.get(name)
        self.trajectories[name] = made
        if before is not None:
            _continue(made, before)
            return made
        for call in self.log.stored.get(name, ()):
            _restore(made, call)
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
        await self.log.forget(names)

    # ------------------------------------------------------------------ a request
    async def count_tokens(self, trajectory: OpenTrajectory, body: bytes) -> tuple[int, str, bytes]:
        """Answer a request of ``count_tokens``."""
        return _in_dialect(
            COUNT_TOKENS, await self.wire.call(COUNT_TOKENS, body, _Call(self, trajectory, COUNT_TOKENS))
        )

    def answer_to(self, trajectory: OpenTrajectory, path: str, body: bytes, *, retry: bool) -> _Answer:
        """Return the answer of a request, which may not be there yet: that of an equal earlier request if this one is
        a retry of it, else a new one. It is completed also if its client leaves."""
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise ValueError(f"it is {type(request).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            done: asyncio.Future[tuple[int, str, bytes]] = asyncio.get_running_loop().create_future()
            done.set_result(_error(path, 400, f"the body is not a JSON object: {error}"))
            return _Answer(done)
        digest = hashlib.blake2b(path.encode() + _sorted(request), digest_size=16).hexdigest()
        same = trajectory.answers.setdefault(digest, [])
        found = next((each for each in same if not each.delivered and not each.waiting), None)
        if found is None and retry and same:
            found = same[-1]
        if found is not None:
            self.counts.now["retries"] += 1
            return found
        made = _Answer(asyncio.get_running_loop().create_future())
        same.append(made)
        task = asyncio.create_task(self._sample(trajectory, path, body, digest, made), name="agent's call")
        trajectory.tasks.add(task)
        task.add_done_callback(trajectory.tasks.discard)
        return made

    async def _sample(self, trajectory: OpenTrajectory, path: str, body: bytes, digest: str, answer: _Answer) -> None:
        """Sample for a request, record the call, and set its answer."""
        started, call = time.perf_counter(), _Call(self, trajectory, path)
        made = _error(path, 503, f"trajectory {trajectory.name} has ended")  # where it is cancelled
        try:
            found = await self.wire.call(path, body, call)
            if isinstance(call.failure, RequestError):
                found = _error(path, 400, str(call.failure))
            elif call.failure is not None:
                raise call.failure
            if call.generations and found[0] < 400:
                await self._record(trajectory, path, digest, call, found)
                trajectory.failures.pop(digest, None)
                trajectory.too_long = ""
                self.counts.sampled(time.perf_counter() - started - call.seconds, unmatched=call.text_only)
            made = _in_dialect(path, found, "context_length_exceeded" if call.too_long_message else None)
        except Exception as error:
            if not isinstance(error, SkyRLMegatronError):
                log.exception("a call of trajectory %s failed", trajectory.name)
            trajectory.failures[digest] = f"{type(error).__name__}: {error}"
            status = 503 if isinstance(error, EngineError) else 500
            made = _error(path, status, f"the call failed: {type(error).__name__}, see the log of the run")
        finally:
            if made[0] >= 400:
                trajectory.answers[digest].remove(answer)
            answer.done.set_result(made)

    async def _record(
        self, trajectory: OpenTrajectory, path: str, digest: str, call: _Call, made: tuple[int, str, bytes]
    ) -> None:
        """Add the sampled answers to the graph and to the log. They are on disk on return."""
        status, content_type, body = made
        messages = messages_of(path, content_type, body)
        if len(messages) != len(call.generations):
            raise ValueError(f"the answer has {len(messages)} choices for {len(call.generations)} samples")
        choices = []
        parent = call.match.parent
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
                LoggedChoice(added.number, number, added.rest, generation, added.end.hex(), added.text_only, text)
            )
        await self.log.add(LoggedCall(trajectory.name, digest, content_type, body.decode(), choices))


class _Call:
    """The exchange of one request (``wire_app.Exchange``)."""

    def __init__(self, gateway: Gateway, trajectory: OpenTrajectory, path: str) -> None:
        self.gateway, self.trajectory, self.path = gateway, trajectory, path
        self.match = Match(None, 0, 0, b"", None)
        self.prompt_ids: list[int] = []
        self.generations: list[Generation] = []
        self.text: str | None = None
        self.text_only = False
        self.too_long_message = ""
        self.failure: Exception | None = None
        self.seconds = 0.0
        """Seconds of sampling."""

    def prefix_of(self, messages: Sequence[Mapping[str, Any]], scope: Any) -> Any:
        """Return the tokens of the longest path that the messages begin with."""
        from skyrl_megatron.inference.vllm.wire_app import Prefix

        self.match = match = self.trajectory.graph.match(messages, scope)
        if match.unmatched is not None and not self.trajectory.first_unmatched:
            self.trajectory.first_unmatched = found = self.trajectory.graph.difference(match)
            counts = self.gateway.counts
            counts.first_unmatched = counts.first_unmatched or f"{self.trajectory.name}: {found}"
        return None if match.parent is None else Prefix(match.parent.ids, match.first, match.used)

    def prefix_of_text(self, prompt: Any) -> Any:
        """Return the tokens of the longest prompt and answer that a prompt begins with."""
        from skyrl_megatron.inference.vllm.wire_app import Prefix

        if not isinstance(prompt, str):
            whole = [(call.ids, call) for call in self.trajectory.graph.calls]
            fits = [(len(ids), call) for ids, call in whole if len(ids) <= len(prompt) and prompt[: len(ids)] == ids]
            length, parent = max(fits, key=lambda fit: fit[0], default=(0, None))
        else:
            self.text = prompt
            fits = [(len(text), call) for text, call in self.trajectory.texts if prompt.startswith(text)]
            length, parent = max(fits, key=lambda fit: fit[0], default=(0, None))
        self.match = Match(parent, 0, length, b"", None)
        return None if parent is None else Prefix(parent.ids, 0, length)

    async def sample(self, prompt_ids: list[int], sampling: dict[str, Any], count: int) -> list[Generation]:
        """Sample with the run's engines."""
        started = time.perf_counter()
        parent = self.match.parent
        exact = parent is None or prompt_ids[: len(parent.ids)] == parent.ids
        if not exact:
            self.match = Match(None, 0, 0, self.match.digest, self.match.unmatched)
        self.text_only = not exact or self.match.unmatched is not None
        try:
            requests = self._requests(prompt_ids, sampling, count)
            named: dict[str, Any] = {}
            if self.gateway.adapters:
                named["adapters"] = [self.trajectory.adapter] * count
            generations = await self.gateway.client.generate(
                [prompt_ids] * count, requests, [self.trajectory.name] * count, **named
            )
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.seconds = time.perf_counter() - started
        self.prompt_ids, self.generations = prompt_ids, list(generations)
        changes = [name for name in (*MASKS, *WEIGHTS) if sampling.get(name)]
        if changes and any(each.support is None or name in WEIGHTS for each in generations for name in changes):
            self.gateway.name_changes(changes, self.trajectory.name)
        return self.generations

    def _requests(self, prompt_ids: list[int], asked: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Return the sampling parameters of each sample."""
        run, parent = self.trajectory.sampling, self.match.parent
        limits = [value for value in (run.get("max_tokens"), asked.get("max_tokens")) if value is not None]
        merged = {**run, **asked, **({"max_tokens": min(limits)} if limits else {})}
        if (known := _routed(parent)) > 0:
            merged["routed_experts_prompt_start"] = known
        if self.trajectory.seeds is None:
            return [merged] * count
        seed, uid, repetition, step = self.trajectory.seeds
        turn = 0 if parent is None else len(parent.path())
        tokens = hashlib.blake2b(np.asarray(prompt_ids, np.int32).tobytes(), digest_size=16).digest()
        requests = []
        for _ in range(count):
            number = self.trajectory.samples[turn, tokens]
            self.trajectory.samples[turn, tokens] += 1
            name = f"{uid}/turn-{turn}" if turn else uid
            name = f"{name}/sample-{number}" if number else name
            requests.append({**merged, "seed": request_seed(seed, name, repetition, step)})
        return requests

    def too_long(self, message: str) -> None:
        """Note a prompt that does not fit into the context."""
        self.too_long_message = message
        if self.path != COUNT_TOKENS:
            self.trajectory.too_long = message


def _routed(parent: SampledCall | None) -> int:
    """Return the number of first tokens whose routed experts are known, if the engines return them."""
    if parent is None or parent.generation.routed_experts is None:
        return 0
    return parent.start + len(parent.generation.token_ids) - 1


def _continue(trajectory: OpenTrajectory, before: OpenTrajectory) -> None:
    """Give a trajectory the calls of an earlier attempt of this process."""
    trajectory.graph, trajectory.texts, trajectory.samples = before.graph, before.texts, before.samples
    for request, answers in before.answers.items():
        trajectory.answers[request] = [_Answer(each.done) for each in answers]


def _restore(trajectory: OpenTrajectory, call: LoggedCall) -> None:
    """Add a call of the log to a trajectory."""
    graph = trajectory.graph
    for choice in call.choices:
        parent = None if choice.parent is None else graph.calls[choice.parent]
        end = bytes.fromhex(choice.end)
        added = SampledCall(choice.number, parent, choice.rest, choice.generation, end, choice.text_only)
        graph.restore(added)
        if choice.text is not None:
            trajectory.texts.append((choice.text, added))
        if trajectory.seeds is not None:
            turn = 0 if parent is None else len(parent.path())
            tokens = hashlib.blake2b(np.asarray(added.prompt_ids, np.int32).tobytes(), digest_size=16).digest()
            trajectory.samples[turn, tokens] += 1
    done: asyncio.Future[tuple[int, str, bytes]] = asyncio.get_running_loop().create_future()
    done.set_result((200, call.content_type, call.answer.encode()))
    trajectory.answers.setdefault(call.request, []).append(_Answer(done))


def _sorted(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _error(path: str, status: int, message: str, code: str | None = None) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(error_content(path, status, message, code=code)).encode()


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


class _KeyGuard(Guard):
    """Checks keys, sizes and times of requests, and passes the others to the gateway. An ASGI application."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        super().__init__(self._serve, "")

    def refused(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
            return None
        name, _ = _parts(scope["path"])
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if hmac.compare_digest(given, self.gateway.key_of(name).encode()):
            trajectory = self.gateway.trajectories.get(name)
            if trajectory is not None and not trajectory.closed:
                return None
            self.gateway.counts.now["refused"] += 1
            return 404, f"trajectory {name} has not begun, or has ended"
        self.gateway.counts.now.update(("refused", "unattributed"))
        if not given:
            return 401, "the key is missing: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        if any(hmac.compare_digest(given, self.gateway.key_of(each).encode()) for each in self.gateway.trajectories):
            return 403, "the key belongs to another trajectory"
        return 401, "the key is wrong"

    def refusal(
        self, scope: Mapping[str, Any], status: int, message: str, param: str | None = None, *, unread: bool = False
    ) -> Response:
        _, path = _parts(scope["path"])
        content = error_content(path, status, message, param=param)
        return JSONResponse(content, status, {"connection": "close"} if unread else None)

    async def _serve(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        name, path = _parts(scope["path"])
        if scope["path"] == "/health":
            return await JSONResponse({"trajectories": len(self.gateway.trajectories)})(scope, receive, send)
        trajectory = self.gateway.trajectories[name]
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["method"] != "POST" or path not in (*SAMPLING_PATHS, COUNT_TOKENS):
            return await self._other(scope, path)(scope, receive, send)
        if path == COUNT_TOKENS:
            status, content_type, content = await self.gateway.count_tokens(trajectory, bytes(body))
            return await Response(content, status, media_type=content_type)(scope, receive, send)
        retry = dict(scope["headers"]).get(RETRY_HEADER, b"0") not in (b"", b"0")
        answer = self.gateway.answer_to(trajectory, path, bytes(body), retry=retry)
        answer.waiting += 1
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            waited: list[asyncio.Future[Any]] = [answer.done, gone]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if answer.done.done() and not gone.done():
                status, content_type, content = answer.done.result()
                await Response(content, status, media_type=content_type)(scope, receive, send)
                answer.delivered = True
        finally:
            answer.waiting -= 1
            gone.cancel()

    def _other(self, scope: Mapping[str, Any], path: str) -> Response:
        names = (self.gateway.model, *self.gateway.adapters)
        models = [
            {"id": each, "object": "model", "type": "model", "created": 0, "owned_by": "policy"} for each in names
        ]
        if scope["method"] == "GET" and path == "/v1/models":
            return JSONResponse({"object": "list", "data": models, "has_more": False})
        if scope["method"] == "GET" and path.startswith("/v1/models/"):
            for model in models:
                if model["id"] == path.removeprefix("/v1/models/"):
                    return JSONResponse(model)
        known = ", ".join((*SAMPLING_PATHS, COUNT_TOKENS, "/v1/models"))
        return self.refusal(scope, 404, f"{scope['method']} {path} is not served: use {known}")


def _parts(path: str) -> tuple[str, str]:
    """Return (name of the trajectory, path after it)."""
    name, _, rest = path.lstrip("/").partition("/")
    return name, f"/{rest}"


async def _until_gone(receive: Callable[..., Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
