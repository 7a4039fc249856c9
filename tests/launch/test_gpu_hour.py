"""``launch/gpu_hour.sh``: order, time limits, what is repeated, and the folder that is left at every moment."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.gpu import ladder, report
from tests.gpu.ladder import Rung
from tests.support.processes import given_the_folder, left_behind

ROOT = Path(__file__).parents[2]
FILES = {"summary.md", "results.json", "environment.txt", "logs.txt", "running.log", "records.zip"}
DEADLINE_S = 60


def rungs(*commands, seconds=30, after=()):
    return [Rung(f"rung{n}", ("-c", text), seconds, "", (), after if n else ()) for n, text in enumerate(commands)]


def climb(monkeypatch, folder, chosen, *arguments):
    monkeypatch.setattr(ladder, "RUNGS", tuple(chosen))
    monkeypatch.setattr(ladder, "environment", lambda: "")
    monkeypatch.setattr(ladder, "GRACE_S", 0.5)
    monkeypatch.setattr(ladder, "POLL_S", 0.02)
    monkeypatch.setattr(sys, "argv", ["gpu_hour", "--out", str(folder), *arguments])
    code = ladder.main()
    return code, outcomes_in(folder)


def outcomes_in(folder):
    """Check that the folder is complete, and return the outcomes of the rungs."""
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".new.")} == FILES
    assert len(list(folder.iterdir())) <= 8 and sum(path.stat().st_size for path in folder.iterdir()) < 64 << 20
    with zipfile.ZipFile(folder / "records.zip") as archive:
        assert archive.testzip() is None
    assert "Next: " in (folder / "summary.md").read_text()
    return {name: entry["outcome"] for name, entry in results(folder).items()}


def results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.process
def test_the_hour_continues_past_a_failed_rung_and_resumes(monkeypatch, tmp_path):
    """Figures are kept; what needs the failed rung is left out; what passed is not run again."""
    figures = "print('{\\n  \"GB\": 3\\n}')"
    chosen = [
        *rungs("raise SystemExit(1)", "print(1)", after=("rung0",)),
        *(replace(rung, name=f"other{n}") for n, rung in enumerate(rungs(figures, "import time; time.sleep(60)"))),
    ]
    chosen[-1] = replace(chosen[-1], seconds=1)
    code, outcomes = climb(monkeypatch, tmp_path, chosen)
    expected = {"rung0": "failed", "rung1": "skipped: rung0 failed", "other0": "passed", "other1": "too slow"}
    assert (code, outcomes) == (1, expected)
    assert results(tmp_path)["other0"]["figures"] == {"GB": 3}
    assert "- other0: GB 3" in (tmp_path / "summary.md").read_text()
    assert "Next: mend rung0" in (tmp_path / "summary.md").read_text()
    mended = [replace(chosen[0], command=("-c", "")), chosen[1], replace(chosen[2], command=("-c", "1 / 0"))]
    code, outcomes = climb(monkeypatch, tmp_path, mended, "--minutes", "1")
    assert outcomes | {"other1": ""} == {"rung0": "passed", "rung1": "passed", "other0": "passed", "other1": ""}
    assert climb(monkeypatch, tmp_path, mended, "--again", "--only", "other0")[1]["other0"] == "failed"


@pytest.mark.process
def test_what_proves_nothing_has_not_passed(monkeypatch, tmp_path):
    """It says what this machine lacks, and is no failure."""
    skipped = "print('SKIPPED [3] tests/gpu/conftest.py:58: without te\\n3 skipped in 0.1s')"
    chosen = rungs("print('no GPU: nothing measured')", skipped, "print('1 passed, 2 skipped')")
    expected = {"rung0": "not runnable: no GPU", "rung1": "not runnable: without te", "rung2": "passed"}
    assert climb(monkeypatch, tmp_path, chosen) == (0, expected)
    assert "2 not runnable, 1 passed. Next: nothing" in (tmp_path / "summary.md").read_text()
    with pytest.raises(SystemExit):
        climb(monkeypatch, tmp_path, chosen, "--only", "rung7")


def test_no_rung_starts_without_time(monkeypatch, tmp_path):
    assert climb(monkeypatch, tmp_path, rungs("print(1)"), "--minutes", "0") == (0, {})
    assert "Next: run the same command: rung0 is next" in (tmp_path / "summary.md").read_text()


@pytest.mark.process
def test_the_end_of_the_hour_is_no_fault_of_the_rung(monkeypatch, tmp_path):
    """It is out of time, its own limit was longer; another call resumes it. What needs it is not held back."""
    slow = rungs("import time; time.sleep(60)")
    assert climb(monkeypatch, tmp_path, slow, "--minutes", "0.02") == (0, {"rung0": "out of time"})
    assert "Next: run the same command: rung0 was out of time" in (tmp_path / "summary.md").read_text()
    needing = [*slow, *rungs("", "print(1)", after=("rung0",))[1:]]
    assert climb(monkeypatch, tmp_path, needing, "--only", "rung1")[1]["rung1"] == "passed"
    assert climb(monkeypatch, tmp_path, rungs("print(1)"), "--minutes", "1")[1]["rung0"] == "passed"


@pytest.mark.process
def test_tests_that_passed_are_not_repeated(monkeypatch, tmp_path):
    """Of a rung that failed or was stopped; the next call runs the others alone."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    body = "import pathlib\n\ndef count(name):\n    with (pathlib.Path(__file__).parent / 'ran').open('a') as f:\n"
    body += "        f.write(name)\n\ndef test_a():\n    count('a')\n\ndef test_b():\n    count('b')\n    {b}\n"
    (tmp_path / "test_it.py").write_text(body.format(b="1 / 0"))
    chosen = [Rung("pair", ("-m", "pytest", "-v", "-p", "no:cacheprovider", "test_it.py"), 60, "")]
    assert climb(monkeypatch, tmp_path / "out", chosen)[1] == {"pair": "failed"}
    (tmp_path / "test_it.py").write_text(body.format(b="pass"))
    assert climb(monkeypatch, tmp_path / "out", chosen)[1] == {"pair": "passed"}
    assert (tmp_path / "ran").read_text() == "abb"
    assert [name.rpartition(":")[2] for name in results(tmp_path / "out")["pair"]["tests"]] == ["test_a", "test_b"]


