"""The core: what a plain GRPO run loads, and that it does without the packages around it."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.structure import source

ENTRIES = ["skyrl_megatron.entrypoints.main_base", "skyrl_megatron.weight_sync.vllm_backend"]
"""The command, and the module that the workers of vLLM load by name."""
MOST_FILES, MOST_LINES = 200, 52_000
"""Of the closure of a run, without ``bridges``, which is read and used by itself. They grow only with what a run can
do."""


def lines_of(modules):
    return sum(len(source.path_of(module).read_text().splitlines()) for module in modules)


@pytest.fixture(scope="module")
def loaded():
    return {module for module in source.closure(ENTRIES) if module.split(".")[0] != "bridges"}


def test_a_run_loads_no_package_around_the_core(loaded):
    around = sorted(module for module in loaded if module.split(".")[0] in source.AROUND)
    edges = [(name, target) for name in sorted(loaded) for target, _ in source.imported(name, types=False)]
    named = [f"{name} imports {target}" for name, target in edges if target in around and name not in around]
    assert not around, "\n".join(named)


def test_a_run_loads_no_more_than_a_reader_can_hold(loaded):
    assert len(loaded) <= MOST_FILES and lines_of(loaded) <= MOST_LINES, (len(loaded), lines_of(loaded))


def test_lazy_imports_and_packages_count(loaded):
    assert "skyrl_megatron.entrypoints.experiment" in loaded  # the command imports it inside a function
    assert {"skyrl_megatron", "skyrl_megatron.runtime"} <= loaded


OF_ALL_PACKAGES = ("examples", "guides", "launch", "mutations", "structure")
"""Folders whose tests are of documents, scripts and rules, which name every package. Other tests import what else is
in them."""
RUNG_OF_ADAPTERS = "tests/gpu/test_25_adapters.py"
"""Stays in the folder of the GPU ladder."""
UNINSTALL = """\
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
"""
"""Text of a ``sitecustomize.py``, which every Python process reads at its start."""


def copy_of_the_core(folder):
    """Copy what is tracked, without the packages around the core and their tests, into ``folder``.

    An installation of the project in place would still answer for the missing packages, and load them as plugins. So
    its finder is removed, and metadata without entry points shadows that of the installation.
    """
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=source.ROOT, capture_output=True, text=True, check=True)
    absent = {f"{name}/" for name in source.AROUND}
    absent |= {f"tests/{name.removeprefix('skyrl_megatron_')}/" for name in source.AROUND}
    absent |= {f"tests/{name}/test_" for name in OF_ALL_PACKAGES} | {RUNG_OF_ADAPTERS}
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith(tuple(absent)) and (source.ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source.ROOT / name, folder / name)
    (folder / "sitecustomize.py").write_text(UNINSTALL)
    metadata = folder / "skyrl_megatron-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: skyrl-megatron\nVersion: 0.1.0\n")
    return folder


@pytest.mark.process
@pytest.mark.slow
def test_the_core_passes_its_fast_tests_alone(tmp_path):
    core = copy_of_the_core(tmp_path)
    command = [sys.executable, "-m", "pytest", "--fast", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(
        command, cwd=core, env={**os.environ, "PYTHONPATH": str(core)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
