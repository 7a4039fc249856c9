"""Sandboxes of namespaces against hostile commands, with control groups where this machine has them and without.

Each command does what it must not be able to do; afterwards the sandbox still serves, or is an error that names a
limit.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from skyrl_megatron.errors import ConfigError, SandboxError, SandboxLimitError
from skyrl_megatron_agents.sandboxes.sandbox import (
    Limits,
    SandboxSpec,
    command_environment,
    pack,
    unpack,
)
from skyrl_megatron_agents.sandboxes.sandbox_queue import make_provider

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")]
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SMALL = Limits(memory=128 * MIB, disk=16 * MIB, processes=40, lifetime_s=120)


@pytest.fixture(scope="module", params=["control groups", "limits per process"])
def provider(request, tmp_path_factory):
    from skyrl_megatron_agents.sandboxes import control_groups

    grouped = request.param == "control groups"
    if grouped and control_groups.find() is None:
        pytest.skip("this process may not make control groups")
    try:
        made = make_provider("namespaces", home=tmp_path_factory.mktemp("home"), grouped=grouped)
    except SandboxError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())


@pytest.fixture
def inside(provider):
    """``inside(body)``: run ``await body(sandbox)`` in a new small sandbox."""

    def run(body, **settings):
        async def main():
            sandbox = await provider.start(SandboxSpec(**{"limits": SMALL, **settings}))
            try:
                return await body(sandbox)
            finally:
                await sandbox.stop()

        return asyncio.run(main())

    return run


async def shell(sandbox, command, timeout_s=20.0, **settings):
    return await sandbox.run(["sh", "-c", command], timeout_s=timeout_s, **settings)


async def serves(sandbox):
    """Return whether the sandbox still runs commands, with no process of an earlier one: process 1 and ``sh``."""
    result = await shell(sandbox, "ls -d /proc/[0-9]*")
    return result.exit_code == 0 and len(result.stdout.split()) == 2


def marked(marker):
    """Ids of this machine's processes with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker in path.read_bytes().decode(errors="replace").split("\0"):
                found.append(int(path.parent.name))
    return found


def gone(marker, seconds=10.0):
    deadline = time.monotonic() + seconds
    while marked(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def number():
    """A number of seconds that marks the ``sleep`` of one test."""
    return f"98765.{os.getpid()}{time.monotonic_ns()}"


def test_the_verbs(inside):
    async def body(sandbox):
        await sandbox.put(pack({"a/b.txt": b"\0\1", "run.sh": "echo ran"}, executable=["run.sh"]))
        await sandbox.put(pack({"case": "1"}), "/tests")
        result = await sandbox.run(["sh", "run.sh"], timeout_s=10)
        both = await shell(sandbox, "cat; cat >&2; exit 3", stdin=b"in")
        named = await shell(
            sandbox, "echo $A $HOME $PWD $0; id -u; cat /tests/case", environment={"A": "x"}, folder="/tmp"
        )
        return result, both, named, unpack(await sandbox.get()), await serves(sandbox)

    result, both, named, files, served = inside(body)
    assert (result.exit_code, result.stdout, result.stderr) == (0, b"ran\n", b"") and result.seconds > 0
    assert (both.exit_code, both.stdout, both.stderr) == (3, b"in", b"")
    user = "1000" if os.geteuid() == 0 else "0"
    assert named.stdout.decode().split() == ["x", "/home/agent", "/tmp", "sh", user, "1"]
    assert files == {"a/b.txt": b"\0\1", "run.sh": b"echo ran"} and served


def test_a_sandbox_is_empty_of_the_run(inside, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "of-the-run")
    monkeypatch.setenv("LANG", "en_GB.UTF-8")

    async def body(sandbox):
        return await shell(
            sandbox, f"env; cat /proc/*/environ; ls -a / {ROOT} {Path.home()}; cat /etc/passwd; ls /proc/self/fd"
        )

    result = inside(body)
    text = result.stdout.decode(errors="replace")
    assert "of-the-run" not in text and "LANG=en_GB.UTF-8" in text
    assert "pyproject.toml" not in text and ".ssh" not in text and "No such file" in result.stderr.decode()
    assert [line for line in text.splitlines() if ":x:" in line and line.split(":")[0] not in ("root", "agent")] == []
    assert {each for each in text.splitlines() if each.isdigit()} == {"0", "1", "2", "3"}, "no descriptor is inherited"


FORKS = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)"


