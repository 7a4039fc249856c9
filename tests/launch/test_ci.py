"""Each part of ``.ci/run`` on a copy of what it reads: green as it is, red with a planted fault."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import groupby
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
TYPED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
BIN = Path(sys.prefix) / "bin"
LIGHT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin -p pytest_timeout"}
OFFLINE = {"UV_OFFLINE": "1", "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null"}


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    (folder / ".venv/bin").mkdir(parents=True)
    copy(folder, ".ci/run")
    return folder


def copy(checkout, *paths):
    """Copy files and folders of the repository."""
    for path in paths:
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, checkout / path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, checkout / path)


def write(checkout, path, text, mode="w"):
    (checkout / path).parent.mkdir(parents=True, exist_ok=True)
    with (checkout / path).open(mode) as file:
        file.write(text)


def use_tools(checkout, *names):
    """Let the copy use tools of this environment; skips the test without one of them."""
    for name in names:
        if not (BIN / name).exists():
            pytest.skip(f"no {name}: run .ci/run environment linters")
        write(checkout, f".venv/bin/{name}", f'#!/bin/sh\nexec "{BIN / name}" "$@"\n')
        (checkout / f".venv/bin/{name}").chmod(0o755)


def make_environment(checkout):
    """Make an empty environment of the copy's own, for parts that install into it, and let it use this one's uv."""
    shutil.rmtree(checkout / ".venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True)
    if shutil.which("uv") is None:
        (checkout / ".venv/tools").symlink_to(Path(sys.prefix) / "tools")


def ci(checkout, *parts, **environment):
    """Run parts of the copy's ``.ci/run``, as a CI does: without a terminal, and for the exit code."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAY_"))}
    done = subprocess.run(
        [checkout / ".ci/run", *parts],
        cwd=checkout.parent,
        env=env | {"CI": "true"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    return done.returncode, done.stdout


def green(checkout, *parts, **environment):
    code, out = ci(checkout, *parts, **environment)
    assert code == 0, out


def red(checkout, *parts, said, **environment):
    code, out = ci(checkout, *parts, **environment)
    assert code != 0 and said in out, out


def test_every_part_has_a_test_here():
    listed = subprocess.run([ROOT / ".ci/run", "--help"], capture_output=True, text=True, check=True).stdout
    parts = listed.splitlines()[1].split()
    assert parts[-1] == "tests"  # whose closing line a CI reads
    assert set(parts) == {
        name.split("_")[1] for name in globals() if name.startswith("test_") and name.endswith("part")
    }


def test_unknown_names(checkout):
    red(checkout, "lint", "typos", said="no part 'typos': environment linters")


def test_a_failure_ends_the_run(checkout):
    """Its code is that of the run, and no later part hides it."""
    copy(checkout, "pyproject.toml")
    use_tools(checkout, "ruff")
    write(checkout, "bad.py", "import os\n")
    code, out = ci(checkout, "lint", "format")
    assert code == 1 and "--- lint: 0 min" in out and ", failed" in out and "--- format" not in out


def test_environment_part(checkout):
    copy(checkout, "launch/setup.sh", "launch/requirements", "pyproject.toml")
    red(checkout, "environment", said=".venv was not made by launch/setup.sh", PYTHON=sys.executable, **OFFLINE)


def test_linters_part(checkout):
    copy(checkout, "launch/requirements/lint.sh")
    make_environment(checkout)
    write(checkout, "launch/requirements/lint.txt", "")
    green(checkout, "linters", **OFFLINE)
    write(checkout, "launch/requirements/lint.txt", "no-such-linter==1.0\n")
    red(checkout, "linters", said="no-such-linter", **OFFLINE)


def test_trackers_part(checkout):
    copy(checkout, "launch/requirements/trackers.sh", "launch/requirements/templates.sh")
    make_environment(checkout)
    write(checkout, ".venv-templates/installed.txt", (ROOT / "launch/requirements/templates.sh").read_text())
    for path in ("launch/requirements/trackers.txt", ".venv-trackers/installed.txt"):
        write(checkout, path, "no-such-tracker==1.0\n")
    green(checkout, "trackers", **OFFLINE)
    (checkout / ".venv-trackers/installed.txt").unlink()
    red(checkout, "trackers", said="no-such-tracker", **OFFLINE)
    write(checkout, ".venv-trackers/installed.txt", "no-such-tracker==1.0\n")
    (checkout / ".venv-templates/installed.txt").unlink()
    red(checkout, "trackers", said="trl", **OFFLINE)


def test_lint_part(checkout):
    copy(checkout, "pyproject.toml", "skyrl_megatron/errors.py")
    use_tools(checkout, "ruff")
    green(checkout, "lint")
    write(checkout, "skyrl_megatron/errors.py", "import json\n", "a")
    red(checkout, "lint", said="F401")


def test_format_part(checkout):
    copy(checkout, "pyproject.toml", "skyrl_megatron/errors.py")
    use_tools(checkout, "ruff")
    green(checkout, "format")
    write(checkout, "skyrl_megatron/errors.py", "a = { 'b':1 }\n", "a")
    red(checkout, "format", said="1 file would be reformatted")


@pytest.mark.parametrize("part", TYPED)
def test_types_part(checkout, part):
    copy(checkout, "pyproject.toml")
    use_tools(checkout, "mypy")
    files = {name: name if name.endswith(".py") else f"{name}/sums.py" for name in TYPED}
    for file in files.values():
        write(checkout, file, "def total(numbers: list[int]) -> int:\n    return sum(numbers)\n")
    green(checkout, "types")
    write(checkout, files[part], "\n\ndef untyped(numbers):\n    return numbers\n", "a")
    red(checkout, "types", said="no-untyped-def")


def test_documentation_part(checkout):
    if not (ROOT / ".venv-docs/.installed").exists():
        pytest.skip("no .venv-docs: run launch/docs.sh")
    kept = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    copy(checkout, *(path for path in kept.split("\0") if path and not path.startswith("tests/data/")))
    copy(checkout, "tests/data/trained_answers.json")  # of which a page is made
    (checkout / ".venv-docs").symlink_to(ROOT / ".venv-docs")
    use_tools(checkout, "python")  # which writes the pages that git ignores
    if shutil.which("uv") is None:
        (checkout / ".venv/tools").symlink_to(Path(sys.prefix) / "tools")
    green(checkout, "documentation")
    write(checkout, "docs/stray.md", "# In no navigation\n")
    red(checkout, "documentation", said="stray.md")
    write(checkout, "docs/first-run.md", "\n![A picture](https://example.org/picture.png)\n", "a")
    (checkout / "docs/stray.md").unlink()
    red(checkout, "documentation", said="these pages load something from elsewhere")


def test_scripts_part(checkout):
    copy(checkout, "docker", "launch")
    use_tools(checkout, "shellcheck", "hadolint")
    green(checkout, "scripts")
    write(checkout, "launch/slurm/new.sh", "#!/bin/bash\nrm $1\n")
    red(checkout, "scripts", said="SC2086")
    (checkout / "launch/slurm/new.sh").unlink()
    write(checkout, "docker/Dockerfile.new", "FROM debian\n")
    red(checkout, "scripts", said="DL3006")


GOOD = """
import subprocess, sys
import pytest

def test_fast():
    pass

@pytest.mark.process
def test_slow():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.mark.full_matrix
@pytest.mark.parametrize("layout", ["tp2", "pp2", "ep2"])
def test_matrix(layout):
    pass
"""
FAULTS = {
    "a fast test fails": (("def test_fast():\n    pass", "def test_fast():\n    assert 1 > 2"), "assert 1 > 2"),
    "a slow test fails": (("import subprocess, sys", "import subprocess, sys; sys.executable = 'no'"), "1 failed"),
    "a test of the matrix fails": (("(layout):\n    pass", "(layout):\n    assert layout < 'pp'"), "assert 'tp2'"),
    "no test of the matrix": (("full_matrix", "process"), "full_matrix"),
    "no fast test": (("def test_fast", "def fast"), "parts of which no test ran"),
    "all fast tests skip": (("def test_fast():\n    pass", "def test_fast():\n    pytest.skip('no GPU')"), "fast"),
    "no test at all": (("def test_", "def check_"), "no tests ran"),
    "a fast test starts a process": (("@pytest.mark.process", ""), "mark this test pytest.mark.process: it starts"),
    "a process dies": (("def test_fast():\n    pass", "def test_fast():\n    import os\n    os._exit(0)"), "crashed"),
    "a module does not load": (("import pytest\n", "import pytest\nimport no_such_module\n"), "no_such_module"),
    "a module loads ray": (("import pytest\n", "import pytest\nimport ray\n"), "loads ray at collection"),
}


@pytest.fixture
def suite(checkout):
    """A copy with the suite's options and one test of each part."""
    copy(checkout, "pyproject.toml", "launch/run_tests.sh", "tests/conftest.py", "tests/__init__.py", "tests/support")
    for path in (checkout / "tests/support").glob("test_*.py"):
        path.unlink()
    write(checkout, "launch/setup.sh", "#!/bin/sh\n")  # the environment is a part of its own
    (checkout / "launch/setup.sh").chmod(0o755)
    use_tools(checkout, "python")
    write(checkout, "tests/test_parts.py", GOOD)
    write(checkout, "ray/__init__.py", "")  # found before the real one, which takes seconds
    git = ["git", "-C", checkout, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "one"], check=True)
    return checkout


def test_tests_part(suite):
    code, out = ci(suite, "tests", **LIGHT)
    assert code == 0, out
    assert "5 passed in" in out.splitlines()[-1], out


@pytest.mark.parametrize("fault", FAULTS)
def test_tests_part_with(suite, fault):
    (old, new), said = FAULTS[fault]
    assert old in GOOD
    write(suite, "tests/test_parts.py", GOOD.replace(old, new))
    red(suite, "tests", said=said, **LIGHT)


def test_tests_part_without_a_repository(suite):
    """The number of commits chooses the tests of the matrix: without it none would be chosen silently."""
    shutil.rmtree(suite / ".git")
    red(suite, "tests", said="not a git repository", GIT_CEILING_DIRECTORIES=str(suite.parent))


MODULES = {
    "test_pool_short.py": "import pytest\n\n@pytest.fixture\ndef ranks(): pass\n\ndef test_1(ranks): pass\n",
    "test_pool_long.py": "import pytest\n\n@pytest.fixture\ndef ranks(): pass\n\ndef test_1(ranks): pass\n",
    "test_long.py": "def test_1(): pass\n",
    "test_short.py": "def test_1(): pass\n",
}


def run_tests(checkout, *arguments):
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | LIGHT
    command = [checkout / "launch/run_tests.sh", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_workers_start_at_both_ends_and_take_the_matrix_last(suite):
    for name, text in MODULES.items():
        write(suite, f"tests/{name}", text)
    seconds = {
        "tests/test_pool_short.py": 1,
        "tests/test_pool_long.py": 9,
        "tests/test_long.py": 8,
        "tests/test_short.py": 1,
    }
    write(suite, "tests/durations.json", json.dumps(seconds))
    out = run_tests(suite, "-v", "--layouts=all", "--record-durations")
    ran = re.findall(r"^\[(gw\d)\].* PASSED tests/([\w:.]+)", out, re.MULTILINE)
    first = {worker: test for worker, test in reversed(ran)}
    assert first == {"gw0": "test_pool_long.py::test_1", "gw1": "test_long.py::test_1"}, out
    assert "9 passed in" in out.splitlines()[-1]
    for worker in ("gw0", "gw1"):  # each on its own: one may be busy when the other takes the matrix
        matrix = ["test_matrix" in test for by, test in ran if by == worker]
        assert matrix == sorted(matrix), out
    recorded = json.loads((suite / "tests/durations.json").read_text())
    assert recorded.keys() == {f"tests/{name}" for name in (*MODULES, "test_parts.py")}


def test_a_matrix_that_does_not_fit_says_when_it_comes_round(suite):
    write(
        suite, "tests/test_parts.py", GOOD.replace("(layout):\n    pass", "(layout):\n    import time; time.sleep(1)")
    )
    out = run_tests(suite, "--layouts=all", "--rotate=5", "--matrix-minutes=0.001", "--every-part")
    assert re.search(
        r"^[12] of 3 tests in the given time\nat this pace [36] changes reach all of it", out, re.MULTILINE
    ), out


def test_random_orders_differ_and_keep_modules_together(suite):
    for module in "abcd":
        write(suite, f"tests/test_{module}.py", "".join(f"def test_{i}(): pass\n" for i in range(5)))
    orders = []
    for seed in (1, 1, 2):
        out = run_tests(suite, "-v", f"--order-seed={seed}", "tests")
        orders.append(re.findall(r"^tests/(\w+.py)::(\w+) PASSED", out, re.MULTILINE))
        assert len(list(groupby(module for module, _ in orders[-1]))) == 5
    assert orders[0] == orders[1] and sorted(orders[0]) == sorted(orders[2]) and orders[0] != orders[2]


def test_a_handler_made_while_stderr_is_captured_outlives_the_capture(suite):
    """As transformers makes one at import: it must not depend on which test imports it first."""
    text = """
import logging, sys

def test_first(capsys):
    logging.getLogger("library").addHandler(logging.StreamHandler())

def test_second(capsys):
    logging.getLogger("library").warning("said")
    assert "Logging error" not in capsys.readouterr().err
"""
    write(suite, "tests/test_handlers.py", text)
    run_tests(suite, "tests/test_handlers.py")
