"""The scripts: they parse, say what they do, and ``setup.sh ci`` installs what is missing and nothing else."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]


def test_run_tests_help():
    done = subprocess.run([ROOT / "launch" / "run_tests.sh", "--help"], capture_output=True, text=True, check=True)
    assert "--fast" in done.stdout and "--te" in done.stdout and "--layouts=all" in done.stdout


def test_setup_help():
    done = subprocess.run([ROOT / "launch" / "setup.sh", "--help"], capture_output=True, text=True, check=True)
    assert "[cpu|gpu|te|ci]" in done.stdout


def debian(tmp_path, installed, **commands):
    """Run debian.sh where dpkg knows ``installed``; ``commands`` stand for the machine's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    commands = {
        "dpkg-query": f'case " {installed} " in *" ${{@: -1}} "*) echo -n installed;; *) exit 1;; esac',
        "apt-get": f'echo "$@" >>{tmp_path}/calls',
        **commands,
    }
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    script = ROOT / "launch" / "requirements" / "debian.sh"
    done = subprocess.run([script], env=env, capture_output=True, text=True, timeout=60)
    calls = tmp_path / "calls"
    return done, calls.read_text() if calls.exists() else ""


LISTED = (ROOT / "launch" / "requirements" / "debian.txt").read_text().splitlines()
PACKAGES = [line for line in LISTED if not line.startswith("#")]


def test_installed_packages_are_left_alone(tmp_path):
    done, calls = debian(tmp_path, " ".join(PACKAGES))
    assert done.returncode == 0 and not calls and not done.stdout


def test_missing_packages_are_installed(tmp_path):
    done, calls = debian(tmp_path, " ".join(PACKAGES[:-1]), id="echo 0")
    assert done.returncode == 0, done.stderr
    assert "update" in calls and calls.rstrip().endswith(f"-y {PACKAGES[-1]}")


def test_without_root_and_sudo_it_says_so(tmp_path):
    done, calls = debian(tmp_path, "", id="echo 1000", sudo="exit 1")
    assert done.returncode == 1 and not calls
    assert "needs root" in done.stderr and PACKAGES[0] in done.stderr


def test_a_failed_install_shows_why(tmp_path):
    done, _ = debian(tmp_path, "", id="echo 0", **{"apt-get": "echo no such package; exit 100"})
    assert done.returncode == 1
    assert "no such package" in done.stderr and "apt-get could not install" in done.stderr
