"""Bodies and files as an enemy or a failing disk makes them."""

from __future__ import annotations

import copy
import inspect
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 0))
few = settings(
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""The same examples in every run; with ``FUZZ_EXAMPLES=2000`` as many others."""


def times(plain, matrix, *, same=False):
    """Run a test with ``plain`` mutations, which it draws from ``data``, and in the full matrix ``matrix`` others.

    ``same``: those of the matrix, too, are the same in every run.
    """

    def decorate(test):
        @pytest.mark.parametrize("mutations", [plain, pytest.param(matrix, marks=pytest.mark.full_matrix)])
        def run(mutations, **fixtures):
            wanted, fixed = EXAMPLES or mutations, not EXAMPLES and (same or mutations == plain)
            chosen = settings(few, max_examples=wanted, derandomize=fixed, database=None)
            chosen(given(data=st.data())(lambda data: test(data=data, **fixtures)))()

        own = inspect.signature(test).parameters.values()
        named = [each for each in own if each.name != "data"]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.__signature__ = inspect.Signature([*named, inspect.Parameter("mutations", inspect.Parameter.KEYWORD_ONLY)])
        return run

    return decorate


mutated = times(50, 2000)

DEEP = b"[" * 100_000
"""JSON that is deeper than parsers' stacks."""
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(10**30, 10**60), st.floats(),
    st.text(max_size=12), st.sampled_from(["../../etc/passwd", "/etc/passwd", "\x00", "\ud800", "nan", "9" * 5000]),
)  # fmt: skip
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
"""Any value that JSON can hold, and what it should not hold."""


def places(value: object, at: tuple = ()) -> list[tuple]:
    """List the paths of all values within ``value``, its own () among them."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, each in inner for path in places(each, (*at, key)))]


@st.composite
def changed(draw, whole: object) -> object:
    """``whole`` with one or two of its values replaced, left out, or joined by one that nobody knows."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(places(value)))
        if not path:
            value = draw(st.one_of(anything, st.just(value)))
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        how = draw(st.sampled_from(["replace", "remove", "add"])) if isinstance(holder, dict) else "replace"
        if how == "remove":
            del holder[path[-1]]
        else:
            holder[path[-1] if how == "replace" else draw(st.text(max_size=5))] = draw(anything)
    return value


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def bodies(whole: object) -> st.SearchStrategy[bytes]:
    """Bytes in the place of ``whole`` as JSON."""
    right = as_json(whole)
    return st.one_of(changed(whole).map(as_json), flipped(right), st.binary(max_size=64), st.just(DEEP))


@st.composite
def flipped(draw, right: bytes) -> bytes:
    """``right`` with a few bytes changed, cut off, or repeated."""
    data = bytearray(right)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["change", "cut", "repeat"])):
            case "change" if data:
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 64))]
            case _:
                data[at:at] = data[at : at + draw(st.integers(1, 16))]
    return bytes(data)
