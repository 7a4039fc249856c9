"""vLLM's serving code for the wires of clients, without an engine.

:class:`WireApp` is vLLM's own application of ``vllm serve``: it validates a request, converts it to messages, renders
it with the chat template, parses an answer for thinking and tool calls, and writes it in the form of the client, also
as a stream. Only its engine is replaced. Where vLLM would sample, :class:`~.splicing.Exchange`, which a caller
provides for each request, is asked for the tokens. It may also have tokens for the beginning of the prompt, which
``splicing.py`` puts in their place.

It needs no GPU and no weights, as ``vllm launch render`` does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

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
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from skyrl_megatron.data.tokenizer import guard_templates
from skyrl_megatron.errors import EngineError, RequestError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.inference.vllm.requests import call_app, with_config_keys
from skyrl_megatron.inference.vllm.splicing import (
    CurrentRequest,
    Exchange,
    SplicingRenderer,
    current_request,
    parse_after_opening,
)

STREAM_TOKENS = 16
"""Tokens in a chunk of a stream."""
LANE_RENDERERS = 4
"""Threads that tokenize wide requests: tokenizers leave the interpreter to others while they do."""
STOP_S = 10.0
"""Time in seconds that a wide request has to end when its thread is stopped."""
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
        renderer.__class__ = SplicingRenderer
        renderer.openings, renderer.shown = {}, {}
        for serving, name in (("chat", "parser_cls"), ("chat_batch", "parser_cls"), ("responses", "parser")):
            parse_after_opening(getattr(app.state, f"openai_serving_{serving}"), name)
        parse_after_opening(app.state.anthropic_serving_messages, "parser_cls")
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
        token = current_request.set(CurrentRequest(exchange))
        try:
            pieces = call_app(self._app, path, body)
            head = await anext(pieces)
            assert isinstance(head, tuple)
            status, content_type = head
            parts = [piece async for piece in pieces if isinstance(piece, bytes)]
        finally:
            current_request.reset(token)
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
            generations = await current_request.get().exchange.sample(ids, asked_for(sampling_params), count)
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
