"""vLLM's serving code for the wires of clients, without an engine.

:class:`WireApp` is vLLM's own application of ``vllm serve``: it validates a request, converts it to messages, renders
it with the chat template, parses an answer for thinking and tool calls, and writes it in the form of the client, also
as a stream. Only its engine is replaced. Where vLLM would sample, :class:`Exchange`, which a caller provides for each
request, is asked for the tokens. It may also have tokens for the beginning of the prompt: then the template renders
only what follows them.

It needs no GPU and no weights, as ``vllm launch render`` does. The parts of vLLM that it relies on: ``OnlineRenderer``
(``vllm/renderers/online_renderer.py``), and the token ids in ``kv_transfer_params`` that replace those of a rendered
prompt, made for disaggregated serving.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import secrets
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Protocol

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import merge_kwargs, renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from skyrl_megatron.data.encoding import Encoder, after_stop
from skyrl_megatron.data.tokenizer import guard_templates, stop_tokens_of
from skyrl_megatron.errors import EngineError, RequestError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.inference.vllm.requests import call_app, with_config_keys

STREAM_TOKENS = 16
"""Tokens in a chunk of a stream."""
LANE_RENDERERS = 4
"""Threads that tokenize wide requests: tokenizers leave the interpreter to others while they do."""
STOP_S = 10.0
"""Time in seconds that a wide request has to end when its thread is stopped."""
MOST_KEPT = 256
"""Sets of tools, and of arguments of the template, about which something is remembered."""
GIVEN_BY_REQUEST = (
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
)
"""Sampling parameters that a request may set. What shapes the distribution otherwise is the run's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens for the first messages of a request, or for the beginning of its text."""

    ids: list[int]
    first: int
    """Index of the message that answers with the last of these tokens; 0 for a text."""
    after: int
    """Number of messages, or of characters, that the tokens hold."""


class Exchange(Protocol):
    """One request, in the view of the one who samples for it."""

    def prefix_of(self, messages: Sequence[Mapping[str, Any]], scope: Any) -> Prefix | None:
        """Return the tokens of the first messages; None if there are none. Called once for a request of messages.

        ``scope``: what else the prompt depends on: tools and arguments of the template.
        """

    def prefix_of_text(self, prompt: str | list[int]) -> Prefix | None:
        """Return the tokens of the beginning of a prompt of ``/v1/completions``, as :meth:`prefix_of`."""

    async def sample(self, prompt_ids: list[int], sampling: dict[str, Any], count: int) -> list[Generation]:
        """Return ``count`` continuations. ``sampling``: ``max_tokens`` and those of :data:`GIVEN_BY_REQUEST` and
        ``structured_outputs`` that the request sets."""

    def too_long(self, message: str) -> None:
        """Note that the prompt does not fit into the context. The request is refused with ``message``."""


@dataclasses.dataclass(slots=True)
class _Current:
    """The request that is answered."""

    exchange: Exchange
    opening: list[int] | None = None
    """What the template writes before an answer; None: it is not known."""


_current: ContextVar[_Current] = ContextVar("current")


