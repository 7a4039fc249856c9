"""Task folders of Harbor: read as they are, run in sandboxes, and refused by key or line where a sandbox cannot."""

import asyncio
import sys

import pytest

from skyrl_megatron.errors import DataError, SandboxError
from skyrl_megatron_agents.attempt import AgentCommand, attempt
from skyrl_megatron_agents.sandboxes.dockerfile import read_dockerfile, working_folder
from skyrl_megatron_agents.sandboxes.sandbox_queue import SandboxQueue, make_provider
from skyrl_megatron_agents.task import read_task, reward_of

MIB = 1 << 20
FILES = {
    "instruction.md": "<!-- benchmark data, canary GUID 7 -->\n\nLet hello.sh print 'hello', to /data/out.txt.\n",
    "task.toml": """
version = "1.0"
[metadata]
author_name = "someone"
[agent]
timeout_sec = 20.0
[verifier]
timeout_sec = 30.0
env = {WANTED = "${WANTED:-hello}"}
[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 128
storage = "32M"
env = {PLACE = "/data"}
""",
    "environment/Dockerfile": """
# Comments and continued lines are a Dockerfile's.
FROM python:3.12-slim
ARG NAME=hello
ENV GREETING="${NAME} you" \\
    EMPTY=
WORKDIR /app
COPY scripts/ ./scripts/
COPY --chmod=755 hello.sh .
RUN mkdir -p /data && \\
    echo "$GREETING" > /data/seed.txt
CMD ["bash"]
""",
    "environment/hello.sh": "#!/bin/sh\necho nothing\n",
    "environment/scripts/one.txt": "1\n",
    "solution/solve.sh": "printf '#!/bin/sh\\necho hello\\n' > hello.sh; ./hello.sh > $PLACE/out.txt\n",
    "tests/test.sh": """#!/bin/bash
cd /app && python3 /tests/look.py > /logs/verifier/report.txt
echo $? > /tmp/code
if [ $(cat /tmp/code) -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
""",
    "tests/look.py": "import os; assert open('/data/out.txt').read().strip() == os.environ['WANTED']\n",
}
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


def write(folder, **changed):
    for name, text in {**FILES, **changed}.items():
        if text is None:
            (folder / name).unlink(missing_ok=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "task")


@pytest.fixture(scope="module")
def provider(tmp_path_factory):
    try:
        made = make_provider("namespaces", home=tmp_path_factory.mktemp("home"))
    except SandboxError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())


def try_it(provider, folder, command, **settings):
    agent = AgentCommand(["sh", "-c", command], mounts={"/solution": folder / "solution"})
    return asyncio.run(attempt(read_task(folder), agent, SandboxQueue(provider, at_once=1), **settings))


def test_what_is_read(folder):
    task = read_task(folder)
    assert task.text == "Let hello.sh print 'hello', to /data/out.txt.\n"
    assert (task.agent_timeout_s, task.tests_timeout_s, task.folder) == (20.0, 30.0, "/app")
    assert (task.spec.limits.cpus, task.spec.limits.memory, task.spec.limits.disk) == (1, 128 * MIB, 32 * MIB)
    assert task.environment == {"GREETING": "hello you", "EMPTY": "", "PLACE": "/data"}
    assert task.tests_environment == {"WANTED": "hello"} and set(task.tests) == {"test.sh", "look.py"}
    assert task.spec.image == str(folder / "environment") and "/logs/verifier" in task.spec.folders


@pytest.mark.process
@LINUX
def test_outcomes(provider, folder):
    """The reward is what the tests leave, and nothing that the agent left there before."""
    solved = try_it(provider, folder, "bash /solution/solve.sh")
    assert (solved.outcome, solved.reward, solved.reason) == ("solved", 1.0, "tests pass"), solved
    failed = try_it(provider, folder, "cat hello.sh scripts/one.txt $PLACE/seed.txt")
    assert failed.agent.stdout == b"#!/bin/sh\necho nothing\n1\nhello you\n", failed
    assert (failed.outcome, failed.reward) == ("failed", 0.0) and failed.tests.exit_code == 0
    forged = "echo 1 > /logs/verifier/reward.txt; ls /tests; mkdir /tests; ln -sfn /app /logs/verifier/x"
    forged = try_it(provider, folder, forged + "; (while sleep 0.01; do echo 1 > /logs/verifier/reward.txt; done) &")
    assert (forged.outcome, forged.reward) == ("failed", 0.0) and b"No such file" in forged.agent.stderr
    late = try_it(provider, write(folder, **{"task.toml": "[agent]\ntimeout_sec = 0.5\n"}), "sleep 50")
    assert (late.outcome, late.reward, late.tests) == ("timed out", None, None)
    full = try_it(provider, folder, "true", context_full=lambda: True)
    assert (full.outcome, full.reward, full.tests) == ("context full", None, None)


