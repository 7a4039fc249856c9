"""Engines' processes end with the process that started them, however that ends."""

import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.processes import left_behind

pytestmark = pytest.mark.process

OWNER = """
import os, time
from skyrl_megatron.inference.vllm.processes import OwnedContext
if __name__ == "__main__":
    context = OwnedContext()
    ready = context.Event()
    child = context.Process(target=ready.wait, args=(1000,))
    child.start()
    print(child.pid, flush=True)
    {end}
"""
ENDS = {
    "killed": "os.kill(os.getpid(), 9)",
    "a library ends it": "os._exit(3)",
    "exception": "raise ZeroDivisionError",
    "terminated": "os.kill(os.getpid(), 15)",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_spawned_process_ends_with_its_owner(tmp_path, end):
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(end=ENDS[end]))
    variables = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=variables) as owner:
        child = psutil.Process(int(owner.stdout.readline()))
        if end == "exception":
            owner.send_signal(signal.SIGKILL)  # multiprocessing would wait for its children
    assert not left_behind([child])


ENGINE = """
import os, tempfile
from pathlib import Path
from skyrl_megatron.workers.engines import _start_tracker
from skyrl_megatron.inference.vllm.processes import use_private_temporary_folder
folder = use_private_temporary_folder()
_start_tracker(folder)
assert tempfile.gettempdir() == folder and os.stat(folder).st_mode & 0o777 == 0o700
Path(folder, "socket").touch()
print(folder, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_temporary_folder_of_an_engine_goes_with_its_last_process(tmp_path):
    variables = os.environ | {"TMPDIR": "/tmp"}
    done = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, timeout=300, env=variables)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.time() + 300
    while os.path.exists(done.stdout.strip()):
        assert time.time() < deadline
        time.sleep(0.05)


def test_sockets_are_in_a_short_folder_if_the_users_is_long(tmp_path, monkeypatch):
    """vLLM, which takes its folder from ``TMPDIR``, can bind them there."""
    import socket
    import tempfile

    from skyrl_megatron.inference.vllm.processes import use_private_temporary_folder

    long = tmp_path / ("a" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(long / "kernels"))
    folder = use_private_temporary_folder()
    assert folder.startswith("/tmp/") and os.stat(folder).st_mode & 0o777 == 0o700
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == folder and not list(long.iterdir())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/{'0' * 36}")
    shutil.rmtree(folder)
