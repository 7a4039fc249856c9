"""A clock that jumps moves no deadline: the time of day is read to be written down, never to be waited for."""

import ast

from tests.structure.source import modules

WRITTEN_DOWN = {
    "skyrl_megatron.progress",
    "skyrl_megatron.data.tokenizer",
    "skyrl_megatron.inference.engine_pool",
    "skyrl_megatron_observe.trackers",
    "skyrl_megatron_observe.run_report",
    "skyrl_megatron_tools.doctor.machine",
}
"""Modules that read it: spans of lanes, the day that templates write, the start of a run, a page's age, and how far
clocks of hosts are apart."""


def reads_the_time_of_day(tree):
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("time", "time"), ("datetime", "now"), ("datetime", "utcnow")}
        for node in ast.walk(tree)
    )


def test_deadlines_are_of_a_clock_that_does_not_jump():
    found = {name for name, tree in modules().items() if reads_the_time_of_day(tree)}
    assert found == WRITTEN_DOWN & modules().keys(), (
        f"use time.monotonic() for what is waited for: {sorted(found ^ WRITTEN_DOWN)}"
    )
