"""The tokenizer of a Hugging Face folder, and its chat template, rendered with limits on time and memory.

transformers renders templates in jinja2's sandbox. The sandbox protects code and files but not memory:
``{{ content * 100000000 }}`` uses all memory of the host. This module checks every operation that can lengthen a text
before it runs. The output may be :data:`GROWTH` times as long as the input, plus the template's text once per message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bridges.errors import BridgeError
from bridges.files import check_folder
from skyrl_megatron.errors import DataError, ModelLoadError

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

_TRIAL = "What is 1 + 1?\n\té 汉"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_PANIC = "PanicException"  # of libraries in Rust: a BaseException, and no module has it


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer vocabulary."""
    return any(any(folder.glob(name)) for name in (*VOCABULARIES, "*.tiktoken"))


def load_tokenizer(
    folder: str | Path, *, trust_remote_code: bool = False, padding_side: str = "left"
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder. If it has no padding token, it uses its end-of-sequence token.

    Raises ModelLoadError if the folder has no tokenizer (transformers would make an empty one), or if loading fails.
    """
    from transformers import AutoTokenizer

    path = Path(folder).expanduser()
    if path.is_dir() and not trust_remote_code and not has_tokenizer(path):
        raise ModelLoadError(
            f"{path} has no tokenizer ({', '.join(VOCABULARIES[:2])}, …): download the files of the tokenizer too"
        )
    try:
        check_folder(path)
    except BridgeError as error:
        raise ModelLoadError(str(error)) from error
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path) if path.is_dir() else str(folder), trust_remote_code=trust_remote_code
        )
        tokenizer.padding_side = padding_side
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.decode(tokenizer.encode(_TRIAL, add_special_tokens=False))  # reads all files
    except BaseException as error:  # tokenizers, sentencepiece and JSON raise various errors for damaged files
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise ModelLoadError(
            f"{folder}: the tokenizer cannot be loaded: {_first_line(error)}; download it again"
        ) from error
    return tokenizer


def stop_tokens_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens at which an engine stops with the model of a tokenizer's folder, first the tokenizer's own
    end-of-sequence token.

    They are those of vLLM (``SamplingParams.update_from_generation_config``): the tokenizer's, and ``eos_token_id`` of
    ``generation_config.json``, one or a list; of ``config.json`` only if the other file is missing.
    """
    eos = getattr(tokenizer, "eos_token_id", None)
    folder = Path(str(getattr(tokenizer, "name_or_path", "") or ""))
    listed = _model_stops(folder) if str(folder) != "." and folder.is_dir() else ()
    return tuple(dict.fromkeys([*([] if eos is None else [int(eos)]), *listed]))


def _model_stops(folder: Path) -> Sequence[int]:
    from transformers import AutoConfig, GenerationConfig

    try:
        if (folder / "generation_config.json").is_file():
            config = GenerationConfig.from_pretrained(folder)
        elif (folder / "config.json").is_file():
            try:
                config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
            except (ValueError, KeyError):  # a family that transformers does not know
                config = GenerationConfig.from_model_config(json.loads((folder / "config.json").read_bytes()))
        else:
            return ()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{folder}: the stop tokens cannot be read: {_first_line(error)}; fetch generation_config.json again"
        ) from error
    stops = config.eos_token_id
    listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if any(type(stop) is not int or stop >= 2**31 for stop in listed):
        raise ModelLoadError(f"{folder}: eos_token_id={stops!r:.80} must be the id of a token, or a list of ids")
    return [stop for stop in listed if stop >= 0]  # -1: none


def require_template(tokenizer: Any, template: str | None) -> None:
    """Raise DataError if there is no chat template: neither ``template`` nor one of the tokenizer."""
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template: set"
            " generator.chat_template, or use the tokenizer of an instruction-tuned model"
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


GROWTH = 16
_LEAST = 1 << 16  # characters that a template may write in addition
_MOST_BITS = 4096  # of an integer
_STEPS = 1_000_000  # of all range() calls of a rendering
_WIDE = re.compile(r"%(?:\([^)]*\))?[-+ #_^]*[\d*]*\.?\d{4,}|\{[^{}]*:[^{}]*\d{4,}")
_PASSES = 64  # limit of all intermediate texts, in multiples of the output limit


@dataclass(slots=True)
class _Budget:
    """The limits of a rendering: ``most`` characters in one text, and the remaining ``spare`` characters of all
    intermediate texts and ``steps`` of range()."""

    most: int
    spare: int
    steps: int = _STEPS

    @classmethod
    def of(cls, most: int) -> _Budget:
        return cls(most, _PASSES * most)


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)


