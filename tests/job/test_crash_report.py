"""What the terminal shows of a process that is ended without a word."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import os, sys
from pathlib import Path
from skyrl_megatron.entrypoints.crash_report import crash_reporter
with crash_reporter(Path({log!r}), 2):
    {end}
"""


def ended(tmp_path, end, last="the last thing"):
    (tmp_path / "log").write_text(f"earlier\n{last}\n\n")
    script = SCRIPT.format(log=str(tmp_path / "log"), end=end)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("end", "code"), [("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("os._exit(3)", 3)], ids=["killed", "exited"]
)
def test_it_is_told(tmp_path, end, code):
    done = ended(tmp_path, end)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert "was killed, or ended by a library" in line and "the last thing; the same command continues" in line


def test_a_head_that_hangs_is_named(tmp_path):
    said = "[E 4897] rpc_client.h:204: Failed to connect to GCS within 60 seconds. GCS may have been killed."
    (line,) = ended(tmp_path, "os._exit(1)", said).stderr.splitlines()
    assert line.startswith("Ray's head (gcs_server) does not answer any more") and "the same command continues" in line


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("sys.exit('an error of its own')", 1)], ids=["done", "error"])
def test_nothing_is_added(tmp_path, end, code):
    done = ended(tmp_path, end)
    assert done.returncode == code
    assert done.stderr.strip() == ("an error of its own" if code else "")
