"""Attempts at tasks: their outcomes, hidden tests out of reach, the fair queue, and the tiny repositories."""

import asyncio
import contextlib
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyrl_megatron.errors import ConfigError, DataError, SandboxError
from skyrl_megatron_agents.attempt import AgentCommand, attempt
from skyrl_megatron_agents.sandboxes.sandbox import Limits, SandboxSpec, unpack
from skyrl_megatron_agents.sandboxes.sandbox_queue import SandboxQueue, default_at_once, make_provider
from skyrl_megatron_agents.task import Task, read_task

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")]
MIB = 1 << 20
SPEC = SandboxSpec(limits=Limits(memory=128 * MIB, disk=16 * MIB, processes=40))
MAKE = Path(__file__).resolve().parents[2] / "launch/examples/tiny_repos/make.py"


@pytest.fixture(scope="module")
def provider(tmp_path_factory):
    try:
        made = make_provider("namespaces", home=tmp_path_factory.mktemp("home"))
    except SandboxError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())


def task(**settings):
    given = {
        "name": "sum",
        "text": "Write add in sums.py.",
        "files": {"sums.py": b"def add(a, b):\n    return a\n"},
        "tests": {"run.py": b"import sys; sys.path.insert(0, '.'); from sums import add; print(add(2, 3))"},
        "command": ["python3", "-I", "/tests/run.py"],
        "expected": b"5\n",
        "spec": SPEC,
        "agent_timeout_s": 20.0,
    }
    return Task(**{**given, **settings})


def try_it(provider, command, given=None, **settings):
    queue = SandboxQueue(provider, at_once=2)
    agent = AgentCommand(["sh", "-c", command], settings.pop("environment", {}))
    return asyncio.run(attempt(given or task(), agent, queue, **settings))


RIGHT = "printf 'def add(a, b):\\n    return a + b\\n' > sums.py"


def test_solved_and_failed(provider):
    solved = try_it(provider, RIGHT)
    assert (solved.outcome, solved.reason) == ("solved", "tests pass"), solved
    assert solved.agent.exit_code == 0 and solved.tests.stdout == b"5\n" and set(solved.seconds) == {"agent", "tests"}
    assert unpack(solved.workspace)["sums.py"] == b"def add(a, b):\n    return a + b\n"
    failed = try_it(provider, "true")
    assert (failed.outcome, failed.reason) == ("failed", "the tests printed other results")
    broken = try_it(provider, "echo 'raise SystemExit(3)' > sums.py")
    assert (broken.outcome, broken.reason) == ("failed", "the tests ended with exit code 3")
    endless = try_it(provider, "echo 'while True: pass' > sums.py", task(tests_timeout_s=0.5))
    assert (endless.outcome, endless.reason) == ("failed", "the tests took more than 0.5 s")
    hungry = try_it(provider, "echo 'x = bytearray(1 << 30)' > sums.py")
    assert hungry.outcome == "failed" and hungry.tests is not None


def test_limits_of_the_agent(provider):
    late = try_it(provider, f"{RIGHT}; sleep 50", task(agent_timeout_s=0.5))
    assert (late.outcome, late.reason, late.tests) == ("timed out", "the agent took 0.5 s", None)
    full = try_it(provider, RIGHT, context_full=lambda: True)
    assert (full.outcome, full.tests) == ("context full", None)
    small = SandboxSpec(limits=Limits(memory=128 * MIB, disk=16 * MIB, archive=MIB))
    large = try_it(provider, f"{RIGHT}; head -c 2000000 /dev/zero > big", task(spec=small))
    assert large.outcome == "failed" and "more than 1,048,576 bytes" in large.reason and large.agent is not None
    filled = try_it(provider, f"{RIGHT}; cat /dev/zero > big")
    assert filled.outcome == "solved", "tests have room although the agent has none"


MANY = """
import socket, sys
host, port = sys.argv[1].removeprefix("http://").split(":")
held = [socket.create_connection((host, int(port))) for _ in range(70)]
for each in held:
    each.sendall(b"x")
print(b"".join(each.recv(1) for each in held).decode())
"""


def test_an_agent_has_the_connections_that_it_may(provider):
    """The server answers when all 70 are there."""

    async def tried():
        everyone = asyncio.Barrier(70)

        async def answer(reader, writer):
            await reader.readexactly(1)
            await everyone.wait()
            writer.write(b"y")

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        agent = AgentCommand(["python3", "-c", MANY, "{url}"], connections=70)
        queue = SandboxQueue(provider, at_once=2)
        return await attempt(task(), agent, queue, server=server.sockets[0].getsockname())

    assert asyncio.run(tried()).agent.stdout == b"y" * 70 + b"\n"


