"""The core: what a plain GRPO run loads, and that it does without the packages around it."""

import pytest

from tests.structure import source
from tests.structure.test_layers import STILL

ENTRIES = ["skyrl_megatron.entrypoints.main_base", "skyrl_megatron.weight_sync.vllm_backend"]
"""The command, and the module that the workers of vLLM load by name."""
MOST_FILES, MOST_LINES = 200, 52_000
"""Of the closure of a run, without ``bridges``, which is read and used by itself."""

apart = pytest.mark.skipif(
    any(target in source.AROUND for _, target in STILL), reason="the core still imports packages around it"
)


def lines_of(modules):
    return sum(len(source.path_of(module).read_text().splitlines()) for module in modules)


@pytest.fixture(scope="module")
def loaded():
    return {module for module in source.closure(ENTRIES) if module.split(".")[0] != "bridges"}


@apart
def test_a_run_loads_no_package_around_the_core(loaded):
    around = sorted(module for module in loaded if module.split(".")[0] in source.AROUND)
    edges = [(name, target) for name in sorted(loaded) for target, _ in source.imported(name, types=False)]
    named = [f"{name} imports {target}" for name, target in edges if target in around and name not in around]
    assert not around, "\n".join(named)


@apart
def test_a_run_loads_no_more_than_a_reader_can_hold(loaded):
    assert len(loaded) <= MOST_FILES and lines_of(loaded) <= MOST_LINES, (len(loaded), lines_of(loaded))


def test_lazy_imports_and_packages_count(loaded):
    assert "skyrl_megatron.entrypoints.experiment" in loaded  # the command imports it inside a function
    assert {"skyrl_megatron", "skyrl_megatron.runtime"} <= loaded
