"""The fork server: its processes are as if they had been started anew, end with those that asked for them, and come
from one that has imported everything and touched no GPU."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from skyrl_megatron import fork_server

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
IMPORTS_NEXT_TO_NOTHING = "gc:collect"
FACTS = """
import json, os, resource, signal, sys
print("to stderr", file=sys.stderr)
facts = {
    "arguments": sys.argv[1:], "stdin": sys.stdin.readline(), "folder": os.getcwd(), "name": __name__,
    "environment": dict(os.environ), "nofile": resource.getrlimit(resource.RLIMIT_NOFILE), "umask": os.umask(0),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "nice": os.nice(0),
    "first": open("/proc/self/oom_score_adj").read(), "interrupt": str(signal.getsignal(signal.SIGINT)),
    "script": sys.argv[0], "group": os.getpgid(0), "threads": __import__("torch").get_num_threads(),
}
print(json.dumps(facts))
sys.exit(7)
"""


@pytest.fixture
def server():
    started = fork_server.ForkServer.start(IMPORTS_NEXT_TO_NOTHING, os.environ)
    yield started
    started.stop()
    assert not started.is_alive()


def program(folder, text):
    """A script of these lines."""
    path = folder / "program.py"
    path.write_text(text)
    return path


def started(server, script, *arguments, serving=False, **options):
    """The command of a forked process, as Ray starts it: by a shell that it takes the place of."""
    command = fork_server.command(server, serving=serving)
    line = f"exec {command} {shlex.join(map(str, (script, *arguments)))}"
    return subprocess.Popen(["bash", "-c", line], stdout=subprocess.PIPE, text=True, **options)


def until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def line_of(process):
    return json.loads(process.stdout.readline())


def test_a_program_is_as_if_it_had_been_started_anew(server, tmp_path):
    import resource

    def differs():
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 600))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        os.umask(0o27)
        os.nice(1)
        Path("/proc/self/oom_score_adj").write_text("500")

    script = program(tmp_path, FACTS)
    options = {
        "env": os.environ | {"A_VARIABLE": "of the asking process"},
        "cwd": tmp_path,
        "preexec_fn": differs,
        "stdin": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    forked = started(server, script, "--flag", "two words", **options)
    plain = subprocess.Popen(
        ["bash", "-c", f"exec {shlex.join([sys.executable, str(script), '--flag', 'two words'])}"],
        **options | {"stdout": subprocess.PIPE, "text": True},
    )
    (out, err), (plain_out, plain_err) = (each.communicate("typed\n", TIMEOUT_S) for each in (forked, plain))
    assert json.loads(out) == json.loads(plain_out)
    assert err == plain_err == "to stderr\n"
    assert forked.returncode == plain.returncode == 7


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("raise SystemExit('a message')", 1, "a message"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import atexit; atexit.register(print, 'at the end', flush=True)", 0, "at the end"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_a_command_ends_as_its_program_does(server, tmp_path, text, code, says):
    process = started(server, program(tmp_path, text), stderr=subprocess.STDOUT)
    assert says in process.communicate(timeout=TIMEOUT_S)[0]
    assert process.returncode == code


WAITS = "import json, os, time; print(json.dumps(os.getpid()), flush=True); time.sleep(600)"


def test_a_program_ends_with_its_command_however_that_ends(server, tmp_path):
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = started(server, program(tmp_path, WAITS))
        pid = line_of(process)
        assert pid != process.pid
        process.send_signal(number)
        until(lambda pid=pid: ended(pid))
        assert process.wait(TIMEOUT_S) == -number


def test_a_server_that_is_killed_takes_nobody_along(server, tmp_path):
    process = started(server, program(tmp_path, WAITS))
    pid = line_of(process)
    psutil.Process(pid).parent().kill()  # the server: other modules of this process may have others
    until(lambda: not server.is_alive())
    later = started(server, program(tmp_path, "print('later')"), stderr=subprocess.PIPE)
    out, err = later.communicate(timeout=TIMEOUT_S)
    assert (out, later.returncode) == ("later\n", 0) and "starts without it" in err
    assert not ended(pid) and process.poll() is None
    os.kill(pid, signal.SIGKILL)
    assert process.wait(TIMEOUT_S) == 1  # how it ended was the server's to tell


@pytest.mark.full_matrix
def test_a_stopped_program_ends_when_server_and_starter_are_gone(server, tmp_path):
    """As a rank that hangs when its run ends: the driver's server and Ray's raylet are gone."""
    line = f"{fork_server.command(server)} {program(tmp_path, WAITS)}; true"  # "true": the shell stays the parent
    starter = subprocess.Popen(["bash", "-c", line], stdout=subprocess.PIPE, text=True)
    pid = line_of(starter)
    os.kill(pid, signal.SIGSTOP)
    psutil.Process(pid).parent().kill()
    until(lambda: not server.is_alive())
    assert not ended(pid)
    starter.kill()
    starter.wait(TIMEOUT_S)
    until(lambda: ended(pid))


def test_a_server_that_cannot_import_says_why(tmp_path):
    broken = fork_server.ForkServer.start("no_such_module:function", os.environ)
    until(lambda: not broken.is_alive())
    assert broken.last_line() == "ModuleNotFoundError: No module named 'no_such_module'"
    process = started(broken, program(tmp_path, "print('anew')"), stderr=subprocess.DEVNULL)
    assert process.communicate(timeout=TIMEOUT_S)[0] == "anew\n"


def test_what_imports_have_read_otherwise_is_imported_anew(server, tmp_path):
    text = "import json, os; print(json.dumps([os.environ['OMP_NUM_THREADS'], os.getppid()]))"
    options = {"env": os.environ | {"OMP_NUM_THREADS": "2"}, "stderr": subprocess.PIPE}
    process = started(server, program(tmp_path, text), **options)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert json.loads(out)[0] == "2" and process.returncode == 0
    assert err == "fork server: the server has another OMP_NUM_THREADS; this process starts without it\n"


def test_whoever_connects_and_says_nothing_does_not_end_the_server(server, tmp_path):
    import socket

    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(server.address)
    time.sleep(0.2)
    process = started(server, program(tmp_path, "print('still')"))
    assert process.communicate(timeout=TIMEOUT_S)[0] == "still\n"
    assert server.is_alive()


SERVES = """
import json, os, psutil
from skyrl_megatron import fork_server
from skyrl_megatron.inference.vllm import processes
if __name__ == "__main__":
    own = fork_server.inherited()
    assert processes.start_server() is own
    child = processes.EngineProcess(target=os._exit, args=(5,))
    child.start()
    server = psutil.Process(child.pid).parent()
    assert server.parent() == psutil.Process() and server.pid != os.getpid()
    child.join()
    print(json.dumps(child.exitcode), flush=True)