ESCAPES = {
    "rights of the rewards": "chmod 000 /logs /logs/verifier",
    "another folder for them": "rm -rf /logs/verifier; ln -s /app /logs/verifier; chmod 0 /app",
    "no folder to start in": "rm -rf /app /data",
    "no room for a reward": "cat /dev/zero > /app/full; cat /dev/zero > /tmp/full",
}


@pytest.mark.process
@LINUX
@pytest.mark.parametrize("how", ESCAPES)
def test_what_an_agent_brings_about_is_its_failure(how, provider, folder):
    result = try_it(provider, folder, ESCAPES[how])
    assert (result.outcome, result.reward) == ("failed", 0.0), result


SOLUTIONS = {
    "ends the tests": "echo 1 > /logs/verifier/reward.txt; kill -9 $PPID",
    "the other file": "echo 1 > /logs/verifier/reward.json",
    "before the tests": "echo 1 > /logs/verifier/reward.txt",
}
PLANTED = """
site=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $site bin
echo 'open("/logs/verifier/planted", "w")' | tee $site/usercustomize.py > $site/sitecustomize.py
printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt; kill -9 $PPID\n' > bin/python3
chmod +x bin/python3; cp bin/python3 bin/sh; cp bin/python3 bin/bash; ln -sfn /app/bin /bin; cp bin/sh /usr/bin/sh
"""


@pytest.mark.process
@LINUX
@pytest.mark.parametrize("how", SOLUTIONS)
def test_a_solution_that_leaves_a_reward(how, provider, folder):
    """While the tests run it, before they leave theirs."""
    test = "#!/bin/bash\nsh /app/hello.sh\nif [ -e /data/out.txt ]; then r=1; else r=0; fi\n"
    write(folder, **{"tests/test.sh": f"{test}echo $r > /logs/verifier/reward.txt\n"})
    result = try_it(provider, folder, f"echo '{SOLUTIONS[how]}' > hello.sh")
    assert (result.outcome, result.reward) == ("failed", 0.0), result
    assert try_it(provider, folder, "echo true > hello.sh; touch /data/out.txt").reward == 1.0


@pytest.mark.process
@LINUX
def test_programs_of_tests_in_place_are_out_of_reach(provider, folder):
    """Also those of a PATH that begins with a folder of the agent's; its home is empty."""
    made = FILES["environment/Dockerfile"].replace("CMD", "ENV PATH=/app/bin:$PATH\nCMD")
    test = "python3 -c 0; [ -z \"$(ls -A ~)\" ] && echo $PATH; ls /logs/verifier; sh -c 'exit 0'; echo 0 > $R"
    settings = "[verifier]\nenv = {R = '/logs/verifier/reward.txt'}\n"
    write(folder, **{"environment/Dockerfile": made, "tests/test.sh": f"#!/bin/bash\n{test}\n", "task.toml": settings})
    result = try_it(provider, folder, PLANTED)
    assert (result.outcome, result.reward) == ("failed", 0.0), result
    assert result.tests.stdout.decode() == "/usr/local/bin:/usr/bin:/bin:/app/bin\n", "and usercustomize did not run"


@pytest.mark.process
@LINUX
def test_names_that_are_lists_hand_in_nothing_else(provider, folder):
    """A file with a new line in its name is not two files."""
    settings = 'artifacts = ["/app"]\n[verifier]\nenvironment_mode = "separate"\n'
    test = (
        "ls /app /tmp; [ -e /tmp/secret ] && echo 1 > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt"
    )
    write(folder, **{"task.toml": settings, "tests/test.sh": test})
    leaves = (
        "echo 1 | tee /tmp/secret > /logs/verifier/reward.json; touch kept; d=$(printf 'a\\n/tmp'); mkdir -p \"$d\""
    )
    result = try_it(provider, folder, f'{leaves}; touch "$d/secret"; echo 1 > back\\\\slash')
    assert (result.outcome, result.reward) == ("failed", 0.0), result
    assert b"kept" in result.tests.stdout and b"secret" not in result.tests.stdout