def test_fork_bomb(inside, provider):
    async def body(sandbox):
        bomb = asyncio.create_task(sandbox.run(["python3", "-c", FORKS], timeout_s=2.0))
        await asyncio.sleep(1.0)
        (child,) = Path(f"/proc/{sandbox.keeper.pid}/task/{sandbox.keeper.pid}/children").read_text().split()
        space = os.readlink(f"/proc/{child}/ns/pid")
        count = 0
        for path in Path("/proc").glob("[0-9]*/ns/pid"):
            with contextlib.suppress(OSError):
                count += os.readlink(path) == space
        return count, await bomb, await serves(sandbox)

    count, result, served = inside(body)
    assert 10 < count <= SMALL.processes + 1
    assert (result.timed_out or result.exit_code) and served


MEMORY = {
    "one process": "x = bytearray(1 << 30)",
    "many processes": (
        "import os, time\n"
        "for _ in range(8):\n    if not os.fork():\n"
        "        x = bytearray(64 << 20)\n        time.sleep(1)\n        os._exit(0)\n"
        "while True:\n    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)"
    ),
    "shared": "import mmap\nx = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): x[i] = 1",
    "shared, given up": (
        "import mmap, time\nkept = []\n"
        "for _ in range(40):\n    x = mmap.mmap(-1, 32 << 20); x.write(bytes(32 << 20))\n"
        "    x.madvise(mmap.MADV_DONTNEED); kept.append(x); time.sleep(0.1)"
    ),
    "a device": (
        "import mmap, time\nkept, f = [], open('/dev/zero', 'r+b')\n"
        "for _ in range(40):\n    x = mmap.mmap(f.fileno(), 32 << 20); x.write(bytes(32 << 20))\n"
        "    x.madvise(mmap.MADV_DONTNEED); kept.append(x); time.sleep(0.1)"
    ),
    "segments": (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True); c.shmat.restype = ctypes.c_void_p\n"
        "for _ in range(40):\n    n = c.shmget(0, 32 << 20, 0o1600)\n    assert n >= 0, 'refused'\n"
        "    p = c.shmat(n, None, 0); ctypes.memset(p, 1, 32 << 20); c.shmdt(ctypes.c_void_p(p))"
    ),
    "sockets": (
        "import socket, time\nkept = []\n"
        "for n in range(1900):\n    a, b = socket.socketpair(); a.setblocking(False); kept.append((a, b))\n"
        "    try:\n        while True: a.send(bytes(1 << 16))\n    except OSError: pass\n"
        "    if n % 50 == 0: time.sleep(0.05)"
    ),
    "a file without a name": "import os\nf = os.memfd_create('x')\nfor _ in range(1024): os.write(f, bytes(1 << 20))",
}


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_bomb(kind, inside):
    async def body(sandbox):
        result = await sandbox.run(["python3", "-c", MEMORY[kind]], timeout_s=30)
        return result, await serves(sandbox)

    result, served = inside(body)
    assert not result.timed_out and served
    if kind == "many processes":
        assert result.out_of_memory or b"-9" in result.stdout or b"1" in result.stdout
    else:
        assert result.exit_code, result


def test_disk_bomb(inside):
    async def body(sandbox):
        full = await shell(
            sandbox, "for f in /work/a /tmp/b /dev/shm/c /home/agent/d; do dd if=/dev/zero of=$f bs=1M count=64; done"
        )
        size = await shell(sandbox, "du -skc /work /tmp /dev/shm /home | tail -1")
        many = await shell(sandbox, "rm -f /work/a /tmp/b; i=0; while : > /tmp/$i; do i=$((i+1)); done; echo $i", 60)
        return full, int(size.stdout.split()[0]), many, await serves(sandbox), len(await sandbox.get("/home/agent"))

    full, kilobytes, many, served, _ = inside(body)
    assert b"No space left" in full.stderr and kilobytes <= SMALL.disk >> 10
    assert many.exit_code and b"No space left" in many.stderr and served


