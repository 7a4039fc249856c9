"""Turns one given value into the type that a field declares, or says what is wrong with it.

Strict on purpose: "4" is not an int, 1 is not a bool, 4.0 is not an int. The exceptions lose nothing: an int is a
float, a path object is a string, and text typed for a string field is taken as typed (``run_name=007``).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import math
import os
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from skyrl_megatron.config.fields import Bounds, OneOf, Section, members_of

_NAMES: dict[Any, str] = {Any: "any value", types.NoneType: "null", dict: "mapping", list: "list"}


class Mismatch(Exception):
    """A value does not fit its field; the message is the fix."""


def convert(annotation: Any, value: Any, text: str | None = None) -> Any:
    """Return ``value`` as the type ``annotation``. ``text``: how it was typed, where it was. Raises Mismatch."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner, *rules = typing.get_args(annotation)
        converted = convert(inner, value, text)
        for rule in rules:
            if converted is not None and isinstance(rule, Bounds | OneOf):
                _obey(rule, converted)
        return converted
    if origin in (typing.Union, types.UnionType):
        return _convert_union(annotation, value, text)
    if annotation is Any:
        return value
    if origin is typing.Literal:
        choices = typing.get_args(annotation)
        if value not in choices:
            raise Mismatch(f"must be one of {', '.join(map(repr, choices))}")
        return value
    if annotation is types.NoneType:
        if value is None:
            return None
        raise Mismatch("must be null")
    if annotation is list or origin in (list, tuple):
        return _convert_list(annotation, value)
    if annotation is dict or origin is dict:
        return _convert_dict(annotation, value)
    return _convert_scalar(annotation, value, text)


def describe(annotation: Any) -> str:
    """Return the type in words, rules left out: ``int or null``."""
    names = []
    for member in members_of(annotation):
        if typing.get_origin(member) is list:
            names.append(f"list of {describe(*typing.get_args(member))}")
        elif typing.get_origin(member) is dict:
            names.append("mapping")
        elif isinstance(member, type) and issubclass(member, Section):
            names.append("a section: set the fields below it")
        else:
            names.append(_NAMES.get(member, getattr(member, "__name__", str(member))))
    return " or ".join(names)


def _wrong_type(annotation: Any, value: Any) -> Mismatch:
    return Mismatch(f"must be {describe(annotation)}, not {type(value).__name__}")


def _obey(rule: Bounds | OneOf, value: Any) -> None:
    if rule.allows(value):
        return
    near = difflib.get_close_matches(str(value), rule.choices, n=1) if isinstance(rule, OneOf) else []
    raise Mismatch(f"must be {rule}" + (f"; did you mean {near[0]}?" if near else ""))


def _convert_union(annotation: Any, value: Any, text: str | None) -> Any:
    members = typing.get_args(annotation)
    if value is None and types.NoneType in members:
        return None
    failures = []
    # the member of exactly this type first, so that true stays a bool in `bool | int`
    for member in sorted(members, key=lambda kind: not _is_exactly(value, kind)):
        try:
            return convert(member, value, text)
        except Mismatch as failure:
            if _is_exactly(value, member):
                raise
            failures.append(failure)
    only = [kind for kind in members if kind is not types.NoneType]
    if len(only) == 1 and not str(failures[0]).startswith("must be null"):
        named = describe(only[0])
        raise Mismatch(str(failures[0]).replace(f"must be {named},", f"must be {describe(annotation)},"))
    raise _wrong_type(annotation, value)


def _is_exactly(value: Any, annotation: Any) -> bool:
    return any(type(value) in (kind, typing.get_origin(kind)) for kind in members_of(annotation))


def _convert_list(annotation: Any, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        hint = f'; write a list: ["{value}"]' if isinstance(value, str) else ""
        raise Mismatch(f"must be {describe(annotation)}, not {type(value).__name__}{hint}")
    kinds = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and kinds and kinds[-1] is not Ellipsis:
        if len(kinds) != len(value):
            raise Mismatch(f"must have {len(kinds)} entries, not {len(value)}")
        return tuple(convert(kind, item) for kind, item in zip(kinds, value, strict=True))
    items = [convert(kinds[0] if kinds else Any, item) for item in value]
    return tuple(items) if typing.get_origin(annotation) is tuple else items


def _convert_dict(annotation: Any, value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(annotation, value)
    key_type, item_type = typing.get_args(annotation) or (Any, Any)
    return {convert(key_type, key): copy.deepcopy(convert(item_type, item)) for key, item in value.items()}


def _convert_scalar(kind: Any, value: Any, text: str | None) -> Any:
    if kind is bool or kind is int:
        if type(value) is kind:
            return value
    elif kind is float:
        if type(value) in (int, float):
            if not math.isfinite(value):
                raise Mismatch("must be a finite number")
            return float(value)
    elif kind is str:
        if text is not None and isinstance(value, str | bool | int | float):
            quoted = isinstance(value, str) and text.lstrip()[:1] in ("'", '"')
            return value if quoted else text
        if isinstance(value, str):
            return str(value)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, bool | int | float):
            raise Mismatch("must be str: put it in quotes")
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        for member in kind:
            if value is member or value in (member.value, member.name):
                return member
        raise Mismatch(f"must be one of {', '.join(str(member.value) for member in kind)}")
    elif isinstance(value, kind):
        return value
    elif dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _convert_dataclass(kind, value)
    raise _wrong_type(kind, value)


def _convert_dataclass(kind: Any, value: Mapping[Any, Any]) -> Any:
    """Convert a mapping to a dataclass inside a list, or to one that is no Section."""
    if issubclass(kind, Section):
        return kind.from_dict_config(value)
    try:
        return kind(**value)
    except TypeError as error:
        raise Mismatch(str(error)) from None