@pytest.mark.process
@LINUX
def test_rewards_of_tests(provider, folder):
    part = 'echo \'{"reward": 0.25, "style": 1}\' > /logs/verifier/reward.json'
    made = try_it(provider, write(folder, **{"tests/test.sh": part}), "true")
    assert (made.outcome, made.reward) == ("partly solved", 0.25), made
    made = try_it(provider, write(folder, **{"tests/test.sh": "echo no such package >&2; exit 3"}), "true")
    assert (made.outcome, made.reward) == ("infrastructure", None)
    assert made.reason.startswith("the tests left no reward.txt") and made.reason.endswith("code 3: no such package")
    endless = write(folder, **{"tests/test.sh": "sleep 60", "task.toml": "[verifier]\ntimeout_sec = 0.5\n"})
    made = try_it(provider, endless, "true")
    assert (made.outcome, made.reward, made.reason) == ("failed", 0.0, "the tests took more than 0.5 s")


@pytest.mark.process
@LINUX
@pytest.mark.parametrize("bundled", [False, True])
def test_tests_with_a_place_of_their_own(bundled, provider, folder):
    """They see the artifacts at their paths, and nothing else that the agent left."""
    settings = (
        'artifacts = ["/data/out.txt", {source = "deep", destination = "x"}, "/missing"]\n'
        '[verifier]\nenvironment_mode = "separate"\n'
    )
    test = (
        "[ -z $LEFT ] && [ ! -e /data/more ] && [ ! -e /tmp/left ] && [ $(cat /logs/artifacts/a) = 1 ] &&"
        " [ $(cat /app/deep/er/b) = 2 ] && ls /app && cp /data/out.txt /logs/verifier/reward.txt"
    )
    place = "FROM debian\nWORKDIR /place\nCOPY . /tests/\nENV PLACE=own\n" if bundled else None
    write(folder, **{"task.toml": settings, "tests/test.sh": test, "tests/Dockerfile": place})
    task = read_task(folder)
    assert bool(task.tests) is not bundled and task.place.folder == ("/place" if bundled else "/app")
    leaves = "echo 0.5 > /data/out.txt; echo 1 | tee /tmp/left /data/more > /logs/artifacts/a; mkdir -p deep/er"
    made = try_it(provider, folder, f"{leaves}; echo 2 > deep/er/b; echo 1 > /logs/verifier/reward.txt")
    assert (made.outcome, made.reward) == ("partly solved", 0.5), made
    assert made.tests.stdout.decode().split() == (["deep"] if bundled else ["deep", "hello.sh", "scripts"])
    nothing = try_it(provider, folder, "true")
    assert (nothing.outcome, nothing.reward) == ("infrastructure", None), "these tests leave nothing then"


@pytest.mark.process
@LINUX
def test_a_line_that_namespaces_cannot_follow_is_named(provider, folder):
    """Also one that fails only when it runs; and it is no reward."""
    made = FILES["environment/Dockerfile"]
    for line, why in (
        ("RUN touch /etc/made", "ended with code 1 in namespaces"),
        ("COPY hello.sh /usr/local/bin/", "/usr/local/bin/hello.sh belongs to the system"),
    ):
        result = try_it(provider, write(folder, **{"environment/Dockerfile": made + line}), "true")
        assert (result.outcome, result.reward) == ("infrastructure", None)
        assert f"environment/Dockerfile:13: {line}" in result.reason and why in result.reason, result.reason
        assert "use generator.agent.sandbox=docker" in result.reason


@pytest.mark.parametrize(
    ("lines", "number", "why"),
    [
        ("FROM swebench/sweb.eval:1", 1, "nothing here replaces image swebench/sweb.eval:1"),
        ("FROM ubuntu AS one\nFROM ubuntu", 2, "several stages"),
        ("FROM ubuntu\nCOPY --from=uv /uv /bin/uv", 2, "from another image"),
        ("FROM ubuntu\n\nADD https://x.y/z /app/z", 3, "needs a network"),
        ("FROM ubuntu\nRUN <<EOF", 2, "here-document"),
        ('FROM ubuntu\nSHELL ["bash", "-c"]', 2, "not supported"),
        ("FROM ubuntu\nCOPY missing.txt /app/", 2, "missing.txt is not in"),
    ],
)
def test_lines_without_a_sandbox(lines, number, why, tmp_path):
    (tmp_path / "Dockerfile").write_text(lines)
    with pytest.raises(SandboxError, match=rf"Dockerfile:{number}: .*{why}"):
        read_dockerfile(tmp_path)