def test_what_fails_below_is_infrastructure(provider):
    assert try_it(provider, RIGHT, given=task(spec=SandboxSpec(image="/nowhere"))).outcome == "infrastructure"
    queue = SandboxQueue(provider, at_once=1)
    missing = asyncio.run(attempt(task(), AgentCommand(["no-such-agent"]), queue))
    assert missing.outcome == "infrastructure" and "no-such-agent" in missing.reason

    async def killed(times):
        running, keepers = asyncio.create_task(attempt(task(), AgentCommand(["sleep", "50"]), queue)), set()
        while len(keepers) < times and not running.done():
            for sandbox in [each for each in provider._alive if each._streams]:  # it has a request
                sandbox.keeper.kill()
                keepers.add(sandbox.keeper.pid)
            await asyncio.sleep(0.002)
        return await running

    result = asyncio.run(killed(2))
    assert result.outcome == "infrastructure" and "ended by itself" in result.reason, "the repeat ended so too"
    assert result.cause == "sandbox" and queue.counts.started == 3, "those two, and the one without a command"
    result = asyncio.run(killed(1))
    assert (result.outcome, result.reward, result.cause) == ("failed", 0.0, "files"), "the repeat did not"


DEEP = "import os\nfor _ in range(1500): os.mkdir('d' * 200), os.chdir('d' * 200)"
ESCAPES = {
    "folders deeper than a path": f'python3 -c "{DEEP}"',
    "sparse files": "for i in 1 2 3 4 5 6; do truncate -s 15M sparse$i; done",
    "no folder": "rm -rf /work /work/* /work/.*; ln -s /etc /work; chmod 0 /work",
    "every process": "kill -9 -1",
    "the parent": "kill -9 $PPID 1 $$",
    "odd files": "rm sums.py; mkfifo sums.py; ln -s /dev/zero other; python3 -c \"open(b'\\xff' * 200, 'w')\"",
    "a file that has no end": "rm sums.py; ln -s /dev/zero sums.py",
    "processes": "for i in $(seq 60); do setsid sleep 60 & done; kill -STOP -1",
}


@pytest.mark.parametrize("how", ESCAPES)
def test_what_an_agent_brings_about_is_its_failure(how, provider):
    """It has reward 0, and no way to have none."""
    small = SandboxSpec(limits=Limits(memory=128 * MIB, disk=16 * MIB, processes=40, archive=32 * MIB))
    result = try_it(provider, ESCAPES[how], task(spec=small, tests_timeout_s=10.0))
    assert (result.outcome, result.reward) == ("failed", 0.0), result


def test_hidden_tests_are_out_of_reach(provider):
    """While the agent runs they are nowhere; a process that it leaves does not see them; what it hands in cannot know
    what is right, and cannot end the tests early."""
    secret = b"print('hidden-7361')\n"
    hidden = task(tests={"run.py": task().tests["run.py"] + b"\n" + secret}, expected=b"5\nhidden-7361\n")
    seen = try_it(
        provider,
        "(while sleep 0.01; do cat /tests/* >> /work/stolen; done) & "
        "ls -d /tests /work/../tests; find / -xdev -newer /proc/self -name 'run.py' -print; "
        "grep -rs hidden-7361 /work /tmp /home /opt /etc /dev/shm; sleep 0.3; " + RIGHT,
        hidden,
    )
    assert seen.outcome == "solved" and b"No such file" in seen.agent.stderr
    assert b"hidden-7361" not in seen.agent.stdout + seen.workspace
    early = "import os; os.write(1, b'5\\n'); os._exit(0)"
    assert try_it(provider, f'echo "{early}" > sums.py', hidden).outcome == "failed"
    reads = "import builtins, re; text = open('/tests/run.py').read(); print(re.findall('[0-9]+', text)); os = 1"
    assert try_it(provider, f'echo "{reads}" > sums.py', hidden).outcome == "failed"
    shadowed = try_it(provider, "echo 'print(5); exit(0)' | tee site.py sys.py sitecustomize.py usercustomize.py")
    assert shadowed.outcome == "failed", "python -I reads nothing from the workspace by itself"


def test_an_agent_reaches_its_server_and_nothing_else(provider):
    """The agent gets its URL by the command and its key by the environment."""
    requests = []

    async def main():
        async def answer(reader, writer):
            requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + RIGHT.encode())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        program = (
            "import os, sys, subprocess, urllib.request as u\n"
            "headers = {'x-key': os.environ['OPENAI_API_KEY'], 'x-task': sys.argv[2]}\n"
            "r = u.Request(sys.argv[1] + '/v1', headers=headers)\n"
            "subprocess.run(['sh', '-c', u.urlopen(r, timeout=10).read()])"
        )
        agent = AgentCommand(["python3", "-c", program, "{url}", "{text}"], {"OPENAI_API_KEY": "key of {url}"})
        queue = SandboxQueue(provider, at_once=1)
        try:
            return await attempt(task(), agent, queue, server=server.sockets[0].getsockname())
        finally:
            server.close()

    result = asyncio.run(main())
    assert result.outcome == "solved", result
    (request,) = requests
    assert (
        "x-task: Write add in sums.py." in request.lower().replace("write", "Write") and "key of http://127" in request
    )


