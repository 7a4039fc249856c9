"""Environments of other packages: our score of an answer is the package's own, and one error says what to install."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-environments"


@pytest.mark.process
@pytest.mark.parametrize("name", ["reasoning_gym", "verifiers", "openenv", "nemo_gym", "harbor"])
def test_scores_are_those_of_the_package(tmp_path, name):
    if not (VENV / "installed.txt").is_file():
        pytest.skip("the packages are not installed: launch/requirements/environments.sh")
    python = VENV / {"nemo_gym": "nemo-gym", "harbor": "harbor"}.get(name, "texts") / "bin" / "python"
    done = subprocess.run(
        [python, Path(__file__).with_name("packages_run.py"), name, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0 and done.stdout.endswith("PASSED\n"), done.stderr


@pytest.mark.parametrize("id", ["reasoning-gym:maze", "verifiers:wordle", "openenv:http://127.0.0.1:1"])
def test_a_missing_package_is_one_error(id):
    from skyrl_megatron.envs import base_text_env as registry
    from skyrl_megatron.errors import DataError

    package = id.partition(":")[0]
    if importlib.util.find_spec(package.replace("-", "_")) is not None:
        pytest.skip(f"{package} is installed here")
    with pytest.raises(DataError, match=f"need the package: .*pip install .*{package}$"):
        registry.require([id])


def test_ids_of_packages_have_a_name():
    from skyrl_megatron.envs import make, spec
    from skyrl_megatron.errors import DataError

    assert spec("nemo-gym:http://a:1").kwargs == {"name": "http://a:1"}
    for id in ("nemo-gym", "nemo-gym:", "no-such-package:x"):
        with pytest.raises(DataError, match=r"no environment|needs a name"):
            make(id)