def test_a_dockerfile_as_a_builder_reads_it(tmp_path):
    for name in ("a.txt", "b.pyc", "sub/c.txt", "sub/d.pyc", "keep.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text("# caches\n*.pyc\nsub/*.pyc\nDockerfile\n.dockerignore\n!keep.pyc\n")
    (tmp_path / "Dockerfile").write_text(
        "ARG TAG=24.04\nFROM docker.io/library/ubuntu:${TAG}\nARG ROOT=/srv/site\nENV PATH=/app/bin:$PATH\n"
        "WORKDIR $ROOT\nWORKDIR deep\nCOPY . here\nCOPY a.txt sub/c.txt /opt/tool/\nCOPY a.txt /app/renamed\n"
        'COPY ["a.txt", "/home/user/with space"]\nRUN ["cp", "-r", "/app", "/mnt/copy of"]\n'
    )
    plan = read_dockerfile(tmp_path)
    copied = [dict(step.copied) for step in plan.steps if step.copied]
    assert copied[0] == {name: f"/srv/site/deep/here/{name}" for name in ("a.txt", "keep.pyc", "sub/c.txt")}, (
        "without what .dockerignore names"
    )
    assert copied[1] == {"a.txt": "/opt/tool/a.txt", "sub/c.txt": "/opt/tool/c.txt"}
    assert copied[2:] == [{"a.txt": "/app/renamed"}, {"a.txt": "/home/user/with space"}]
    assert [step.command for step in plan.steps if step.command][-1] == "cp -r /app '/mnt/copy of'"
    assert set(plan.folders) >= {"/app", "/home/user", "/opt/tool", "/srv/site"} and plan.folder == "/srv/site/deep"
    assert plan.environment["PATH"] == "/app/bin:/usr/local/bin:/usr/bin:/bin"
    assert working_folder(tmp_path / "Dockerfile") == (plan.folder, plan.environment)
    (tmp_path / "Dockerfile").write_text("FROM a/b:1\nWORKDIR /x\nFROM c/d\nRUN make\n")
    assert working_folder(tmp_path / "Dockerfile") == ("", {}), "that of the base of the last stage"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("task.toml", '[[steps]]\nname = "one"', "task.toml: steps is not supported"),
        ("task.toml", '[environment]\nos = "windows"', "environment.os is not supported"),
        ("task.toml", "[environment]\ngpus = 1", "environment.gpus is not supported"),
        ("task.toml", 'artifacts = [{source = "/a", service = "db"}]', "artifacts.service is not supported"),
        ("task.toml", '[agent]\nuser = "someone"', "agent.user is not supported"),
        ("task.toml", '[environment]\nmemory = "much"', "environment.memory = 'much' is no size"),
        ("task.toml", '[verifier]\nenv = {KEY = "${OPENAI_API_KEY}"}', "verifier.env asks for OPENAI_API_KEY"),
        ("task.toml", "[agent", "task.toml of a task cannot be read"),
        ("environment/docker-compose.yaml", "services: {}", "environment/docker-compose.yaml is not supported"),
        ("tests/test.sh", None, "tests/test.sh of a task is missing"),
        ("environment/Dockerfile", None, "Dockerfile is missing, and .* has no environment.docker_image"),
    ],
)
def test_what_no_sandbox_gives_is_named(name, text, why, tmp_path):
    with pytest.raises(DataError, match=why):
        read_task(write(tmp_path / "task", **{name: text}))


def test_a_prebuilt_image_gets_the_files_of_its_folder(tmp_path):
    settings = '[environment]\ndocker_image = "registry/image:1"\nworkdir = "/testbed"\n'
    task = read_task(write(tmp_path / "task", **{"environment/Dockerfile": None, "task.toml": settings}))
    assert (task.spec.image, task.folder) == ("registry/image:1", "/testbed") and "/testbed" in task.spec.folders
    assert set(task.files) == {"hello.sh", "scripts/one.txt"}


@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({"reward.txt": b"1\n"}, 1.0),
        ({"reward.txt": b"1", "reward.json": b'{"reward": 0.5, "b": 1}'}, 0.5),
        ({"reward.json": b'{"accuracy": 0.75}'}, 0.75),
        ({"reward.json": b"-2"}, -2.0),
    ],
)
def test_a_reward(files, reward):
    assert reward_of(files) == reward


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"reward.txt": b""},
        {"reward.txt": b"nan"},
        {"reward.json": b'{"a": 1, "b": 2}'},
        {"reward.json": b'{"reward": "1"}'},
        {"reward.json": b"Infinity"},
        {"reward.json": b"[1]"},
    ],
)
def test_no_reward(files):
    with pytest.raises(SandboxError, match="reward"):
        reward_of(files)