def test_network(inside):
    """Neither a server on this machine's loopback, nor its other addresses, nor what has no network namespace."""
    program = (
        "import socket, sys\n"
        "def tried(*a, to=None):\n"
        "    try:\n        s = socket.socket(*a); s.settimeout(3); s.connect(to)\n"
        "    except OSError as e: return type(e).__name__ + str(e.errno)\n"
        "    return 'connected'\n"
        "port = int(sys.argv[1])\n"
        "for host in ('127.0.0.1', sys.argv[2], '8.8.8.8'): print(tried(to=(host, port)))\n"
        "print(tried(socket.AF_VSOCK, to=(2, 1024)))\n"
        "print(tried(socket.AF_UNIX, to='\\0' + sys.argv[3]))\n"
        "print([name for _, name in socket.if_nameindex()])"
    )
    name = f"skyrl-sandbox-test-{os.getpid()}"
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{name}")
        local.listen()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.connect(("10.255.255.255", 1))
            own = asked.getsockname()[0]

        async def body(sandbox):
            return await sandbox.run(["python3", "-c", program, str(server.getsockname()[1]), own, name], timeout_s=30)

        lines = inside(body).stdout.decode().splitlines()
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert lines[0] == "ConnectionRefusedError111" and all(line == "OSError101" for line in lines[1:3]), lines
    assert lines[3] == "OSError97" and lines[4] == "ConnectionRefusedError111" and lines[5] == "['lo']", lines


def test_nothing_outlives_a_command_or_its_stop(inside):
    marker = number()

    async def body(sandbox):
        start = f"for i in 1 2 3; do setsid nohup sleep {marker} > /dev/null 2>&1 & done; "
        left = await shell(sandbox, start + "echo started")
        after_command = marked(marker)
        late = await shell(sandbox, f"trap '' TERM HUP INT; {start} sleep {marker}", timeout_s=0.5)
        after_timeout = marked(marker)
        running = asyncio.create_task(shell(sandbox, f"sleep {marker}"))
        while not marked(marker):
            await asyncio.sleep(0.02)
        await sandbox.stop()
        with pytest.raises(SandboxError):
            await running
        with pytest.raises(SandboxError, match="is stopped"):
            await shell(sandbox, "true")
        return left, after_command, late, after_timeout, marked(marker)

    left, after_command, late, after_timeout, after_stop = inside(body)
    assert left.stdout == b"started\n" and after_command == []
    assert late.timed_out and late.exit_code == 137 and late.seconds < 15 and after_timeout == []
    assert after_stop == []


def test_a_cancelled_command_ends_with_its_sandbox(inside):
    marker = number()

    async def body(sandbox):
        running = asyncio.create_task(shell(sandbox, f"sleep {marker}"))
        while not marked(marker):
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return marked(marker)

    assert inside(body) == []


def test_writing_outside(inside, tmp_path):
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "file").write_text("kept")
    tmp_path.chmod(0o777)

    async def body(sandbox):
        tried = await shell(
            sandbox,
            f"touch {tmp_path}/x /usr/x /etc/passwd /mounted/x; echo x > /mounted/file; rm -f /usr/bin/env; "
            "mount -o remount,rw /usr; mount -t tmpfs t /mnt; umount /proc; chroot / true; hostname other; "
            "echo 1 > /proc/sys/kernel/panic; mknod /tmp/disk b 8 0; ln -s /etc/passwd link; ln -s / root; "
            "ls /mounted",
        )
        await sandbox.put(pack({"root2/x": "1"}))
        return tried, unpack(await sandbox.get())

    panic = Path("/proc/sys/kernel/panic").read_text()
    tried, files = inside(body, mounts={"/mounted": tmp_path / "mounted"})
    assert not (tmp_path / "x").exists() and not Path("/usr/x").exists() and Path("/usr/bin/env").exists()
    assert (tmp_path / "mounted" / "file").read_text() == "kept" and tried.stdout == b"file\n"
    assert Path("/proc/sys/kernel/panic").read_text() == panic
    assert len(tried.stderr.splitlines()) >= 12, tried.stderr.decode()
    assert files == {"root2/x": b"1"}, "links are left out"


