"""launch/setup.sh on bad ground: each failure is one line that names the thing and the fix, and can be repeated."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple"}


@pytest.fixture
def checkout(tmp_path):
    """A copy of what setup.sh reads, without an environment."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", folder / "launch")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def setup(checkout, *arguments, **environment):
    """Run setup.sh with this interpreter's Python and an index that does not answer, unless told otherwise."""
    env = {**os.environ, "PYTHON": sys.executable, **NO_INDEX, "PIP_NO_INPUT": "1", **environment}
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        env.pop(name, None)
    env["PIP_CONFIG_FILE"] = "/dev/null"
    return subprocess.run(
        [checkout / "launch" / "setup.sh", *arguments], env=env, capture_output=True, text=True, timeout=120
    )


def test_wrong_python_is_named(checkout, tmp_path):
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18\nexit 1\n')
    old.chmod(0o755)
    result = setup(checkout, "cpu", PYTHON=str(old))
    assert result.returncode == 1
    assert f"PYTHON={old} is Python 3.9.18: set PYTHON to a Python 3.12 or 3.13" in result.stderr
    assert not (checkout / ".venv").exists()


def test_unknown_flavour(checkout):
    result = setup(checkout, "tpu")
    assert result.returncode == 1 and "unknown flavour 'tpu'" in result.stderr


def test_foreign_environment_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").touch()
    result = setup(checkout, "cpu")
    assert result.returncode == 1 and "was not made by launch/setup.sh: move it away" in result.stderr
    assert (checkout / ".venv" / "precious").exists()


def test_no_network_is_named_and_the_next_run_starts_over(checkout):
    for _ in range(2):
        result = setup(checkout, "cpu")
        assert result.returncode == 1, result.stdout
        assert "network: the package index did not answer" in result.stderr, result.stderr
        assert "UV_DEFAULT_INDEX" in result.stderr
        assert (checkout / ".venv" / ".skyrl-megatron-unfinished").exists()
        assert not (checkout / ".venv" / ".skyrl-megatron-installed").exists()


def test_full_disk_is_named(checkout, tmp_path):
    """A ``df`` that reports a full disk stands in for one: filling the machine's disk is no option."""
    fake = tmp_path / "bin" / "df"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho head\necho x 1 1 1048576 99% /\n")
    fake.chmod(0o755)
    result = setup(checkout, "cpu", PATH=f"{fake.parent}:{os.environ['PATH']}")
    assert result.returncode == 1
    assert "disk: 1 GiB free" in result.stderr and "free some space" in result.stderr
    assert not (checkout / ".venv").exists()