class WireApp:
    """vLLM's application for a model folder; make it with :meth:`create`."""

    def __init__(self, app: Any, max_model_len: int, options: Mapping[str, Any]) -> None:
        self._app, self.max_model_len, self._options = app, max_model_len, options
        self._lane: _Lane | None = None

    @classmethod
    async def create(
        cls,
        folder: str,
        served_model_name: str,
        *,
        max_model_len: int | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        chat_template: str | None = None,
        trust_remote_code: bool = False,
        adapters: Sequence[str] = (),
        renderers: int = 1,
    ) -> WireApp:
        """Read the folder's configuration and tokenizer. ``chat_template``: Jinja text; None: the tokenizer's.
        ``adapters``: further names of models that are served. ``renderers``: threads for text. Raises EngineError for
        an unknown parser, or one that lacks a package."""
        options = {name: value for name, value in locals().items() if name != "cls"}
        arguments = ["--model", folder, "--served-model-name", served_model_name, *adapters, "--disable-fastapi-docs"]
        arguments += ["--renderer-num-workers", str(renderers)]
        if max_model_len is not None:
            arguments += ["--max-model-len", str(max_model_len)]
        if tool_call_parser is not None:
            if tool_call_parser not in (parsers := sorted(ToolParserManager.list_registered())):
                raise EngineError(f"tool_call_parser={tool_call_parser}: use one of {', '.join(parsers)}")
            arguments += ["--enable-auto-tool-choice", "--tool-call-parser", tool_call_parser]
        if reasoning_parser is not None:
            try:
                ReasoningParserManager.get_reasoning_parser(reasoning_parser)
            except (KeyError, ImportError) as error:
                registered = ", ".join(ReasoningParserManager.list_registered())
                raise EngineError(f"reasoning_parser={reasoning_parser}: {error}; use one of {registered}") from error
            arguments += ["--reasoning-parser", reasoning_parser]
        if chat_template is not None:
            arguments += ["--chat-template", chat_template]
        if trust_remote_code:
            arguments.append("--trust-remote-code")
        args = make_arg_parser(FlexibleArgumentParser()).parse_args([*arguments, "--generation-config", "vllm"])
        engine_args = AsyncEngineArgs.from_cli_args(args)
        model_config = engine_args.create_model_config()
        model_config.quantization = None
        envs.VLLM_CPU_KVCACHE_SPACE = 0  # nothing is allocated, and vLLM would warn of its default
        config = VllmConfig(
            model_config=model_config, structured_outputs_config=engine_args.create_structured_outputs_config()
        )
        args.structured_outputs_config = config.structured_outputs_config
        engine = _NoEngine(config)
        app = build_app(args, ("generate",), model_config)
        guard_templates()
        try:
            await init_app_state(engine, app.state, args, ("generate",))
        except (TypeError, ValueError, RuntimeError, ImportError) as error:  # a parser does not fit the tokenizer
            raise EngineError(
                f"reasoning_parser={reasoning_parser}, tool_call_parser={tool_call_parser}: {error}"
            ) from error
        renderer = app.state.online_renderer
        renderer.__class__ = _SplicingRenderer
        renderer.openings, renderer.shown = {}, {}
        for serving, name in (("chat", "parser_cls"), ("chat_batch", "parser_cls"), ("responses", "parser")):
            _parse_after_opening(getattr(app.state, f"openai_serving_{serving}"), name)
        _parse_after_opening(app.state.anthropic_serving_messages, "parser_cls")
        return cls(app, model_config.max_model_len, options)

    async def call(self, path: str, body: bytes, exchange: Exchange, *, apart: bool = False) -> tuple[int, str, bytes]:
        """Answer a request: return (status, content type, body). A stream is complete.

        ``apart``: in another thread, because the request takes long to convert. Only ``exchange.sample`` runs on this
        event loop then. Raises what ``exchange.sample`` raises, if that was not made into an answer by vLLM.
        """
        if apart:
            if self._lane is None:
                self._lane = _Lane(self._options)
            return await self._lane.call(path, body, _FromLane(exchange, asyncio.get_running_loop()))
        token = _current.set(_Current(exchange))
        try:
            pieces = call_app(self._app, path, body)
            head = await anext(pieces)
            assert isinstance(head, tuple)
            status, content_type = head
            parts = [piece async for piece in pieces if isinstance(piece, bytes)]
        finally:
            _current.reset(token)
        answer = b"".join(parts)
        return status, content_type, answer if status < 400 else with_config_keys(answer)

    async def stop(self) -> None:
        """End the thread of requests that are answered apart, if there is one. A later such request starts another."""
        lane, self._lane = self._lane, None
        if lane is not None:
            await lane.stop()

    def end_renderer(self) -> None:
        """End the threads that tokenize. No request can be answered afterwards."""
        self._app.state.engine_client.renderer.shutdown()