def test_no_way_to_more_rights(inside):
    async def body(sandbox):
        return await shell(
            sandbox,
            "kill -9 1; kill -STOP 1; grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status; unshare -Ur id; su -c id; "
            "cat /proc/1/environ; head -c 1 /proc/1/mem; ls /proc/1/fd /proc/1/root; ls -l /proc/self/ns/user",
        ), await serves(sandbox)

    result, served = inside(body)
    lines = dict(line.split(":\t") for line in result.stdout.decode().splitlines() if ":\t" in line)
    assert {value for name, value in lines.items() if name.startswith("Cap")} == {"0" * 16}
    assert lines["NoNewPrivs"] == "1" and lines["Seccomp"] == "2" and served
    assert "uid=0" not in result.stdout.decode() or os.geteuid()
    errors = result.stderr.decode()
    assert "unshare" in errors and errors.count("ermission denied") >= 3, errors


def test_output_is_bounded(inside):
    async def body(sandbox):
        return await shell(sandbox, "echo first; head -c 20000000 /dev/zero; echo last")

    result = inside(body, limits=Limits(memory=128 * MIB, disk=16 * MIB, output=1000))
    assert result.truncated and len(result.stdout) == 1000
    assert result.stdout.startswith(b"first") and result.stdout.endswith(b"last\n")


def test_a_workspace_is_returned_whatever_its_rights(inside):
    async def body(sandbox):
        await shell(
            sandbox,
            "mkdir -p d; echo 1 > d/f; mkfifo p; ln d/f hard; chmod 0 d/f d; touch ./-rf \"$(printf 'a\\nb')\"",
        )
        archive = await sandbox.get()
        await shell(sandbox, "rm -rf ./*")
        await sandbox.put(archive)
        again = unpack(await sandbox.get())
        await shell(sandbox, "head -c 9000000 /dev/zero > big")
        with pytest.raises(SandboxLimitError, match="more than 4,194,304 bytes"):
            await sandbox.get()
        return unpack(archive), again

    files, again = inside(body, limits=Limits(memory=128 * MIB, disk=16 * MIB, archive=4 * MIB))
    assert files == again and files["d/f"] == b"1\n" and {"-rf", "a\nb"} <= set(files)


def test_what_is_no_result_is_an_error(inside):
    async def body(sandbox):
        for words in (["no-such-program"], ["/etc/passwd"]):
            with pytest.raises(SandboxError, match="run in a sandbox failed"):
                await sandbox.run(words, timeout_s=5)
        with pytest.raises(SandboxError, match="No such file"):
            await shell(sandbox, "true", folder="/nowhere")
        with pytest.raises(SandboxError, match="put in a sandbox failed"):
            await sandbox.put(b"no archive at all" * 100)
        with pytest.raises(SandboxError, match="get in a sandbox failed"):
            await sandbox.get("/none")
        return await serves(sandbox)

    assert inside(body)


def test_a_killed_sandbox_is_an_error(inside):
    async def body(sandbox):
        running = asyncio.create_task(shell(sandbox, "sleep 50"))
        await asyncio.sleep(0.2)
        sandbox.keeper.send_signal(signal.SIGKILL)
        with pytest.raises(SandboxError, match="ended by itself"):
            await running

    inside(body)


