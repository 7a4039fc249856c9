"""launch/setup.sh on bad ground: each failure is one line that names the thing and the fix, and can be repeated."""

import os
import shutil
import subprocess
import sys
import sysconfig
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
    asked = "source .venv/bin/activate && command -v python"
    found = subprocess.run(["bash", "-c", asked], cwd=checkout, capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(checkout / ".venv/bin/python"), "it can be activated"


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


@pytest.fixture
def installed(checkout, tmp_path):
    """A ``uv`` on PATH that notes what it is asked for in ``calls`` and installs nothing: packages are this test
    run's. Without an index nothing can be installed; what is asked for, and in which order, is setup.sh's part."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    calls = tmp_path / "calls"
    uv.write_text(
        f"""#!/bin/sh
echo "$*" >>{calls}
case "$*" in *" -r "*) grep -c '^transformer-engine-torch' "${{@: -1}}" >>{calls} || true ;; esac
case "$*" in *transformer-engine-torch*)
  echo "cache=$UV_CACHE_DIR force=$NVTE_PYTORCH_FORCE_BUILD cuda=$CUDA_HOME" >>{calls}
  if [ -n "$BUILD_FAILS" ]; then echo "fatal error: cuda.h: no such file, as the network timed out"; exit 1; fi ;;
esac
""".replace("#!/bin/sh", "#!/bin/bash")
    )
    uv.chmod(0o755)
    site = Path(sysconfig.get_paths()["purelib"])
    environment = {
        "PATH": f"{uv.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{site}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    return environment, calls


def test_the_last_line_says_what_is_where_and_what_comes_next(checkout, installed):
    """Also where nothing is to be done; scripts that make sure of an environment say nothing then."""
    environment, calls = installed
    result = setup(checkout, "cpu", **environment)
    assert result.returncode == 0, result.stderr
    where = f"{checkout}/.venv has the cpu packages of launch/requirements/cpu.txt; next: launch/doctor.sh"
    assert result.stdout.splitlines()[-1].startswith(f"setup: done: {where}")
    asked = calls.read_text()
    again = setup(checkout, "cpu", **environment)
    assert again.returncode == 0 and again.stdout.startswith(f"setup: nothing to do: {where}"), again
    assert again.stdout.count("\n") == 1 and calls.read_text() == asked
    quiet = setup(checkout, "--quiet", "cpu", **environment)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_transformer_engine_is_built_last_with_the_torch_that_is_there(checkout, installed):
    """And an environment that lacks it is none: nothing falls back to slower layers in silence."""
    import torch

    environment, calls = installed
    result = setup(checkout, "gpu", **environment)
    lines = calls.read_text().splitlines()
    built = next(place for place, line in enumerate(lines) if "transformer-engine-torch==" in line)
    assert "--no-build-isolation" in lines[built] and "--no-deps" in lines[built]
    assert any(" -r " in line for line in lines[:built]) and "0" in lines[:built], lines
    assert f"torch{torch.__version__}-cp" in lines[built + 1] and "force=TRUE" in lines[built + 1]
    assert result.returncode == 1, result.stdout
    assert "import transformer_engine.pytorch: ModuleNotFoundError" in result.stderr
    assert "the environment is not whole" in result.stderr
    assert not (checkout / ".venv" / ".skyrl-megatron-installed").exists()


def test_a_failed_build_is_no_network_error(checkout, installed):
    environment, _ = installed
    result = setup(checkout, "gpu", BUILD_FAILS="1", **environment)
    assert result.returncode == 1
    assert "cuda.h: no such file" in result.stderr and "transformer-engine-torch==" in result.stderr
    assert "did not build with torch" in result.stderr and "package index" not in result.stderr


def test_no_compiler_is_named_before_anything_is_installed(checkout, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in os.listdir("/usr/bin"):
        if name not in ("c++", "uv"):
            (folder / name).symlink_to(f"/usr/bin/{name}")
    result = setup(checkout, "gpu", PATH=str(folder))
    assert result.returncode == 1
    assert "no C++ compiler" in result.stderr and "apt install g++" in result.stderr
    assert not (checkout / ".venv").exists()