"""


def test_a_process_may_have_a_server_of_its_own_whose_processes_are_its_descendants(server, tmp_path):
    process = started(server, program(tmp_path, SERVES), serving=True)
    assert process.communicate(timeout=TIMEOUT_S)[0] == "5\n"


SERVES_AND_WAITS = """
import time
from skyrl_megatron.fork_server import inherited
print(inherited().address, flush=True)
time.sleep(600)
"""


def test_servers_that_are_killed_leave_no_file(tmp_path):
    """Ray kills an actor with all that it started."""
    from skyrl_megatron.fork_server import ForkServer

    server = ForkServer.start(IMPORTS_NEXT_TO_NOTHING, os.environ)
    process = started(server, program(tmp_path, SERVES_AND_WAITS), serving=True)
    address = Path(process.stdout.readline().strip())
    assert address.parent == Path(server.address).parent and address.exists()
    for child in psutil.Process().children(recursive=True):
        if child.pid != process.pid and any(each.laddr == str(address) for each in child.net_connections("unix")):
            child.kill()
    process.kill()
    process.communicate()
    assert address.exists(), "what was killed did not remove it"
    server.stop()
    assert not address.parent.exists()


ENDS = """
import os, sys, time
from skyrl_megatron.fork_server import ForkServer
server = ForkServer.start(sys.argv[1], os.environ)
print(server.address, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("imports", [IMPORTS_NEXT_TO_NOTHING, "slow:imports"], ids=["ready", "importing"])
def test_a_server_ends_with_its_starter_and_leaves_no_file(tmp_path, imports):
    (tmp_path / "slow.py").write_text("import time\ndef imports(): time.sleep(600)\n")
    command = [sys.executable, str(program(tmp_path, ENDS)), imports]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as starter:
        address = Path(starter.stdout.readline().strip())
        [server] = psutil.Process(starter.pid).children()
        assert address.exists() and address.parent.stat().st_mode & 0o77 == 0
        starter.kill()
        until(lambda: ended(server.pid))
        until(lambda: not address.parent.exists())


# ---------------------------------------------------------------------------------------------- the server of a run
TRAP = """
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
int cuInit(unsigned flags) {
  close(open(getenv("TRAP_FOR_CUDA"), O_CREAT | O_WRONLY, 0600));
  return 100;  /* CUDA_ERROR_NO_DEVICE */
}
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
  void *own = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *found = own ? dlsym(own, name) : 0;
  if (status) *status = *found ? 0 : 1;
  return *found ? 0 : 500;  /* CUDA_ERROR_NOT_FOUND */
}
int cuGetProcAddress(const char *name, void **found, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, found, version, flags, 0);
}
"""
"""As much of CUDA's driver as its runtime asks for when a program begins to use it."""
LOOKS = """
import json, os, sys
import torch
server = f"/proc/{os.getppid()}"
maps = open(f"{server}/maps").read()
opened = [os.readlink(each.path) for each in os.scandir(f"{server}/fd") if os.path.lexists(each.path)]
print(json.dumps({
    "initialised": torch.cuda.is_initialized(), "bad fork": torch.cuda._is_in_bad_fork(),
    "threads": len(os.listdir(f"{server}/task")), "devices": [each for each in opened if "nvidia" in each],
    "there": [name for name in ("vllm", "megatron.core", "transformers", "ray") if name in sys.modules],
}), flush=True)
if "--looks-for-gpus" in sys.argv:
    torch.cuda.is_available()
"""


def test_the_server_of_a_run_has_imported_everything_and_never_initialised_cuda(tmp_path):
    """A library in the place of CUDA's driver notes that it is initialised: nothing that is imported does so, as a
    question for GPUs would. Nor is Ray there, whose library reads a worker's environment when it is loaded."""
    from skyrl_megatron.workers import runtime_env as forked

    (tmp_path / "trap.c").write_text(TRAP)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "trap.c"], check=True)
    sprung = tmp_path / "sprung"
    paths = ":".join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
    environment = forked.server_environment() | {"LD_LIBRARY_PATH": paths, "TRAP_FOR_CUDA": str(sprung)}
    server = fork_server.ForkServer.start("skyrl_megatron.workers.runtime_env:import_all", environment)
    try:
        script, kept = program(tmp_path, LOOKS), {"env": environment | {"LD_PRELOAD": ""}}
        found = line_of(started(server, script, **kept))
        assert not sprung.exists()
        assert found == {
            "initialised": False,
            "bad fork": False,
            "threads": 1,
            "devices": [],
            "there": ["vllm", "megatron.core", "transformers"],
        }
        assert started(server, script, "--looks-for-gpus", **kept).wait(TIMEOUT_S) == 0
        assert sprung.exists()
    finally:
        server.stop()