def test_groups_take_turns(provider):
    """A group of one that comes last waits for one attempt of the others, not for all."""
    order = []

    async def use(queue, group):
        async with queue.sandbox(SPEC, group) as sandbox:
            order.append(group)
            await sandbox.run(["true"], timeout_s=10)

    async def main():
        queue = SandboxQueue(provider, at_once=1, memory=150 * MIB)
        many = [asyncio.create_task(use(queue, "many")) for _ in range(4)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(use(queue, "few")) for _ in range(2)]
        await asyncio.gather(*many, *few)
        return queue.counts

    counts = asyncio.run(main())
    assert order == ["many", "few", "many", "few", "many", "many"]
    assert (counts.started, counts.failed, counts.most) == (6, 0, 1) and counts.waited_s > 0


def test_a_place_is_given_back(provider):
    """After a sandbox that does not start, after cancellation in any moment, and after a wait that took too long."""

    async def main():
        queue = SandboxQueue(provider, at_once=1, memory=150 * MIB, wait_s=0.3)
        bad = SandboxSpec(image="/nowhere", limits=SPEC.limits)
        with pytest.raises(SandboxError, match="neither host"):
            async with queue.sandbox(bad):
                raise AssertionError
        assert queue.counts.failed == 2
        with pytest.raises(SandboxError, match=r"exceeds the 157,286,400 of all"):
            async with queue.sandbox(SandboxSpec()):
                raise AssertionError
        async with queue.sandbox(SPEC, "a"):
            with pytest.raises(SandboxError, match=r"no sandbox was free within 0.3 s"):
                async with queue.sandbox(SPEC, "b"):
                    raise AssertionError
            waits = asyncio.create_task(queue.sandbox(SPEC, "c").__aenter__())
            await asyncio.sleep(0.05)
            waits.cancel()
        for delay in (0.0, 0.001, 0.01, 0.05, 0.1, 0.2):
            starts = asyncio.create_task(queue.sandbox(SPEC, "d").__aenter__())
            await asyncio.sleep(delay)
            starts.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                manager = await starts
                await manager.stop()
        queue._wait_s = 20.0
        assert queue._held.total() <= 1
        return queue

    queue = asyncio.run(main())
    deadline = time.monotonic() + 10
    while provider._alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not provider._alive and not queue._waiting
    with pytest.raises(ConfigError, match="at_once"):
        SandboxQueue(provider, at_once=0)
    assert default_at_once(Limits(cpus=0.01, memory=1 << 40)) == 1 <= default_at_once(SPEC.limits)


def test_a_task_folder(tmp_path):
    made = runpy.run_path(str(MAKE))
    (repository,) = made["repositories"](3, 1)
    made["write"](repository, tmp_path / "one")
    read = read_task(tmp_path / "one")
    assert read.text == repository.text and read.expected == repository.expected.encode()
    assert read.command == ["python3", "-I", "/tests/run.py"] and set(read.tests) == {"run.py", "cases.json"}
    assert (read.agent_timeout_s, read.tests_timeout_s, read.spec.limits.memory) == (120, 20, 256 * MIB)
    settings = tmp_path / "one" / "task.toml"
    settings.write_text(settings.read_text() + "\ncores = 3\n")
    with pytest.raises(DataError, match=r"task.toml: unknown sandbox.cores"):
        read_task(tmp_path / "one")
    settings.write_text("[tests]\n")
    with pytest.raises(DataError, match=r"tests.command is missing"):
        read_task(tmp_path / "one")
    with pytest.raises(DataError, match=r"two/task.toml of a task cannot be read"):
        read_task(tmp_path / "two")


def test_tiny_repositories_are_made_by_a_seed():
    make = runpy.run_path(str(MAKE))["repositories"]
    first = make(0, 20)
    assert first == make(0, 20) != make(1, 20)
    assert len({each.name for each in first}) == len({each.text for each in first}) == 20
    for each in first:
        broken, solution = each.files[f"{each.module}.py"], each.solution[f"{each.module}.py"]
        compile(broken, each.name, "exec"), compile(solution, each.name, "exec")
        assert broken != solution and each.function in solution and len(each.cases) == 7
        assert each.expected not in "".join(each.files.values())


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.full_matrix)])
def test_tiny_repositories_can_be_solved(count, tmp_path, provider):
    done = subprocess.run(
        [sys.executable, str(MAKE), str(tmp_path / "repos"), "--count", str(count), "--try"],
        env={"PYTHONPATH": str(MAKE.parents[3]), "SKYRL_MEGATRON_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("nothing: failed   solution: solved") == count
