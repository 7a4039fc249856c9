"""Sandboxes in containers, by the service of a real Podman with a storage of its own, on an image of BusyBox.

Podman, ``runc`` and a static ``busybox`` are Debian's packages. Needs root, as the provider's relay does.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyrl_megatron.errors import SandboxError, SandboxLimitError
from skyrl_megatron_agents.sandboxes.sandbox import Limits, SandboxSpec, pack, unpack
from skyrl_megatron_agents.sandboxes.sandbox_queue import SandboxQueue, make_provider

MIB = 1 << 20
IMAGE = "localhost/sandbox-test:1"
LIMITS = Limits(memory=64 * MIB, disk=16 * MIB, processes=40, lifetime_s=120, archive=4 * MIB)
ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("podman", "runc", "busybox") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.process,
    pytest.mark.full_matrix,
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=f"needs root and {', '.join(MISSING) or 'podman'}"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The socket of a Podman service; the image is loaded."""
    folder = tmp_path_factory.mktemp("podman")
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
    )
    (folder / "containers.conf").write_text(
        '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    environment = {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(folder),
    }
    system = folder / "system"
    for name in ("bin", "tmp", "etc", "proc", "dev"):
        (system / name).mkdir(parents=True)
    (system / "tmp").chmod(0o1777)
    shutil.copy(shutil.which("busybox"), system / "bin" / "busybox")
    names = subprocess.run([system / "bin" / "busybox", "--list"], capture_output=True, text=True, check=True).stdout
    for name in set(names.split()) - {"busybox"}:
        (system / "bin" / name).symlink_to("busybox")
    packed = subprocess.run(["tar", "-C", system, "-c", "."], capture_output=True, check=True).stdout
    done = subprocess.run(
        ["podman", "import", "-", IMAGE], input=packed, env=environment, capture_output=True, timeout=120
    )
    if done.returncode:
        pytest.skip(f"podman does not run here: {done.stderr.decode()[-500:]}")
    address = folder / "engine.sock"
    service = subprocess.Popen(
        ["podman", "system", "service", "--time=0", f"unix://{address}"], env=environment, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 30
        while not address.is_socket():
            assert time.monotonic() < deadline and service.poll() is None, service.stderr.read().decode()
            time.sleep(0.05)
        yield address
    finally:
        subprocess.run(["podman", "rm", "-fa"], env=environment, capture_output=True, timeout=60)
        service.terminate()
        service.wait(30)


@pytest.fixture(scope="module")
def provider(engine, tmp_path_factory):
    made = make_provider("docker", engine=engine, home=tmp_path_factory.mktemp("home"))
    yield made
    asyncio.run(made.close())


@pytest.fixture
def inside(provider):
    def run(body, **settings):
        async def main():
            spec = SandboxSpec(**{"image": IMAGE, "limits": LIMITS, **settings})
            async with SandboxQueue(provider, at_once=1, tries=1).sandbox(spec) as sandbox:
                return await body(sandbox)

        return asyncio.run(main())

    return run


async def shell(sandbox, command, timeout_s=30.0, **settings):
    return await sandbox.run(["sh", "-c", command], timeout_s=timeout_s, **settings)


def test_the_verbs(inside):
    async def body(sandbox):
        await sandbox.put(pack({"a/b.txt": b"\0\1", "run.sh": "echo ran"}))
        await sandbox.put(pack({"case": "1"}), "/tests")
        both = await shell(
            sandbox,
            "sh run.sh; cat; cat /tests/case >&2; echo $A $PWD; id -u; exit 3",
            environment={"A": "x"},
            stdin=b"in",
        )
        with pytest.raises(SandboxError, match="run in a sandbox failed"):
            await sandbox.run(["no-such-program"], timeout_s=10)
        with pytest.raises(SandboxError, match="read-only"):
            await sandbox.put(pack({"x": "1"}), "/etc")
        archive = await sandbox.get()
        await sandbox.put(archive, "/work/again")
        return both, unpack(archive), set(unpack(await sandbox.get()))

    both, files, again = inside(body)
    assert both.exit_code == 3 and both.stderr == b"1" and both.stdout == b"ran\ninx /work\n1000\n"
    assert files == {"a/b.txt": b"\0\1", "run.sh": b"echo ran"}
    assert again == {*files, *(f"again/{name}" for name in files)}


def test_hostile_commands(inside):
    async def body(sandbox):
        memory = await shell(sandbox, "x=$(yes | head -c 200000000); echo $x")
        disk = await shell(sandbox, "cat /dev/zero > big; du -sk /work; rm big")
        network = await shell(sandbox, "ip -o link | wc -l; nc -w 2 8.8.8.8 53; echo $?")
        outside = await shell(
            sandbox, "touch /bin/x /x /tests/x; mount -t tmpfs t /tests; kill -9 1 6; grep CapEff /proc/self/status"
        )
        late = await shell(sandbox, "setsid sleep 300 & sleep 300", timeout_s=1)
        left = await shell(sandbox, "sleep 300 & pidof sleep | wc -w")
        with pytest.raises(SandboxLimitError):
            await shell(sandbox, "head -c 6000000 /dev/zero > big")
            await sandbox.get()
        return memory, disk, network, outside, late, left, await shell(sandbox, "pidof sleep | wc -w")

    memory, disk, network, outside, late, left, end = inside(body)
    assert memory.exit_code, memory
    assert b"No space left" in disk.stderr and int(disk.stdout.split()[0]) <= 16 << 10
    assert network.stdout.split()[0] == b"1" and network.stdout.split()[1] != b"0"
    assert outside.stderr.count(b"Read-only") + outside.stderr.count(b"denied") >= 3
    assert outside.stdout.split()[1] == b"0" * 16
    assert late.timed_out and late.exit_code == 137 and left.stdout == b"1\n" and end.stdout == b"0\n"


def test_a_fork_bomb_is_ended(inside):
    """Either its processes are killed, or, where no process can start that kills them, the container."""

    async def body(sandbox):
        try:
            await shell(sandbox, "while :; do (sleep 100 &) ; done", timeout_s=3)
            return (await shell(sandbox, "pidof sleep | wc -w")).stdout
        except SandboxLimitError:
            return b"limit"

    assert inside(body) in (b"0\n", b"limit")


def test_relay_and_setup(inside):
    from skyrl_megatron_agents.sandboxes.relay import Relay

    async def body(sandbox):
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nhere")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with Relay(sandbox, *server.sockets[0].getsockname()) as relay:
            answered = await shell(
                sandbox, f"wget -q -O - {relay.url}/x; tool; cat /opt/setup/stamp; rm -f /opt/setup/stamp"
            )
        server.close()
        return answered

    tool = "mkdir -p bin; printf '#!/bin/sh\\necho tool\\n' > bin/tool; chmod +x bin/tool"
    setup = f"{tool}; cat /proc/sys/kernel/random/uuid > stamp"
    first, second = (inside(body, relay=True, setup=setup) for _ in range(2))
    assert first.stdout.startswith(b"heretool\n") and first.stdout == second.stdout and b"Read-only" in first.stderr


RUN = """
import asyncio, sys
from pathlib import Path
from skyrl_megatron_agents.sandboxes.sandbox import SandboxSpec
from skyrl_megatron_agents.sandboxes.sandbox_queue import make_provider

async def main():
    provider = make_provider("docker", engine=Path(sys.argv[1]), home=Path(sys.argv[2]))
    sandbox = await provider.start(SandboxSpec(image=sys.argv[3]))
    print("started", flush=True)
    await sandbox.run(["sleep", "321"], timeout_s=500)

asyncio.run(main())
"""


def test_a_task_with_a_dockerfile(provider, tmp_path):
    """The engine builds what namespaces cannot follow, once; agent and tests are root in it, and share what it is."""
    from skyrl_megatron_agents.attempt import AgentCommand, attempt
    from skyrl_megatron_agents.task import read_task

    for name, text in (
        ("instruction.md", "Write the name of the machine's owner."),
        ("task.toml", "[agent]\ntimeout_sec = 20\n[environment]\nmemory_mb = 64\nstorage_mb = 16\n"),
        ("environment/Dockerfile", f"FROM {IMAGE}\nWORKDIR /app\nCOPY owner /etc/owner\nENV PATH=/app:$PATH\n"),
        ("environment/owner", "mill\n"),
        ("tests/test.sh", "#!/bin/sh\ncmp owner /etc/owner && echo 1 > /logs/verifier/reward.txt\n"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    task, began = read_task(tmp_path), time.monotonic()

    def try_it(command):
        return asyncio.run(attempt(task, AgentCommand(["sh", "-c", command]), SandboxQueue(provider, at_once=1)))

    solved = try_it("id -u; pwd; echo $PATH; cp /etc/owner .; echo mine > /etc/other; (sleep 60 &) ; ls /tests")
    assert (solved.outcome, solved.reward) == ("solved", 1.0), solved
    assert solved.agent.stdout.decode().split()[:2] == ["0", "/app"] and b"No such file" in solved.agent.stderr
    assert solved.agent.stdout.decode().split()[2].startswith("/app:")
    assert time.monotonic() - began < 60, "what the agent left has ended"
    failed = try_it("cat /etc/other")
    assert (failed.outcome, failed.reward) == ("infrastructure", None), "these tests leave nothing if they fail"
    assert failed.agent.exit_code == 1, "a container of its own"
    (tmp_path / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN no-such-program\n")
    broken = try_it("true")
    assert broken.outcome == "infrastructure" and "/build" in broken.reason, broken


def test_a_killed_run_leaves_nothing(engine, provider, tmp_path):
    words = [sys.executable, "-c", RUN, str(engine), str(tmp_path), IMAGE]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout.readline() == "started\n"
        finally:
            run.kill()
    second = make_provider("docker", engine=engine, home=tmp_path)
    left = asyncio.run(second.call("GET", "/containers/json?all=true"))
    asyncio.run(second.close())
    assert not left and list((tmp_path / "runs").iterdir()) == []


def test_an_engine_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(SandboxError, match="does not answer"):
        make_provider("docker", engine=tmp_path / "none.sock", home=tmp_path)
