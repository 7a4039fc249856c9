"""Every mutation applies to the code as it is, and the tests that it names notice it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.mutations import MUTATIONS
from tests.mutations.mutation import LIMIT_S, ROOT, Mutation

AREAS = (
    *("algorithms", "data", "config", "runtime", "weight_sync", "inference", "rollout", "envs", "trainer", "workers"),
    *(
        "sources",
        "skyrl_megatron_agents",
        "skyrl_megatron_observe",
        "skyrl_megatron_parts",
        "skyrl_megatron_supervised",
    ),
    *("skyrl_megatron_supervised", "skyrl_megatron_tools"),
)


def command(*arguments):
    return [sys.executable, "-m", "tests.mutations", *arguments]


def test_there_are_enough_in_every_area():
    files = [mutation.file for mutation in MUTATIONS]
    assert len(files) >= 60 and len({mutation.name for mutation in MUTATIONS}) == len(files)
    folders = [area if area.startswith("skyrl") else f"skyrl_megatron/{area}" for area in AREAS]
    assert not [folder for folder in folders if not any(file.startswith(f"{folder}/") for file in files)]
    assert any(file.startswith("bridges/") for file in files)


def mistakes(mutation):
    """What is wrong with an entry: it no longer applies, is no code, or names a test that there is not."""
    text = (ROOT / mutation.file).read_text()
    found = [f"{mutation.old!r} occurs {text.count(mutation.old)} times"] if text.count(mutation.old) != 1 else []
    if "\n" in mutation.old + mutation.new or mutation.old == mutation.new or not mutation.why:
        found.append("is no change of one line with a reason")
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    for node in mutation.tests:
        file, _, function = node.partition("::")
        if not (ROOT / file).is_file():
            found.append(f"there is no {file}")
        elif function and not re.search(rf"^def {function.partition('[')[0]}\(", (ROOT / file).read_text(), re.M):
            found.append(f"there is no {node}")
    return found


def test_every_mutation_applies_and_names_tests_that_there_are():
    wrong = {mutation.name: found for mutation in MUTATIONS if (found := mistakes(mutation))}
    assert not wrong, wrong


def test_a_stale_entry_is_noticed():
    stale = Mutation("stale", "skyrl_megatron/algorithms/kl.py", "a line of old", "pass", ("tests/gone.py",), "why")
    assert mistakes(stale) == ["'a line of old' occurs 0 times", "there is no tests/gone.py"]
    assert stale.applied("two\ntwo\n") is None


@pytest.mark.process
def test_a_mutation_that_nothing_notices_is_an_error(tmp_path):
    """Of three on a small tree: one is noticed, one is not, one has a test that cannot be collected."""
    from tests.mutations.mutation import judge

    (tmp_path / "0").mkdir()
    tree = tmp_path / "0"
    text = (ROOT / "skyrl_megatron/progress.py").read_text()
    (tree / "skyrl_megatron").mkdir()
    (tree / "skyrl_megatron/progress.py").write_text(text)
    (tree / "test_it.py").write_text(
        "from pathlib import Path\n\n"
        "def test_it():\n    assert 'annotations' in Path('skyrl_megatron/progress.py').read_text()\n"
    )
    (tree / "test_broken.py").write_text("import a_module_that_is_not_there\n")
    old, file = "from __future__ import annotations", "skyrl_megatron/progress.py"
    outcomes = [
        judge(Mutation("m", file, old, new, (test,), "why"), tree)[0]
        for new, test in (("pass", "test_it.py"), (f"{old}  # no more", "test_it.py"), ("pass", "test_broken.py"))
    ]
    assert outcomes == ["caught", "survived", "no verdict: pytest ended with 2"]
    assert judge(Mutation("m", file, "no such line", "", ("test_it.py",), "why"), tree)[0] == "does not apply"
    assert (tree / file).read_text() == text and sorted(path.name for path in tmp_path.iterdir()) == ["0"]


@pytest.mark.process
def test_an_interrupt_leaves_nothing(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.Popen(
        command("--only", MUTATIONS[0].name), cwd=ROOT, env=environment, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it in the background
    )  # fmt: skip
    try:
        while not list(tmp_path.glob("mut-*/0t")):  # pytest starts
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        assert run.wait() != 0
    finally:
        run.kill()
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.full_matrix
@pytest.mark.one_in(12)
@pytest.mark.timeout(LIMIT_S + 300)
@pytest.mark.parametrize("name", [mutation.name for mutation in MUTATIONS])
def test_it_is_caught(name):
    run = subprocess.run(command("--only", name), cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.startswith("caught "), run.stdout[-4000:] + run.stderr[-2000:]