class _Lane:
    """An application of the same model in a thread of its own, with an event loop and a renderer of its own."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._app: WireApp | None = None
        self._starting = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="wide requests", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def call(self, path: str, body: bytes, exchange: Exchange) -> tuple[int, str, bytes]:
        """See :meth:`WireApp.call`."""
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._call(path, body, exchange), self._loop)
        )

    async def _call(self, path: str, body: bytes, exchange: Exchange) -> tuple[int, str, bytes]:
        async with self._starting:
            if self._app is None:
                self._app = await WireApp.create(**{**self._options, "renderers": LANE_RENDERERS})
        return await self._app.call(path, body, exchange)

    async def stop(self) -> None:
        """Cancel requests, and end the thread and those of its renderer. Returns after twice :data:`STOP_S` even if
        one does not end."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        await asyncio.to_thread(self._thread.join, 2 * STOP_S)

    async def _end(self) -> None:
        try:
            if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=STOP_S)
            if self._app is not None:
                self._app.end_renderer()
            await asyncio.wait_for(self._loop.shutdown_default_executor(), STOP_S)
        finally:
            self._loop.stop()


class _FromLane:
    """An exchange for the thread of a lane, which samples on the event loop that it belongs to."""

    def __init__(self, exchange: Exchange, loop: asyncio.AbstractEventLoop) -> None:
        self._exchange, self._loop = exchange, loop
        self.prefix_of, self.prefix_of_text = exchange.prefix_of, exchange.prefix_of_text
        self.too_long = exchange.too_long

    async def sample(self, prompt_ids: list[int], sampling: dict[str, Any], count: int) -> list[Generation]:
        work = asyncio.run_coroutine_threadsafe(self._exchange.sample(prompt_ids, sampling, count), self._loop)
        return await asyncio.wrap_future(work)


def _parse_after_opening(serving: Any, name: str) -> None:
    """Let a serving object's parser of streams see of the prompt what the template opens an answer with.

    vLLM's parser looks in the whole prompt for the end of thinking, and takes that of an earlier answer, or one in the
    text of a user, for the end of this answer's. Answers that are not streamed are parsed without the prompt.
    """
    kind = getattr(serving, name, None)
    if kind is None:
        return

    class AfterOpening(kind):  # type: ignore[misc, valid-type]
        def parse_delta(self, *given: Any, prompt_token_ids: list[int] | None = None, **options: Any) -> Any:
            current = _current.get(None)
            if current is not None and current.opening is not None and prompt_token_ids is not None:
                prompt_token_ids = current.opening
            return super().parse_delta(*given, prompt_token_ids=prompt_token_ids, **options)

    setattr(serving, name, AfterOpening)