def test_no_server_where_there_are_gpus_or_a_cluster_was_joined(tmp_path, monkeypatch):
    from skyrl_megatron.workers import runtime_env as forked

    monkeypatch.setattr(forked, "_server", None)  # another test of this process may have started one
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: one'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with monkeypatch.context() as changed:
        changed.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        changed.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        forked.start_server()
        assert forked.runtime_environment({"A": "1"}) == {"env_vars": {"A": "1"}}
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    forked.start_server()
    assert forked.runtime_environment({}, serving=True) == {"env_vars": {}}


class Rank:
    """An actor that reports its node and ends on request."""

    def pids(self):
        return os.getpid(), os.getppid()

    def end(self):
        os._exit(3)


@pytest.fixture(scope="module")
def ray_and_server():
    """A Ray, and a server whose variables are those of its actors."""
    from skyrl_megatron.workers import runtime_env as forked
    from skyrl_megatron.workers.ray_setup import local_ray

    environment = forked.server_environment() | {"HF_HUB_OFFLINE": "1"}
    server = fork_server.ForkServer.start(IMPORTS_NEXT_TO_NOTHING, environment)
    with local_ray(2, object_store_bytes=100 << 20):
        yield server
    server.stop()


@pytest.mark.parametrize("how", ["exit", "signal", "ray.kill", "command"])
def test_an_actor_of_the_server_is_lost_as_any_other_is(ray_and_server, how):
    import ray

    options = {"num_cpus": 0, "runtime_env": {"py_executable": fork_server.command(ray_and_server)}}
    actor = ray.remote(Rank).options(**options).remote()
    pid, parent = ray.get(actor.pids.remote(), timeout=TIMEOUT_S)
    assert "fork_server import serve" in " ".join(psutil.Process(parent).cmdline())
    found = [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
    [command] = [each for each in found if ray_and_server.address in each.cmdline()]
    if how == "exit":
        actor.end.remote()
    elif how == "signal":
        os.kill(pid, signal.SIGKILL)
    elif how == "ray.kill":
        ray.kill(actor)
    else:
        command.kill()
    until(lambda: ended(pid) and ended(command.pid))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.pids.remote(), timeout=TIMEOUT_S)


def test_a_server_starts_although_the_temporary_folder_has_a_long_name(tmp_path, monkeypatch):
    """A socket's path may have 107 characters; a folder that is too long for Ray gets Ray's usual one."""
    import tempfile

    from skyrl_megatron.errors import LaunchError
    from skyrl_megatron.workers.ray_setup import _short_temporary_folder

    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    long = tmp_path / ("scratch_of_a_job" * 5)
    long.mkdir()
    for folder, of_ray in (("/tmp", None), (str(long), "/tmp/ray")):
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert _short_temporary_folder() == of_ray
    server = fork_server.ForkServer.start("json:loads", os.environ)  # fails at once: what counts is the socket
    try:
        address = Path(server.address)
        assert address.parent.parent == Path("/tmp") and address.parent.stat().st_mode & 0o777 == 0o700
    finally:
        server.stop()
    assert not list(long.iterdir())
    monkeypatch.setattr(fork_server, "SHORT_FOLDERS", (str(tmp_path / "absent"),))
    with pytest.raises(LaunchError, match=f"TMPDIR={long}: .* set TMPDIR to a folder with a shorter path"):
        fork_server.socket_folder("skyrl-fork-", 90)