class TemplateGrowthError(ValueError):
    """The output of a template is far longer than its input."""


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, template: str | None, **kwargs: Any
) -> Any:
    """Return the result of ``tokenizer.apply_chat_template``: text with ``tokenize=False``.

    ``template``: None for the template of the tokenizer. Raises :class:`TemplateGrowthError` if the output is too
    long, and passes on errors of the template's expressions.
    """
    about: Any = tokenizer  # its type hints are narrower than what templates take
    if not hasattr(about, "get_chat_template"):
        return about.apply_chat_template(list(messages), chat_template=template, **kwargs)
    text = about.get_chat_template(template, kwargs.get("tools"))
    with _bounded(text, [*messages, kwargs], _named(about, template)):
        return about.apply_chat_template(list(messages), chat_template=template, **kwargs)


def _named(tokenizer: Any, template: str | None) -> str:
    of_tokenizer = f"the chat template of {getattr(tokenizer, 'name_or_path', None) or 'the tokenizer'}"
    return of_tokenizer if template is None else "the template of generator.chat_template"


@contextmanager
def _bounded(text: str, values: Sequence[Any], name: str) -> Iterator[None]:
    guard_templates()
    most = GROWTH * sum(map(_length, values)) + len(text) * (len(values) + 1) + _LEAST
    token = _budget.set(_Budget.of(most))
    try:
        yield
    except TemplateGrowthError as error:
        raise TemplateGrowthError(
            f"{name} {error} (limit here: {most} characters): set another generator.chat_template"
        ) from None
    finally:
        _budget.reset(token)