def test_a_sandbox_that_does_not_answer_is_an_error(inside, monkeypatch):
    """Process 1 is stopped from outside, which no command inside can do."""
    from skyrl_megatron_agents.sandboxes import namespaces

    monkeypatch.setattr(namespaces, "GRACE_S", 0.5)

    async def body(sandbox):
        (child,) = Path(f"/proc/{sandbox.keeper.pid}/task/{sandbox.keeper.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGSTOP)
        with pytest.raises(SandboxError, match="did not report"):
            await shell(sandbox, "true", timeout_s=0.2)
        return sandbox.keeper.poll()

    monkeypatch.setattr(namespaces, "STOP_S", 1.0)
    assert inside(body) is not None


def test_lifetime(inside):
    async def body(sandbox):
        with pytest.raises(SandboxLimitError, match="lifetime of 1 s"):
            await shell(sandbox, "sleep 50")

    inside(body, limits=Limits(memory=128 * MIB, disk=16 * MIB, lifetime_s=1))


def test_dependencies_are_installed_once_and_cannot_be_changed(inside, provider):
    setup = "mkdir bin; echo 'echo tool' > bin/tool; chmod +x bin/tool; date +%s%N > stamp"

    async def body(sandbox):
        return await shell(
            sandbox, "tool; cat /opt/setup/stamp; echo x > /opt/setup/stamp; echo x > /opt/setup/bin/tool"
        )

    first, second = inside(body, setup=setup), inside(body, setup=setup)
    assert first.stdout == second.stdout and first.stdout.startswith(b"tool\n")
    assert first.stderr.count(b"Read-only file system") == 2
    with pytest.raises(SandboxError, match=r"exit code 3: broken"):
        inside(body, setup="echo broken >&2; exit 3")


def test_image_of_an_archive(inside, provider, tmp_path):
    """Unpacked once; a link of the image to a file of this machine stays in the sandbox."""
    system = tmp_path / "image.tar.gz"
    shells = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout.split()
    with tarfile.open(system, "w:gz") as archive:
        for name in ("/bin/sh", "/bin/cat", *(word for word in shells if word.startswith("/"))):
            archive.add(os.path.realpath(name), arcname=name)
        link = tarfile.TarInfo("etc/hosts")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)

    async def body(sandbox):
        return await sandbox.run(["/bin/sh", "-c", "echo in; cat /etc/hosts; echo > /x; ls"], timeout_s=10)

    for _ in range(2):
        result = inside(body, image=str(system))
        assert (
            result.stdout == b"in\n127.0.0.1 localhost sandbox\n::1 localhost\n" and b"ls: not found" in result.stderr
        )
    with pytest.raises(SandboxError, match="neither host nor the path of a folder"):
        inside(body, image=str(tmp_path / "none"))


def test_relay(inside):
    """The port inside leads to one server; its other side is closed when the block ends."""
    from skyrl_megatron_agents.sandboxes.relay import Relay

    async def body(sandbox):
        async def answer(reader, writer):
            said = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + said.split()[1] + b"!" * 200_000)
            await writer.drain()
            writer.close()

        get = "import sys, urllib.request as u\nprint(len(u.urlopen(sys.argv[1] + '/path', timeout=10).read()))"
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with Relay(sandbox, *server.sockets[0].getsockname()) as relay:
            results = [await sandbox.run(["python3", "-c", get, relay.url], timeout_s=20) for _ in range(2)]
            server.close()
            await server.wait_closed()
            results.append(await sandbox.run(["python3", "-c", get, relay.url], timeout_s=20))
            refused = relay.refused
        results.append(await sandbox.run(["python3", "-c", get, relay.url], timeout_s=20))
        return results, refused

    (first, second, no_server, closed), refused = inside(body, relay=True)
    assert first.stdout == second.stdout == b"200005\n" and refused == 1
    assert no_server.exit_code and b"urlopen" in no_server.stderr, no_server
    assert closed.exit_code and b"refused" in closed.stderr


RUN = """
import asyncio, sys
from pathlib import Path
from skyrl_megatron_agents.sandboxes.sandbox import SandboxSpec
from skyrl_megatron_agents.sandboxes.sandbox_queue import make_provider

async def main():
    provider = make_provider("namespaces", home=Path(sys.argv[1]))
    sandboxes = [await provider.start(SandboxSpec(trajectory=str(n))) for n in range(2)]
    print("started", flush=True)
    command = ["sh", "-c", f"setsid sleep {sys.argv[2]} & sleep {sys.argv[2]}"]
    await asyncio.gather(*(sandbox.run(command, timeout_s=500) for sandbox in sandboxes))

asyncio.run(main())
"""


