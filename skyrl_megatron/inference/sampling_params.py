"""The parameters of a sampling request: from the configuration, and validated against vLLM's types.

vLLM's engine core decodes requests strictly (``vllm/v1/engine/core.py``, ``add_request_decoder``). At the first value
of a wrong type its input thread ends, and no later request is answered. So every value is checked before it is sent.
The types are read from the source of ``vllm.sampling_params``, because importing vLLM takes seconds.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import json
import math
import numbers
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_megatron.config.fields import source_of
from skyrl_megatron.config.schema.generator import SamplingParams
from skyrl_megatron.errors import RequestError


def engine_sampling(params: SamplingParams) -> dict[str, Any]:
    """Return keys of vLLM's ``SamplingParams``. ``logprobs`` 0 and 1 both mean the log-prob of the sampled token."""
    sampling: dict[str, Any] = {
        "max_tokens": params.max_generate_length,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "logprobs": None if params.logprobs is None else 0,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
        sampling["include_stop_str_in_output"] = True
    return sampling | {name: value for name, value in (params.additional_kwargs or {}).items() if name not in RESERVED}


def request_seed(seed: int, uid: str, repetition: int, step: int) -> int:
    """Return the seed of one sample, a hash of the run's seed, the prompt's uid, the repetition and the step."""
    text = f"{seed}:{step}:{repetition}:{uid}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


RESERVED = frozenset({"n", "output_kind", "skip_clone", "stream_interval", "output_text_buffer_length"})
"""Fields of vLLM's ``SamplingParams`` that requests may not set: a request is one continuation, returned at once."""
TOKENS = "/inference/v1/generate"
SAMPLING_ROUTES = frozenset({TOKENS, "/v1/completions", "/v1/chat/completions"})
"""Sampling endpoints of vLLM's server and of a run's endpoint."""
DEEPEST = 64
"""Nesting limit of a value without a declared type, because decoding is recursive. vLLM limits JSON schemas alike."""
LARGEST = 1e30
"""Limit of floats, so that 32-bit computations with them stay finite."""
_INT64 = (-(2**63), 2**63 - 1)
_LIMITS: dict[str, tuple[float, float]] = {
    "repetition_penalty": (1e-30, 1e30),  # logits are multiplied or divided by it in 32 bits
    "seed": (_INT64[0], _INT64[1] - 2**20),  # each of n continuations has the next seed
}


class WrongType(ValueError):
    """A value does not have the type that vLLM declares. ``path``: where it is. ``wanted``: what it must be."""

    def __init__(self, path: str, value: object, wanted: str) -> None:
        shown = repr(value)
        self.path, self.value, self.wanted = path, value, wanted
        super().__init__(f"{path}={shown if len(shown) <= 80 else shown[:77] + '...'}: {wanted}")


@dataclass(frozen=True, slots=True)
class _Listed:
    each: Any


@dataclass(frozen=True, slots=True)
class _Mapped:
    key: Any
    value: Any


@dataclass(frozen=True, slots=True)
class _Fields:
    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _OneOf:
    kinds: tuple[Any, ...]


# ------------------------------------------------------------------ requests
@functools.cache
def sampling_types() -> Mapping[str, Any] | None:
    """Return the declared types of vLLM's public sampling parameters by name; None without vLLM."""
    tree = source_of("vllm.sampling_params")
    return None if tree is None else _fields_of(_classes(tree), "SamplingParams").fields


def sampling_keys() -> frozenset[str]:
    """Return the keys that a request may set."""
    return frozenset(sampling_types() or ()) - RESERVED


def typed_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters with every value in its declared type; unchanged without vLLM.

    Raises WrongType for an unknown key, and for a value that cannot be converted without a change.
    """
    types = sampling_types()
    if types is None:
        return dict(sampling)
    keys = sampling_keys()
    typed = {}
    for key, value in sampling.items():
        if key not in keys:
            raise WrongType(str(key), value, unknown_key(str(key), keys))
        typed[key] = typed_field(key, value)
    return typed


def typed_field(name: str, value: Any) -> Any:
    """Return the value of one sampling parameter in its declared type. Raises WrongType."""
    typed = _typed((sampling_types() or {}).get(name, Any), value, name)
    low, high = _LIMITS.get(name, (-math.inf, math.inf))
    if isinstance(typed, int | float) and not low <= typed <= high:
        raise WrongType(name, value, f"must be between {low:g} and {high:g}")
    return typed


def typed_tokens(token_ids: Any, vocabulary: int | None = None) -> list[int]:
    """Return token ids as a list of ints. Raises WrongType for an id that is not an int in [0, ``vocabulary``)."""
    if hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes) or not token_ids:
        raise WrongType("token_ids", token_ids, "must be a list of one or more token ids")
    if all(type(token) is int for token in token_ids):
        ids = list(token_ids)
    else:
        ids = [_typed(int, token, f"token_ids[{at}]") for at, token in enumerate(token_ids)]
    least, most = min(ids), max(ids)
    if least < 0 or (vocabulary is not None and most >= vocabulary):
        wrong = least if least < 0 else most
        allowed = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1}, the vocabulary"
        raise WrongType(f"token_ids[{ids.index(wrong)}]", wrong, f"must be {allowed}")
    return ids


def check_body(path: str, body: bytes) -> None:
    """Check the token ids and sampling parameters of a POST to a sampling endpoint. Raises WrongType.

    vLLM's server accepts true for 1, and answers 500 to some values of a wrong type. A body that is not a JSON object
    is left to the endpoint.
    """
    if path not in SAMPLING_ROUTES:
        return
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(fields, dict):
        return
    if path == TOKENS:
        if "token_ids" in fields:
            typed_tokens(fields["token_ids"])
        fields = fields.get("sampling_params")
        if not isinstance(fields, dict):
            return
    elif isinstance(prompt := fields.get("prompt"), list):
        for at, element in enumerate(prompt):
            if isinstance(element, list):
                _typed(_Listed(int), element, f"prompt[{at}]")
            elif not isinstance(element, str):
                _typed(int, element, f"prompt[{at}]")
    types = sampling_types() or {}
    for name, value in fields.items():
        is_chat_logprobs = name == "logprobs" and path == "/v1/chat/completions"  # a bool in this API
        if value is not None and name in types and not is_chat_logprobs:
            typed_field(name, value)


def model_of(body: bytes) -> str:
    """Return the ``model`` of an OpenAI request, "" without one. Raises RequestError for invalid JSON."""
    try:
        return str(json.loads(body).get("model") or "")
    except (ValueError, AttributeError, RecursionError) as error:
        raise RequestError(f"the body is not a JSON object: {error}") from error


def unknown_key(name: str, known: Collection[str]) -> str:
    """Return the message for an unknown sampling key."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown sampling key {name!r}" + (f": did you mean {near[0]!r}?" if near else "")


def invalid_request(request_id: str, error: WrongType) -> RequestError:
    """Return the RequestError for a value of a wrong type."""
    return RequestError(f"request {request_id}: {error}")


# ------------------------------------------------------------------ values
def _typed(kind: Any, value: Any, path: str) -> Any:
    if isinstance(kind, _OneOf):
        return _one_of(kind, value, path)
    if isinstance(kind, _Listed):
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise WrongType(path, value, f"must be {_named(kind)}")
        return [_typed(kind.each, element, f"{path}[{at}]") for at, element in enumerate(value)]
    if isinstance(kind, _Mapped):
        if not isinstance(value, Mapping):
            raise WrongType(path, value, f"must be {_named(kind)}")
        return {
            _key(kind.key, key, path): _typed(kind.value, element, f"{path}.{key}") for key, element in value.items()
        }
    if isinstance(kind, _Fields):
        return _typed_fields(kind, value, path)
    if kind is Any:
        return _plain(value, path)
    return _scalar(kind, value, path)


def _scalar(kind: Any, value: Any, path: str) -> Any:
    wrong = WrongType(path, value, f"must be {_named(kind)}")
    boolean = type(value).__name__ in ("bool", "bool_")  # Python's bool is a number, NumPy's is not
    number = isinstance(value, numbers.Real) and not boolean
    if kind is None and value is None:
        return None
    if kind is bool and (boolean or (number and value in (0, 1))):
        return bool(value)
    if kind is int and number and (isinstance(value, numbers.Integral) or _as_float(value).is_integer()):
        if not _INT64[0] <= value <= _INT64[1]:
            raise WrongType(path, value, f"must be between {_INT64[0]} and {_INT64[1]}")
        return int(value)
    if kind is float and number:
        if not abs(_as_float(value)) <= LARGEST:
            raise WrongType(path, value, f"must be a number up to {LARGEST:g}")
        return float(value)
    if kind is str and isinstance(value, str):
        return _text(value, path)
    raise wrong


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise WrongType(path, value, "must be Unicode text without lone surrogates") from error
    return str(value)


def _key(kind: Any, key: Any, path: str) -> Any:
    """Return a key of a mapping in its declared type. JSON has only string keys."""
    if kind is int and isinstance(key, str):
        try:
            key = int(key)
        except ValueError:
            raise WrongType(f"{path}.{key}", key, f"keys must be {_named(kind)}") from None
    return _typed(kind, key, f"{path}.{key}")


def _one_of(kind: _OneOf, value: Any, path: str) -> Any:
    inside = []
    for each in kind.kinds:
        try:
            return _typed(each, value, path)
        except WrongType as error:
            if error.path != path or error.wanted != f"must be {_named(each)}":
                inside.append(error)  # the kind matches, but a value inside is wrong
    raise inside[0] if inside else WrongType(path, value, f"must be {_named(kind)}")


def _typed_fields(kind: _Fields, value: Any, path: str) -> Any:
    """Return a nested object, a mapping or an instance of vLLM's class, with typed values."""
    if isinstance(value, Mapping):
        for name in value:
            if name not in kind.fields:
                fields = ", ".join(kind.fields)
                raise WrongType(f"{path}.{name}", value[name], f"is not a field of {kind.name}, which has {fields}")
        return {name: _typed(kind.fields[name], element, f"{path}.{name}") for name, element in value.items()}
    if type(value).__name__ != kind.name:
        raise WrongType(path, value, f"must be {_named(kind)}")
    for name, field_kind in kind.fields.items():
        typed = _typed(field_kind, getattr(value, name), f"{path}.{name}")
        if typed is not getattr(value, name):
            setattr(value, name, typed)
    return value


def _plain(value: Any, path: str) -> Any:
    """Return a value without a declared type. Raises WrongType if it is nested too deep, or has text or a number that
    cannot be sent."""
    level = [value]
    for _ in range(DEEPEST):
        for element in level:
            if isinstance(element, str):
                _text(element, path)
            elif isinstance(element, int) and not _INT64[0] <= element < 2**64:
                raise WrongType(path, value, f"{element} has more than 64 bits")
        level = [inner for element in level for inner in _inside(element)]
        if not level:
            return value
    raise WrongType(path, value, f"is nested deeper than {DEEPEST} levels")


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def _named(kind: Any) -> str:
    if isinstance(kind, _OneOf):
        return " or ".join(_named(option) for option in kind.kinds)
    if isinstance(kind, _Listed):
        return f"a list, each {_named(kind.each)}"
    if isinstance(kind, _Mapped):
        return f"an object, each key {_named(kind.key)}, each value {_named(kind.value)}"
    if isinstance(kind, _Fields):
        return f"an object with fields of {kind.name}"
    names = {int: "an int", float: "a number", bool: "a bool", str: "a str", None: "null", Any: "any value"}
    return names[kind]


# ------------------------------------------------------------------ declarations
def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields_of(classes: Mapping[str, ast.ClassDef], name: str) -> _Fields:
    fields = {}
    for item in classes[name].body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if not item.target.id.startswith("_"):
                fields[item.target.id] = _kind(classes, item.annotation)
    return _Fields(name, fields)


def _kind(classes: Mapping[str, ast.ClassDef], node: ast.expr) -> Any:
    """Return the type of an annotation; Any if requests cannot contain that type."""
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.BinOp):
        left, right = _kind(classes, node.left), _kind(classes, node.right)
        both = [side.kinds if isinstance(side, _OneOf) else (side,) for side in (left, right)]
        return _OneOf((*both[0], *both[1]))
    if isinstance(node, ast.Name):
        if node.id in classes:
            has_fields = any(isinstance(item, ast.AnnAssign) for item in classes[node.id].body)
            return _fields_of(classes, node.id) if has_fields else Any
        built_in = {
            "int": int,
            "float": float,
            "bool": bool,
            "str": str,
            "list": _Listed(Any),
            "dict": _Mapped(str, Any),
        }
        return built_in.get(node.id, Any)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        of = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if node.value.id == "list":
            return _Listed(_kind(classes, of[0]))
        if node.value.id == "dict":
            return _Mapped(*(_kind(classes, side) for side in of))
        if node.value.id == "Annotated" and "ndarray" in ast.unparse(of[0]):
            return _Listed(_Listed(int))
        if node.value.id == "Annotated":
            return _kind(classes, of[0])
    return Any
