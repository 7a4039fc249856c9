"""A value for a field that is not the one it has."""

import typing
from typing import Annotated

from skyrl_megatron.config.fields import Bounds, OneOf, members_of


def another_value(annotation, current):
    """Return a value that the type allows, other than ``current``."""
    rules = [rule for rule in _rules(annotation)]
    words = next((rule.choices for rule in rules if isinstance(rule, OneOf)), None)
    if words:
        return next(word for word in words if word != current)
    kinds = [kind for kind in members_of(annotation) if kind is not type(None)]
    kind = typing.get_origin(kinds[0]) or kinds[0]
    if kind is bool:
        return not current
    if kind in (int, float):
        bounds = next((rule for rule in rules if isinstance(rule, Bounds)), Bounds())
        candidates = [kind(each) for each in (0.5, 2, 3, 0.25, 7)]
        return next(each for each in candidates if bounds.allows(each) and each != current)
    if kind is list:
        item = typing.get_args(kinds[0])[0]
        return {int: [0], float: [0.5, 0.6], str: ["other"]}[item]
    if kind is dict and typing.get_args(kinds[0])[1] is str:
        return {"/other": "/"}
    if kind is dict and "dict" in str(typing.get_args(kinds[0])[1]):  # sections by name
        return {"other": {}}
    number = 1.0 if kind is dict and typing.get_args(kinds[0])[1:] == (float,) else 1
    return {str: "/other", dict: {"other": number}}[kind]


def _rules(annotation):
    if typing.get_origin(annotation) is Annotated:
        yield from typing.get_args(annotation)[1:]
    for part in typing.get_args(annotation):
        if not isinstance(part, Bounds | OneOf):
            yield from _rules(part)