def kill_a_run(home, marker, **settings):
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(home), marker], cwd=ROOT, stdout=subprocess.PIPE, text=True, **settings
    ) as run:
        try:
            assert run.stdout.readline() == "started\n"
            deadline = time.monotonic() + 20
            while len(marked(marker)) < 5 and time.monotonic() < deadline:  # four sleeps and the run
                time.sleep(0.02)
            count = len(marked(marker))
        finally:
            run.kill()
    return count


def test_a_killed_run_leaves_nothing(provider, tmp_path):
    marker = number()
    assert kill_a_run(tmp_path, marker) == 5
    assert gone(marker), "the kernel ends what the run started"
    runs = tmp_path / "runs"
    (left,) = runs.iterdir()
    records = [each for each in left.iterdir() if each.name not in ("lock", ".root")]
    assert len(records) == 2
    second = make_provider("namespaces", home=tmp_path)
    assert [each.name for each in runs.iterdir()] == [second._records.id] and second.reap() == 0
    asyncio.run(second.close())
    assert list(runs.iterdir()) == []
    names = {f"skyrl-sandbox-{record.name}" for record in records}
    assert not [path for path in Path("/sys/fs/cgroup").glob("**/skyrl-sandbox-*") if path.name in names]


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run as this user")
def test_without_root(tmp_path):
    """The same as a user without rights: its id is the command's, and none of its capabilities are."""
    marker = number()
    base = Path(tempfile.mkdtemp(prefix="skyrl-"))
    program = base / "program.py"
    program.write_text(
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from skyrl_megatron_agents.sandboxes.sandbox import Limits, SandboxSpec, pack, unpack\n"
        "from skyrl_megatron_agents.sandboxes.sandbox_queue import make_provider\n"
        "async def main():\n"
        "    provider = make_provider('namespaces', home=Path(sys.argv[1]))\n"
        "    limits = Limits(memory=128 << 20, disk=16 << 20, processes=40)\n"
        "    sandbox = await provider.start(SandboxSpec(limits=limits))\n"
        "    await sandbox.put(pack({'a': 'b'}))\n"
        "    async def sh(text, timeout_s=10):\n"
        "        return await sandbox.run(['sh', '-c', text], timeout_s=timeout_s)\n"
        "    first = await sh('grep Cap /proc/self/status; unshare -Ur id; head -c 1 /proc/1/mem; touch /usr/x; '\n"
        "                     'ln -sfn /work /bin; rm /etc/passwd')\n"
        f"    bomb = await sandbox.run(['python3', '-c', {FORKS!r}], timeout_s=2)\n"
        "    memory = await sandbox.run(['python3', '-c', 'x = bytearray(1 << 30)'], timeout_s=20)\n"
        "    left = await sh('ls -d /proc/[0-9]*; true')\n"
        "    print(first.stdout.count(b'0' * 16), first.stderr.count(b'\\n'), bomb.timed_out,\n"
        "          memory.exit_code > 0, len(left.stdout.split()), unpack(await sandbox.get()))\n"
        "    await provider.close()\n"
        "asyncio.run(main())\n"
    )
    site = next(path for path in sys.path if path.endswith("site-packages"))
    enter = (
        "set -e; for each in python source site home; do mkdir -p $BASE/$each; done; "
        "chmod 755 $BASE; chmod 777 $BASE/home; "
        f"mount --bind {sys.base_prefix} $BASE/python; mount --bind {ROOT} $BASE/source; "
        f"mount --bind {site} $BASE/site; "
        # The folder of this Python may be one of root's alone.
        f"mount -t tmpfs none /root; mkdir -p {sys.base_prefix}; mount --bind $BASE/python {sys.base_prefix}; "
        "exec setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set -all --no-new-privs "
        f"env PYTHONPATH=$BASE/source:$BASE/site {sys.base_prefix}/bin/python3 $BASE/program.py $BASE/home"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", enter],
        env={"BASE": str(base), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "5 5 True True 2 {'a': b'b'}", done.stdout
    assert not marked(marker)


def test_environment_of_a_command(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TZ", "UTC")
    environment = command_environment({"OPENAI_API_KEY": "of-the-trajectory", "HOME": "/elsewhere"}, "/python/bin")
    assert environment["TZ"] == "UTC" and environment["HOME"] == "/elsewhere" and "HF_TOKEN" not in environment
    assert environment["PATH"].split(":")[:2] == ["/python/bin", "/opt/setup/bin"]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"limits.cpus=0: .*\n.*limits.disk=-1"):
        Limits(cpus=0, disk=-1)
    with pytest.raises(
        ConfigError, match=r"generator\.agent\.sandbox=moon: not registered; known: namespaces, docker"
    ):
        make_provider("moon")
    with pytest.raises(SandboxError, match="does not answer"):
        make_provider("docker", engine=tmp_path / "none.sock", home=tmp_path)
    with pytest.raises(SandboxError, match="damaged"):
        unpack(b"no archive" * 100)


def test_a_registered_provider_is_found(tmp_path, monkeypatch):
    from skyrl_megatron.plugins import SANDBOXES, register_sandbox
    from skyrl_megatron_agents.sandboxes.namespaces import NamespaceProvider

    monkeypatch.setattr(SANDBOXES, "_classes", {})

    @register_sandbox("mine")
    class Mine(NamespaceProvider):
        pass

    provider = make_provider("mine", home=tmp_path)
    assert type(provider) is Mine
    asyncio.run(provider.close())


def test_the_root_is_not_the_agents(inside):
    """Whoever owns it: neither the links to the system's folders nor the settings files can be replaced."""

    async def body(sandbox):
        command = (
            "ln -sfn /work /bin; rm -f /bin /lib64; mkdir /new; touch /etc/new; echo x > /etc/passwd; chmod 777 / /etc"
        )
        tried = await shell(
            sandbox, f"{command}; mv /tests /work/; mkdir -p /app/x; touch /app/x/y /dev/shm/z && echo ok"
        )
        await sandbox.put(pack({"case": "1"}), "/tests")
        await sandbox.put(pack({"case": "2"}), "/app/deep/er")
        return tried, await shell(sandbox, "ls / /etc /tests /app; touch /tests/mine /app/deep/er/mine")

    tried, listed = inside(body, folders=["/app"])
    assert tried.stdout == b"ok\n" and tried.stderr.decode().count("Read-only file system") >= 6, tried
    names = set(listed.stdout.decode().split())
    assert {"bin", "case", "deep", "x"} <= names and "new" not in names and not listed.exit_code


def test_an_image_leads_to_nothing_of_this_machine(inside, tmp_path):
    """Its links where a sandbox has folders and files of its own lead to its own root."""
    image, outside = tmp_path / "image", tmp_path / "outside"
    for folder in (image / "dev", image / "usr"):
        folder.mkdir(parents=True)
    for name in ("etc", "work", "home", "proc", "opt"):
        (outside / name).mkdir(parents=True)
        (image / name).symlink_to(outside / name)
    (outside / "etc" / "hosts").write_text("kept")
    (outside / "null").write_text("kept")
    (image / "dev" / "null").symlink_to(outside / "null")
    (image / "dev" / "pts").symlink_to(outside)
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    before = {path.relative_to(outside): path.lstat() for path in sorted(outside.rglob("*"))}

    async def body(sandbox):
        return await shell(sandbox, "cat /etc/hosts; pwd -P; ls /dev; echo 1 > /dev/null; touch /work/new /tmp/x")

    mounts = {f"/usr/{name}": Path("/usr", name).resolve() for name in ("bin", "lib", "lib64")}
    result = inside(body, image=str(image), mounts={**mounts, "/opt/program": tmp_path / "image"})
    assert b"localhost" in result.stdout and not result.exit_code, result
    after = {path.relative_to(outside): path.lstat() for path in sorted(outside.rglob("*"))}
    assert {name: (each.st_uid, each.st_mode, each.st_mtime_ns) for name, each in after.items()} == {
        name: (each.st_uid, each.st_mode, each.st_mtime_ns) for name, each in before.items()
    }
    assert (outside.stat().st_uid, (outside / "etc" / "hosts").read_text()) == (os.getuid(), "kept")
