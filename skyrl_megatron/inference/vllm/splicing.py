"""Prompts that begin with tokens which are there already, in vLLM's renderer.

Whoever samples for a request is its :class:`Exchange`. It may have tokens for the beginning of the prompt: those of
the answers that it sampled, and what was rendered around them. :class:`SplicingRenderer` then renders only what
follows them, because a text that is tokenized again need not give the sampled tokens. It also finds the tokens that
the template opens an answer with, for the parser of thinking (:func:`parse_after_opening`).

The parts of vLLM that it relies on: ``OnlineRenderer`` (``vllm/renderers/online_renderer.py``), and the token ids in
``kv_transfer_params`` that replace those of a rendered prompt, made for disaggregated serving.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Protocol

from vllm.exceptions import VLLMValidationError
from vllm.renderers import merge_kwargs
from vllm.renderers.online_renderer import OnlineRenderer

from skyrl_megatron.data.encoding import Encoder, after_stop
from skyrl_megatron.data.tokenizer import stop_tokens_of
from skyrl_megatron.inference.protocol import Generation

MOST_KEPT = 256
"""Sets of tools, and of arguments of the template, about which something is remembered."""


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
        """Return ``count`` continuations. ``sampling``: ``max_tokens`` and those of ``wire_app.GIVEN_BY_REQUEST`` and
        ``structured_outputs`` that the request sets."""

    def too_long(self, message: str) -> None:
        """Note that the prompt does not fit into the context. The request is refused with ``message``."""


@dataclasses.dataclass(slots=True)
class CurrentRequest:
    """The request that is answered."""

    exchange: Exchange
    opening: list[int] | None = None
    """What the template writes before an answer; None: it is not known."""


current_request: ContextVar[CurrentRequest] = ContextVar("current")


def parse_after_opening(serving: Any, name: str) -> None:
    """Let a serving object's parser of streams see of the prompt what the template opens an answer with.

    vLLM's parser looks in the whole prompt for the end of thinking, and takes that of an earlier answer, or one in the
    text of a user, for the end of this answer's. Answers that are not streamed are parsed without the prompt.
    """
    kind = getattr(serving, name, None)
    if kind is None:
        return

    class AfterOpening(kind):  # type: ignore[misc, valid-type]
        def parse_delta(self, *given: Any, prompt_token_ids: list[int] | None = None, **options: Any) -> Any:
            current = current_request.get(None)
            if current is not None and current.opening is not None and prompt_token_ids is not None:
                prompt_token_ids = current.opening
            return super().parse_delta(*given, prompt_token_ids=prompt_token_ids, **options)

    setattr(serving, name, AfterOpening)


class SplicingRenderer(OnlineRenderer):
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
        current = current_request.get(None)
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
        current = current_request.get(None)
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


def _plain(message: Any) -> Any:
    """Return a message with its tool calls as a list: pydantic gives an iterator, which is read once."""
    if not isinstance(message, dict):
        return message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message
    if message.get("tool_calls") is not None:
        message["tool_calls"] = [_plain(call) for call in message["tool_calls"]]
    if message.get("content") is not None and not isinstance(message["content"], str):
        message["content"] = [_plain(part) for part in message["content"]]
    return message