class _SplicingRenderer(OnlineRenderer):
    """Renders only what follows the tokens that the exchange has."""

    openings: dict[str, list[int]]
    """Arguments of the template, as JSON → the tokens that it opens an answer with."""
    shown: dict[bytes, bool]
    """Digest of tools and template → whether a prompt shows them."""

    async def preprocess_chat(
        self,
        request: Any,
        messages: list[Any],
        default_template: str | None,
        default_template_content_format: Any,
        default_template_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None = None,
        parser: Any = None,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        current = _current.get(None)
        exchange = None if current is None else current.exchange
        prefix = None
        if exchange is not None:
            defaults = merge_kwargs(default_template_kwargs, dict(tools=tool_dicts, tokenize=False))
            params = request.build_chat_params(default_template, default_template_content_format)
            params = params.with_defaults(defaults)
            if tool_dicts and not await self._expresses(tool_dicts, params):
                raise VLLMValidationError(
                    "the model's chat template has no place for tools: leave tools out, or set"
                    " generator.chat_template to one that has",
                    parameter="tools",
                )
            plain = [_plain(message) for message in messages]
            prefix = exchange.prefix_of(plain, {"tools": tool_dicts, "template": request.chat_template_kwargs})
            if prefix is not None:
                after = await self._tokens_after(prefix, plain, params)
                if after is not None:
                    request.kv_transfer_params = {"prompt_token_ids": [*prefix.ids, *after]}
        try:
            conversation, inputs = await super().preprocess_chat(
                request,
                messages,
                default_template,
                default_template_content_format,
                default_template_kwargs,
                tool_dicts,
                parser,
                skip_mm_cache=skip_mm_cache,
            )
        except VLLMValidationError as error:
            if exchange is not None and error.parameter in ("input_tokens", "input_text"):  # the latter by its length
                exchange.too_long(str(error))
            raise
        self._require_room(exchange, inputs)
        if current is not None and parser is not None and parser.reasoning_parser_cls is not None:
            ids = inputs[0]["prompt_token_ids"]
            current.opening = await self._opening(ids, params, len(prefix.ids) if prefix is not None else 0)
        return conversation, inputs

    async def preprocess_completion(
        self, request: Any, prompt_input: Any, prompt_embeds: Any, *, skip_mm_cache: bool = False
    ) -> Any:
        current = _current.get(None)
        exchange = None if current is None else current.exchange
        if exchange is not None:
            if isinstance(prompt_input, list) and len(prompt_input) == 1 and not isinstance(prompt_input[0], int):
                (prompt_input,) = prompt_input
            if isinstance(prompt_input, list) and not all(isinstance(token, int) for token in prompt_input):
                raise VLLMValidationError("only one prompt per request is supported", parameter="prompt")
            prefix = exchange.prefix_of_text(prompt_input)
            if prefix is not None:
                rest = prompt_input[prefix.after :]
                continued = Encoder(self.renderer.get_tokenizer()).continued
                prompt_input = [*prefix.ids, *(continued(rest) if isinstance(rest, str) else rest)]
        try:
            inputs = await super().preprocess_completion(
                request, prompt_input, prompt_embeds, skip_mm_cache=skip_mm_cache
            )
        except VLLMValidationError as error:
            if exchange is not None and error.parameter in ("input_tokens", "input_text"):  # the latter by its length
                exchange.too_long(str(error))
            raise
        self._require_room(exchange, inputs)
        return inputs

    async def _expresses(self, tools: list[dict[str, Any]], params: Any) -> bool:
        """Return whether a prompt shows the names of its tools."""
        template_input = json.dumps([tools, params.chat_template_kwargs], sort_keys=True, default=str)
        digest = hashlib.blake2b(template_input.encode(errors="surrogatepass"), digest_size=16).digest()
        if (remembered := self.shown.get(digest)) is not None:
            return remembered
        try:
            _, prompt = await self.renderer.render_messages_async([{"role": "user", "content": "?"}], params)
        except (VLLMValidationError, ValueError, TypeError, KeyError):
            return True  # what is wrong with the request is found when it is rendered
        text, at, shown = prompt.get("prompt"), 0, True
        for tool in tools if isinstance(text, str) else ():  # templates write them in their order
            name = str(tool["function"]["name"])
            if (position := text.find(name, at)) < 0 and name not in text:
                shown = False
                break
            at = max(at, position)
        if len(self.shown) >= MOST_KEPT:
            self.shown.clear()
        self.shown[digest] = shown
        return shown

    async def _opening(self, ids: list[int], params: Any, held: int) -> list[int]:
        """Return the tokens that the template opens an answer with, such as a role and the start of thinking.

        ``held``: number of first tokens of the prompt that were sampled, or rendered for earlier calls. The result is
        what follows them where the prompt does not end with the opening of another one, as when a client begins the
        answer itself.
        """
        template_kwargs = {name: value for name, value in params.chat_template_kwargs.items() if name != "tools"}
        key = json.dumps(template_kwargs, sort_keys=True, default=str)
        if key not in self.openings:
            texts = []
            for opens in (True, False):
                arguments = {**template_kwargs, "add_generation_prompt": opens, "continue_final_message": False}
                plain = dataclasses.replace(params, chat_template_kwargs=arguments)
                try:
                    _, prompt = await self.renderer.render_messages_async([{"role": "user", "content": "?"}], plain)
                except (VLLMValidationError, ValueError, TypeError, KeyError):
                    break
                texts.append(str(prompt.get("prompt") or ""))
            opening = texts[0].removeprefix(texts[1]) if len(texts) == 2 and texts[0].startswith(texts[1]) else ""
            if len(self.openings) >= MOST_KEPT:
                self.openings.clear()
            self.openings[key] = self.renderer.get_tokenizer().encode(opening, add_special_tokens=False)
        tokens = self.openings[key]
        return tokens if tokens and ids[-len(tokens) :] == tokens else ids[held:]

    def _require_room(self, exchange: Exchange | None, inputs: Sequence[Any]) -> None:
        """Raise VLLMValidationError for a prompt that leaves no room for a token."""
        most = self.model_config.max_model_len
        for each in inputs:
            length = len(each.get("prompt_token_ids") or ())
            if exchange is not None and length >= most:
                message = f"This model's maximum context length is {most} tokens, but the prompt has {length} tokens"
                exchange.too_long(message)
                raise VLLMValidationError(message, parameter="input_tokens", value=length)

    async def _tokens_after(self, prefix: Prefix, messages: list[Any], params: Any) -> list[int] | None:
        """Return the tokens of the template after an answer, up to the next one; None if they cannot be separated.

        The answer is replaced by a marker, and the text after it is tokenized. The first token, the end of the answer,
        is left out if a stop token was sampled (:func:`~skyrl_megatron.data.encoding.after_stop`). A template that
        demands the tool calls of the answer gets them; then what they render to is left out as well, which needs an
        end token that was sampled.
        """
        tokenizer = self.renderer.get_tokenizer()
        calls = [message.get("tool_calls") for message in messages[prefix.first : prefix.after]]
        for kept in ([], [call for some in calls for call in some or ()]):
            marker = f"answer{secrets.token_hex(8)}"
            answer = {"role": "assistant", "content": marker} | ({"tool_calls": kept} if kept else {})
            marked = [*messages[: prefix.first], answer, *messages[prefix.after :]]
            try:
                _, prompt = await self.renderer.render_messages_async(marked, params)
            except (VLLMValidationError, ValueError, TypeError, KeyError):
                continue
            _, has_marker, text = str(prompt.get("prompt") or "").partition(marker)
            if not has_marker:
                continue
            after = Encoder(tokenizer).continued(text)
            ended = prefix.ids[-1]
            if kept:
                if ended not in tokenizer.all_special_ids or ended not in after:
                    continue
                after = after[after.index(ended) :]
            if after[:1] != [ended] and ended not in self._stop_ids:
                return after
            closing = None if after[:1] == [ended] else await self._closing(params)
            return after_stop(after, prefix.ids[-len(after) :], closing)
        return None

    @cached_property
    def _stop_ids(self) -> frozenset[int]:
        return frozenset(stop_tokens_of(self.renderer.get_tokenizer()))

    async def _closing(self, params: Any) -> int | None:
        """Return the token that the template writes after every answer, whatever follows; None if there is none."""
        marker, firsts = f"answer{secrets.token_hex(8)}", []
        conversation: list[Any] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
        for following in ({"role": "user"}, {"role": "tool", "tool_call_id": "0"}):
            try:
                _, prompt = await self.renderer.render_messages_async(
                    [*conversation, following | {"content": "?"}], params
                )
            except (VLLMValidationError, ValueError, TypeError, KeyError):
                continue
            after = str(prompt.get("prompt") or "").partition(marker)[2]
            firsts.append(self.renderer.get_tokenizer().encode(after, add_special_tokens=False)[:1])
        return firsts[0][0] if firsts and firsts[0] and all(first == firsts[0] for first in firsts) else None


class _NoEngine:
    """What vLLM's serving code uses of an engine. It samples by asking the exchange of the request."""

    errored = False
    is_running = True
    is_stopped = False

    def __init__(self, config: VllmConfig) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = SimpleNamespace(resolve_watermarking=lambda params: None)
        self._generation_config = config.model_config.try_get_generation_config()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admit everything: the engines have their own limit."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def abort(self, request_id: Any) -> None:
        """Do nothing: answers are complete before they are written."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request as an engine would."""
        if (sampling_params.logprobs or 0) > 1 or sampling_params.prompt_logprobs is not None:
            raise VLLMValidationError(
                "log-probs are those of the sampled tokens only: leave top_logprobs, prompt_logprobs and echo out",
                parameter="top_logprobs",
            )
        ids = list(prompt["prompt_token_ids"])
        sampling_params.update_from_generation_config(self._generation_config, self.renderer.get_eos_token_id())
        count = sampling_params.n or 1
        try:
            generations = await _current.get().exchange.sample(ids, asked_for(sampling_params), count)
        except RequestError as error:
            raise VLLMValidationError(str(error)) from error
        streams = sampling_params.output_kind is RequestOutputKind.DELTA
        tokenizer = self.renderer.get_tokenizer()
        pieces = []
        for index, generation in enumerate(generations):
            step = STREAM_TOKENS if streams else None
            pieces.append(list(played_back(generation, index, ids, sampling_params, tokenizer, step)))
            await asyncio.sleep(0)  # other requests are not to wait for all of them
        if not streams:
            yield RequestOutput(request_id, None, ids, None, [output for [output] in pieces], finished=True)
            return
        for number, outputs in enumerate(pieces):
            for index_in_step, output in enumerate(outputs):
                done = number == len(pieces) - 1 and index_in_step == len(outputs) - 1
                yield RequestOutput(request_id, None, ids, None, [output], finished=done)


def asked_for(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that a request sets, as keys of ``SamplingParams``."""
    default = SamplingParams()
    sampling: dict[str, Any] = {"max_tokens": params.max_tokens}
    for name in GIVEN_BY_REQUEST:
        value = getattr(params, name)
        if value != getattr(default, name):
            sampling[name] = value
    if (outputs := params.structured_outputs) is not None:
        fields = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
        sampling["structured_outputs"] = {
            name: value for name, value in fields.items() if not name.startswith("_") and value not in (None, False)
        }
    return sampling


def played_back(
    generation: Generation, index: int, prompt: list[int], params: SamplingParams, tokenizer: Any, step: int | None
) -> Iterator[CompletionOutput]:
    """Yield vLLM's outputs for sampled tokens, with ``step`` tokens each, or all of them in one for None.

    Text and stop strings are those of vLLM's detokenizer.
    """
    request: Any = SimpleNamespace(
        request_id="", prompt_token_ids=prompt, sampling_params=params, prompt_embeds=None, prompt_is_token_ids=None
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    ids, step = generation.token_ids, step or max(len(generation.token_ids), 1)
    ends = {*params.all_stop_token_ids, *(params.stop_token_ids or ())}
    at_token = generation.finish_reason == "stop" and bool(ids) and ids[-1] in ends
    has_logprobs = params.logprobs is not None and len(generation.logprobs) == len(ids)
    stop: str | int | None = None
    for start in range(0, max(len(ids), 1), step):
        part, done = ids[start : start + step], start + step >= len(ids)
        stop = detokenizer.update(list(part), at_token and done) or stop
        logprobs = None
        if has_logprobs:
            pairs = zip(part, generation.logprobs[start : start + step], strict=True)
            logprobs = [{token: Logprob(value, 1, tokenizer.decode([token]))} for token, value in pairs]
        yield CompletionOutput(
            index=index,
            text=detokenizer.get_next_output_text(done, delta=step < len(ids)),
            token_ids=part,
            cumulative_logprob=None,
            logprobs=logprobs,
            finish_reason=generation.finish_reason if done else None,
            stop_reason=stop if done else None,
        )


def _plain(message: Any) -> Any:
    """Return a message with its tool calls as a list: pydantic gives an iterator, which is read once."""
    if not isinstance(message, dict):
        return message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message
    if message.get("tool_calls") is not None:
        message["tool_calls"] = [_plain(call) for call in message["tool_calls"]]
    if message.get("content") is not None and not isinstance(message["content"], str):
        message["content"] = [_plain(part) for part in message["content"]]
    return message