def _length(value: Any) -> int:
    """Return the number of characters of a value in a template's output; numbers and names count as 16."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_length(key) + _length(each) for key, each in value.items())
    return sum(map(_length, value)) if isinstance(value, list | tuple) else 16


# ------------------------------------------------------------------------------------------ a guarded template
@cache
def guard_templates() -> None:
    """Make transformers compile every template of this process with :func:`_compiled`.

    transformers has no other way to set the jinja2 environment, and jinja2 evaluates constant expressions at compile
    time. A template that is rendered without :func:`render`, as vLLM does, may write texts of 16 million characters.
    """
    from transformers.utils import chat_template_utils

    chat_template_utils._compile_jinja_template = _compiled


@lru_cache(maxsize=128)
def _compiled(text: str) -> Template:
    """Return a template in transformers' environment with checks on all operations that lengthen texts."""
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    env: Any = _cached_compile_jinja_template("").environment
    plain_call, plain_binop, plain_join = env.call, env.call_binop, env.concat
    env.globals[_CLOCK] = _strftime_now

    def call_binop(context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return _charged(plain_binop(context, operator, left, right))

    def call(context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            _check_call(function.__name__, owner, args, kwargs)
        elif function is _strftime_now:
            _check_format(str(args[0]) if args else "", ())
        return _charged(plain_call(context, function, *args, **kwargs))

    env.intercepted_binops = frozenset({"*", "**", "%", "+"})
    env.call_binop, env.call, env.concat = call_binop, call, lambda parts: plain_join(_counted(parts))
    del env.globals["lipsum"]
    env.globals["range"] = _range
    env.filters = {name: _guarded_filter(name, unguarded) for name, unguarded in env.filters.items()}
    template: Any = env.from_string(text)
    render, names = template.root_render_func, template.root_render_func.__globals__
    for name in ("str_join", "markup_join"):  # jinja2 compiles the operator ~ to these
        names[name] = _joining(names[name])
    template.root_render_func = lambda context: _counted(render(context))
    return cast("Template", template)


# ----------------------------------------------------------------------------------------------- the time of a run
_CLOCK = "strftime_now"
_time_of_run: datetime | None = None


def time_of_run(given: datetime | None = None) -> datetime:
    """Return the time that all templates write which :func:`render` renders, so that the rows of a run are the same
    whenever they are rendered: that of the first call, or ``given`` by the process that started this one."""
    global _time_of_run
    _time_of_run = given or _time_of_run or datetime.now()
    return _time_of_run


def _strftime_now(format: str) -> str:
    return (datetime.now() if _budget.get() is None else time_of_run()).strftime(format)


def times_in(template: str) -> list[str]:
    """Return what changes with the time in what a template may write: each time in the format of its call, or all of
    the time where a format is no constant."""
    from jinja2 import TemplateSyntaxError, nodes
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    environment: Any = _cached_compile_jinja_template("").environment
    try:
        tree = environment.parse(template)
    except TemplateSyntaxError:
        return []  # it writes nothing
    uses = sum(name.name == _CLOCK for name in tree.find_all(nodes.Name))
    asked = sum(getattr(test.node, "name", "") == _CLOCK for test in tree.find_all(nodes.Test))
    calls = [call for call in tree.find_all(nodes.Call) if getattr(call.node, "name", "") == _CLOCK]
    arguments = [call.args[0] for call in calls if len(call.args) == 1]
    formats = [argument.value for argument in arguments if isinstance(argument, nodes.Const)]
    unknown = [time_of_run().isoformat()] if len(formats) + asked < uses else []
    return [*(time_of_run().strftime(str(written)) for written in formats), *unknown]


def _current() -> _Budget:
    return _budget.get() or _Budget.of(1 << 24)  # the template is rendered without render()


def _range(*bounds: int) -> range:
    steps, budget = range(*bounds), _current()
    if len(steps) > budget.steps:
        raise TemplateGrowthError(f"uses more than {_STEPS} steps of range()")
    budget.steps -= len(steps)
    return steps


def _counted(parts: Iterable[str]) -> Iterator[str]:
    total, most = 0, _current().most
    for part in parts:
        total += len(part)
        if total > most:
            _check(total)
        yield part


def _joining(join: Any) -> Any:
    return lambda parts: _charged(join(_checked_texts(parts)))


def _checked_texts(parts: Iterable[Any]) -> list[Any]:
    found = list(parts)
    _check(sum(len(part) if isinstance(part, str) else 16 for part in found))
    return found


def _check(length: int) -> None:
    if length > _current().most:
        raise TemplateGrowthError("multiplies its input")


def _charged(value: Any) -> Any:
    """Return the value of an expression after subtracting its length from the budget."""
    if isinstance(value, str):
        _check(len(value))
        budget = _current()
        budget.spare -= len(value)
        if budget.spare < 0:
            raise TemplateGrowthError("multiplies its input")
    return value


def _check_operation(operator: str, left: Any, right: Any) -> None:
    sized = [operand for operand in (left, right) if isinstance(operand, str | list | tuple | bytes)]
    numbers = [operand for operand in (left, right) if isinstance(operand, int)]
    if operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,))
    elif operator == "*" and sized and numbers:
        _check(len(sized[0]) * max(0, numbers[0]))
    elif operator == "+" and len(sized) == 2:
        _check(len(left) + len(right))
    elif len(numbers) == 2 and operator in ("*", "**"):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MOST_BITS:
            raise TemplateGrowthError(f"has a number of {bits} bits")


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Refuse format widths of more than three digits, in all ways of formatting."""
    values = list(values)
    given = any(isinstance(each, int) and abs(each) > 999 for each in values) and ("*" in text or ":{" in text)
    if given or _WIDE.search(text):
        raise TemplateGrowthError("formats a value to a width of more than three digits")
    _check(len(text) + sum(map(_length, values)) * (text.count("%") + text.count("{") + 1))


_ONE_FOR_EACH = {"replace", "expandtabs", "indent", "wordwrap", "join", "translate", "tojson"}
"""Methods and filters that can insert an argument many times into a text."""


def _check_call(name: str, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the largest possible result of a method or filter of a text."""
    arguments = [*args, *kwargs.values()]
    widths = [abs(argument) for argument in arguments if isinstance(argument, int)]
    for width in widths:
        _check(width)
    if name in ("format", "format_map"):
        _check_format(str(text), arguments)
    elif name in _ONE_FOR_EACH:
        longest = max([1, *widths, *(len(argument) for argument in arguments if isinstance(argument, str))])
        if name == "join":  # the filter joins a list, the method of a text its argument
            of_text = isinstance(text, str)
            parts = (
                next((argument for argument in arguments if not isinstance(argument, str)), "") if of_text else text
            )
            places, length = len(parts), _length(parts) + len(parts) * (len(text) if of_text else 0)
        elif not isinstance(text, str):
            places = length = _length(text)
        elif name == "replace":
            places, length = text.count(args[0]) if args and isinstance(args[0], str) else len(text), len(text)
        elif name == "translate":
            places, length = len(text), len(text)
        else:
            places, length = text.count("\n") + text.count("\t") + text.count(" ") + 1, len(text)
        _check(length + places * longest)


def _guarded_filter(name: str, function: Any) -> Any:
    passed = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        if name == "join" and len(arguments) > passed and not isinstance(arguments[passed], str | list | tuple):
            arguments[passed] = list(arguments[passed])  # a generator, whose parts must be counted
        if len(arguments) > passed:
            _check_call(name, arguments[passed], arguments[passed + 1 :], kwargs)
        return _charged(function(*arguments, **kwargs))

    return guarded