CHILD = "import os, pathlib, subprocess, sys, time; pathlib.Path({pids!r}).write_text(str(os.getpid()) + ' '); "
STARTS = CHILD + "subprocess.Popen([sys.executable, '-c', {ignores!r}]); time.sleep(60)"
IGNORES = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); f = open({pids!r}, 'a'); "
IGNORES += "f.write(str(os.getpid())); f.close(); time.sleep(60)"


def endless(pids):
    """A rung whose child ignores SIGTERM; both write their ids."""
    return STARTS.format(pids=str(pids), ignores=IGNORES.format(pids=str(pids)))


def ended(pids):
    """Wait until the processes are gone."""
    deadline = time.monotonic() + DEADLINE_S
    numbers = [int(number) for number in pids.read_text().split()]
    assert len(numbers) == 2
    while alive := [number for number in numbers if is_running(number)]:
        assert time.monotonic() < deadline, f"{alive} still run"
        time.sleep(0.05)


def is_running(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.process
def test_a_slow_rung_leaves_no_process(monkeypatch, tmp_path):
    pids = tmp_path / "pids"
    chosen = rungs(endless(pids), seconds=6)
    assert climb(monkeypatch, tmp_path / "out", chosen)[1] == {"rung0": "too slow"}
    ended(pids)


PROGRAM = """\
import sys
from tests.gpu import ladder
ladder.RUNGS = tuple(ladder.Rung(f"rung{n}", ("-c", text), 60, "") for n, text in enumerate(COMMANDS))
ladder.environment = lambda: "a machine"
sys.exit(ladder.main())
"""


def start(tmp_path, *commands):
    """The ladder with rungs of these commands, in a process of its own."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("COMMANDS", repr(commands)))
    return subprocess.Popen(
        [sys.executable, str(program), "--out", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.process
def test_the_folder_is_complete_when_the_ladder_is_killed(tmp_path):
    """Killed in the middle of a rung: what passed is kept, the rung's output so far too, and the rung ends as well."""
    pids, out = tmp_path / "pids", tmp_path / "out"
    process = start(tmp_path, "print('{\\n  \"GB\": 3\\n}')", "print('half of it', flush=True); " + endless(pids))
    deadline = time.monotonic() + DEADLINE_S
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    ended(pids)
    assert outcomes_in(out) == {"rung0": "passed", "rung1": "interrupted"}
    assert results(out)["rung0"]["figures"] == {"GB": 3} and "half of it" in (out / "running.log").read_text()
    assert "Next: run the same command: rung1 was interrupted" in (out / "summary.md").read_text()
    assert start(tmp_path, "1 / 0", "print('the rest')").wait(DEADLINE_S) == 0, "rung0 is not run again"
    assert outcomes_in(out) == {"rung0": "passed", "rung1": "passed"}
    assert "the rest" in (out / "logs.txt").read_text() and (out / "running.log").read_text() == ""


@pytest.mark.process
def test_the_folder_is_complete_at_every_moment(monkeypatch, tmp_path):
    """The ladder ends, as if it were killed, at each change of a file: before it and after it."""
    chosen = rungs("print('{\\n  \"GB\": 3\\n}')", "raise SystemExit(3)", "print('no GPU: nothing measured')")
    rename = Path.rename

    class Killed(BaseException):
        pass

    def changes(stop_at):
        seen = 0

        def counted(path, target):
            nonlocal seen
            seen += 1
            if seen == stop_at:
                raise Killed
            rename(path, target)
            if seen == -stop_at:
                raise Killed
            return target

        monkeypatch.setattr(Path, "rename", counted)
        return lambda: seen

    seen = changes(0)
    assert climb(monkeypatch, tmp_path / "whole", chosen)[0] == 1
    count = seen()
    assert count > 20
    for stop in [sign * number for number in range(1, count + 1) for sign in (1, -1)]:
        out = tmp_path / f"stopped{stop}"
        changes(stop)
        with pytest.raises(Killed):
            climb(monkeypatch, out, chosen)
        monkeypatch.setattr(Path, "rename", rename)
        before = outcomes_in(out) if out.exists() else "the folder appears as a whole"
        assert climb(monkeypatch, out, chosen) == (
            1,
            {"rung0": "passed", "rung1": "failed", "rung2": "not runnable: no GPU"},
        ), before
        assert not list(out.glob(".new.*"))


@pytest.mark.process
@pytest.mark.parametrize(("name", "processes"), [("moves", 1), ("exchange", 3), ("recompute", 2)])
def test_the_folder_is_complete_when_a_measurement_is_killed(tmp_path, name, processes):
    """What a rung has started ends with the ladder too: its ranks, and the runs that it compares."""
    out, variables = tmp_path / "out", os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.gpu.ladder", "--smoke", "--only", name, "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE_S
    while len(started := psutil.Process(process.pid).children(recursive=True)) <= processes:  # and the rung's shell
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    assert outcomes_in(out) == {name: "interrupted"}
    assert not left_behind([*started, *given_the_folder(tmp_path)], within_s=DEADLINE_S)


@pytest.mark.process
def test_the_folder_stays_small(monkeypatch, tmp_path):
    """However much a rung prints or records."""
    monkeypatch.setattr(report, "RECORD_BYTES", 1 << 20)
    monkeypatch.setattr(report, "RECORDS_BYTES", 2 << 20)
    prints = "import os, time\nfor n in range(3):\n"
    prints += "    while os.fstat(1).st_size < 5 << 20:\n        os.write(1, b'x' * 99999)\n"
    prints += "    while os.fstat(1).st_size > 1 << 20:\n        time.sleep(0.02)\n"
    records = "import os, pathlib\nw = pathlib.Path({work!r})\n"
    records += "for n, name in enumerate(('forward_backward_0.json.gz', 'forward_backward_1.json.gz',"
    records += " 'optim_step_1.json.gz', '1.pickle')):\n    (w / name).write_bytes(os.urandom((n + 1) * 300_000))\n"
    records += "(w / 'console.log').write_text('y' * 1_000_000 + 'last')\nraise SystemExit(1)"
    chosen = rungs(prints, records.format(work="{work}"))
    assert climb(monkeypatch, tmp_path, chosen)[1] == {"rung0": "passed", "rung1": "failed"}
    assert (tmp_path / "logs.txt").stat().st_size < 500_000
    with zipfile.ZipFile(tmp_path / "records.zip") as archive:
        files = ["forward_backward_1.json.gz", "optim_step_1.json.gz", "console.log"]  # the snapshot is too large
        assert archive.namelist() == [f"rung1/{name}" for name in files]
        assert archive.read("rung1/console.log").endswith(b"ylast")


def test_rungs_name_files_and_rungs_that_there_are():
    names = [rung.name for rung in ladder.RUNGS]
    assert len(set(names)) == len(names)
    for rung in ladder.RUNGS:
        assert set(rung.after) <= set(names[: names.index(rung.name)]), f"{rung.name} comes before what it needs"
        files = [part for part in rung.command if part.endswith(".py")]
        assert files and all((ROOT / part).is_file() for part in files), rung.command
    tested = {part for rung in ladder.RUNGS for part in rung.command if part.startswith("tests/gpu/test_")}
    assert tested == {str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")}
