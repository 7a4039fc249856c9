"""Ctrl-C, SIGTERM and SIGHUP of a command: one sentence, exit code 130 or 143, and nothing left."""

import contextlib
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.processes import left_behind

pytestmark = pytest.mark.process

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
every_signal = pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)


@pytest.fixture(autouse=True)
def hangups_end_processes():
    """As under a terminal: where these tests run under ``nohup``, processes inherit that SIGHUP is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@every_signal
@pytest.mark.parametrize("module", ["skyrl_megatron_tools.embedded.run_moe", "skyrl_megatron.entrypoints.main_base"])
def test_while_a_command_imports(number, module):
    command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "skyrl_megatron.workers" in line:
                break
        process.send_signal(number)
        said = [line for line in process.stderr.read().splitlines() if not line.startswith("import time:")]
    assert (process.returncode, said) == (CODES[number], ["interrupted"])


WORKS = """
import os, subprocess, sys, time
from skyrl_megatron import interrupts
from skyrl_megatron.command import run_command
interrupts.END_S = {end_s}

def work():
    try:
        child = subprocess.Popen(["sleep", "1000"])
        print(child.pid, flush=True)
        time.sleep(1000)
    finally:
        print("ends", flush=True)
        {ends}
        child.kill()
        child.wait()
        print("ended", flush=True)

sys.exit(run_command(lambda: run_command(work)))  # as commands that run others do
"""


@contextlib.contextmanager
def working(ends="pass", end_s=50.0, **options):
    """A command at work, and the process that it started."""
    program = WORKS.format(ends=ends, end_s=end_s)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield process, psutil.Process(int(process.stdout.readline()))
        finally:
            process.kill()


@every_signal
def test_the_first_signal_ends_a_command(number):
    with working() as (process, child):
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (CODES[number], "ends\nended\n", "interrupted\n")
    assert not left_behind([child])


@every_signal
def test_more_signals_do_not_break_off_the_end(number):
    """What is given back while the command ends is given back whole."""
    with working("time.sleep(0.5)") as (process, child):
        process.send_signal(number)
        assert process.stdout.readline() == "ends\n"
        for again in CODES:
            process.send_signal(again)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (CODES[number], "ended\n", "interrupted\n")
    assert not left_behind([child])


def test_an_end_that_hangs_is_made_short():
    with working("time.sleep(1000)", end_s=0.5) as (process, child):
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (143, "interrupted; killed the processes that did not end within 0.5 s\n")
    assert not left_behind([child])


DROPPED = """
import ctypes, os, signal, sys, time
from skyrl_megatron.command import run_command

def signal_itself():
    os.kill(os.getpid(), {number})
    time.sleep(0.2)

def dropped():
    ctypes.CFUNCTYPE(None)(signal_itself)()  # C code prints the exception and drops it

def replaced():
    try:
        signal_itself()
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None

def work():
    try:
        {way}()
        time.sleep(1000)
    finally:
        for _ in range(20):
            try:
                raise ValueError
            except ValueError:
                time.sleep(0.1)
        print("ended", flush=True)

sys.exit(run_command(work))
"""


@every_signal
@pytest.mark.parametrize("way", ["dropped", "replaced"])
def test_code_that_drops_or_replaces_the_exception(number, way):
    """Ray does both. The end itself is not broken off."""
    script = DROPPED.format(number=int(number), way=way)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if line == "interrupted"]
    assert (done.returncode, done.stdout, len(said)) == (CODES[number], "ended\n", 1), done.stderr
    assert ("Exception ignored" in done.stderr) == (way == "dropped")


AFTER_RAY = """
import os, signal, sys, time
from skyrl_megatron.command import run_command
from skyrl_megatron.workers.ray_setup import local_ray

def work():
    with local_ray(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)

sys.exit(run_command(work))
"""


def test_sigterm_after_ray_has_ended():
    """Ray's core worker sets the default action of SIGTERM when it ends."""
    done = subprocess.run([sys.executable, "-c", AFTER_RAY], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (143, ["interrupted"]), done.stderr


def test_a_command_under_nohup_does_not_notice_that_its_terminal_is_gone():
    with working(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as (process, _):
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (143, "interrupted\n")


STEPS = """
import os, sys, time
from skyrl_megatron.command import run_command
from skyrl_megatron.trainer.stopping import StopSignal

def work():
    stop = StopSignal()
    with stop:
        stop.waits = {waits}
        try:
            while True:
                stop.check()
                print("step", flush=True)
                {step}
        finally:
            print("saved", flush=True)

sys.exit(run_command(work))
"""


@contextlib.contextmanager
def stepping(step="time.sleep(0.01)", *, waits=True):
    program = STEPS.format(step=step, waits=waits)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "step\n"
            yield process
        finally:
            process.kill()


@every_signal
def test_steps_end_after_the_one_in_work(number):
    """The run prints what became of it: the command adds no other sentence."""
    with stepping() as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out.splitlines()[-1], err) == (CODES[number], "saved", "")


@every_signal
def test_the_second_signal_ends_a_step(number):
    with stepping("time.sleep(1000)") as process:
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (CODES[number], "saved\n", "interrupted\n")


def test_before_the_first_step_one_signal_is_enough():
    with stepping("time.sleep(1000)", waits=False) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (143, "saved\n", "interrupted\n")
