"""The order of a part of the suite that may not fit into one run: every area has its share of each run, and in the
course of some runs every test comes round.

An area is a folder of ``tests``. Run ``count`` (the number of commits) enters each area at ``count / φ mod 1`` of its
tests, φ being the golden ratio, and goes round from there. Such starts lie evenly however many there are, and also
when only every second or third commit has a run. So nobody has to know how far a run gets: whatever share of an area
each run reaches, :func:`rounds` of that share successive runs reach all of it.

The areas take turns in blocks, so that a run that is stopped has reached much the same share of each. The tests of a
block follow one another in one module: what the module sets up (an engine, a model) is set up once a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

BLOCKS = 4  # of an area, at least: more of them share the time better and set up more


def start(count: int, size: int) -> int:
    """Return the place at which run ``count`` enters an area of ``size`` tests, exact for any count."""
    one_over_phi = 0x9E3779B97F4A7C15  # times 2^64
    return (count * one_over_phi % 2**64) * size >> 64


def rounds(share: float) -> int:
    """Return how many successive runs, each reaching ``share`` (0 < share ≤ 1) of an area, reach every test of it."""
    return 1 if share == 1 else math.ceil(2 / share)


def left_out[T](items: Sequence[T], count: int, one_in: Callable[[T], int]) -> list[T]:
    """Return the items that run ``count`` does without: of those that are one in n, all but every n-th."""
    seen: dict[int, int] = {}
    found = []
    for item in items:
        n = one_in(item)
        place = seen[n] = seen.get(n, -1) + 1
        if place % n != start(count, n):
            found.append(item)
    return found


def arrange[T](items: Sequence[T], count: int, area: Callable[[T], str], module: Callable[[T], str]) -> list[T]:
    """Return all items in the order of run ``count``."""
    areas: dict[str, list[T]] = {}
    for item in items:
        areas.setdefault(area(item), []).append(item)
    blocks: list[tuple[float, list[T]]] = []
    for members in areas.values():
        entry, size = start(count, len(members)), len(members)
        reached = 0
        for _, group in groupby(members[entry:] + members[:entry], module):
            for block in _cut(list(group), math.ceil(size / BLOCKS)):
                blocks.append((reached / size, block))
                reached += len(block)
    return [item for _, block in sorted(blocks, key=lambda entry: entry[0]) for item in block]


def _cut[T](items: list[T], longest: int) -> list[list[T]]:
    return [items[at : at + longest] for at in range(0, len(items), longest)]
