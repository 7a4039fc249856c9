"""Task folders of others: nothing outside of them is read, nothing in them hangs or fills the memory, and whatever is
wrong is one error that names the file."""

import json
import os
import random
import socket
import tarfile

import pytest

from skyrl_megatron.errors import DataError, SandboxError
from skyrl_megatron_agents.sandboxes.dockerfile import fingerprint, packed, read_dockerfile, working_folder
from skyrl_megatron_agents.sandboxes.sandbox import SandboxSpec
from skyrl_megatron_agents.task import read_task
from tests.agents.test_harbor_tasks import FILES, write

SECRET = "of-the-user"
OWN = {
    "task.md": "Write add in sums.py.",
    "task.toml": '[tests]\ncommand = ["python3", "-I", "/tests/run.py"]\nexpected = true\ntimeout_s = 3.5\n'
    "[agent]\ntimeout_s = 6\n[sandbox]\ncpus = 0.5\nmemory = 134217728\ndisk = 16777216\nprocesses = 9\n",
    "expected.txt": "5\n",
    "files/sums.py": "def add(a, b):\n    return a\n",
    "tests/run.py": "print(5)\n",
}
DOCKERFILE = FILES["environment/Dockerfile"]


@pytest.fixture
def secret(tmp_path):
    """A folder of the user, outside of every task."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "key").write_text(SECRET)
    return folder


def write_own(folder):
    for name, text in OWN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def pipe(path, _):
    os.mkfifo(path)


def bound_socket(path, _):
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(path.parent, os.O_RDONLY)  # the names of sockets are short
        bound.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def device(path, _):
    path.symlink_to("/dev/zero")


def huge(path, _):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def link(path, secret):
    path.symlink_to(os.path.relpath(secret / "key", path.parent))


def link_to_a_folder(path, secret):
    path.symlink_to(secret)


KINDS = [pipe, bound_socket, device, huge, link, link_to_a_folder]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["task.md", "task.toml", "expected.txt", "files/sums.py", "files/new", "tests/run.py"]
)
def test_no_special_file_and_nothing_outside(name, kind, tmp_path, secret):
    folder = write_own(tmp_path / "task")
    (folder / name).unlink(missing_ok=True)
    kind(folder / name, secret)
    with pytest.raises(DataError, match=rf"task/{name.partition('/')[0]}") as error:
        read_task(folder)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["instruction.md", "environment/Dockerfile", "tests/test.sh"])
def test_no_special_file_of_harbor(name, kind, tmp_path, secret):
    folder = write(tmp_path / "task")
    (folder / name).unlink()
    kind(folder / name, secret)
    with pytest.raises(DataError, match="task/") as error:
        read_task(folder)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("name", ["files", "tests", "environment"])
def test_a_folder_that_is_a_link(name, tmp_path, secret):
    folder = write_own(tmp_path / "task") if name == "files" else write(tmp_path / "task")
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to(secret)
    with pytest.raises(DataError, match=f"task/{name} .*is a link: refused"):
        read_task(folder)


def test_links_within_a_task_are_its_files(tmp_path):
    folder = write_own(tmp_path / "task")
    (folder / "files" / "other.py").symlink_to("sums.py")
    assert read_task(folder).files["other.py"] == OWN["files/sums.py"].encode()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("COPY ../../home/key /app/", "leaves"),
        ("COPY scripts/../../../home /app/", "leaves"),
        ("COPY {secret}/key /app/", "is not in"),
        ("COPY linked /app/", "is a link to .*, which is not in"),
        ("COPY linked_folder /app/", "is a link to .*, which is not in"),
        ("COPY linked_folder/key /app/", "is not in"),
        ("COPY link*/k?y /app/", "is not in"),
        ("COPY circle /app/", "links in a circle"),
    ],
)
def test_a_copy_stays_in_its_context(line, why, tmp_path, secret):
    context = write(tmp_path / "task") / "environment"
    (context / "linked").symlink_to(secret / "key")
    (context / "linked_folder").symlink_to(secret)
    (context / "circle").symlink_to("circle")
    (context / "Dockerfile").write_text(f"FROM debian\n{line.format(secret=secret)}\n")
    with pytest.raises(SandboxError, match=rf"Dockerfile:2: .*{why}"):
        read_dockerfile(context)


def test_links_of_a_context_stay_links(tmp_path, secret):
    """They are part of its hash by where they lead, not by what is there."""
    context = write(tmp_path / "task") / "environment"
    (context / "scripts" / "linked").symlink_to(secret / "key")
    (context / "here").symlink_to("hello.sh")
    (context / "Dockerfile").write_text("FROM debian\nCOPY . /app/\nCOPY here /opt/tool/run\n")
    before = fingerprint(context)
    (secret / "key").write_text("other")
    assert fingerprint(context) == before
    *_, all_files, linked = read_dockerfile(context).steps
    assert linked.copied == {"hello.sh": "/opt/tool/run"}, "as a builder, a source that is a link is what it leads to"
    archive = tmp_path / "packed.tar"
    for names in (None, all_files.copied):
        archive.write_bytes(packed(context, names))
        with tarfile.open(archive) as opened:
            links = {entry.name.rpartition("/")[2]: entry.linkname for entry in opened if entry.issym()}
            assert links == {"linked": str(secret / "key"), "here": "hello.sh"}
        assert b"other" not in archive.read_bytes()
    os.mkfifo(context / "pipe")
    for read in (fingerprint, packed, read_dockerfile):
        with pytest.raises(SandboxError, match="is a pipe"):
            read(context)


@pytest.mark.parametrize(
    "image", ["/", "{secret}", "{secret}/x.tar", "~", "../home", "./../home", "a&fromSrc=http://b"]
)
def test_an_image_is_in_the_folder_or_allowed(image, tmp_path, secret):
    from skyrl_megatron.config.schema.generator import TaskEnvConfig

    (secret / "x.tar").touch()
    name = image.format(secret=secret)
    folder = write_own(tmp_path / "task")
    (folder / "task.toml").write_text(f'{OWN["task.toml"]}image = "{name}"\n')
    other = {"environment/Dockerfile": None, "task.toml": f'[environment]\ndocker_image = "{name}"\n'}
    for made in (folder, write(tmp_path / "other", **other)):
        with pytest.raises(
            DataError, match=r"image.* is (a path outside of the task's folder|'a&from.*the name of an)"
        ):
            read_task(made)
    assert read_task(folder, TaskEnvConfig(images=[name])).spec.image == name


def test_an_image_that_is_not_in_the_folder_is_told_with_its_place(tmp_path):
    folder = write_own(tmp_path / "task")
    (folder / "task.toml").write_text(f'{OWN["task.toml"]}image = "./x"\n')
    with pytest.raises(DataError) as refused:
        read_task(folder)
    where = f"a path in the task's folder, where nothing is ({folder / 'x'}): add the image, or correct the path;"
    assert f"image='./x' is {where} or list it in environment.skyrl_gym.task.images" in str(refused.value)


@pytest.mark.parametrize(
    ("target", "said"),
    [(".", r"a link to a folder \(\.\)"), ("none", r"a link to nothing \(none\)"), ("self", "loop")],
)
def test_a_link_to_no_file_is_one_line(tmp_path, target, said):
    folder = write(tmp_path / "task")
    (folder / "tests/self").symlink_to(target)
    with pytest.raises(DataError, match=said) as refused:
        read_task(folder)
    assert str(folder / "tests/self") in str(refused.value) and "Errno" not in str(refused.value)


def test_an_image_of_the_folder_is_no_other(tmp_path):
    folder = write_own(tmp_path / "task")
    (folder / "root").mkdir()
    settings = OWN["task.toml"]
    for name, image in (
        ("root", str(folder / "root")),
        ("./root", str(folder / "root")),
        ("python:3.12", "python:3.12"),
    ):
        (folder / "task.toml").write_text(f'{settings}image = "{name}"\n')
        assert read_task(folder).spec.image == image


@pytest.mark.parametrize("value", ["nan", "-inf", "0", "-1", "true", '"9"', "[9]", "{}", "1e400", "0x" + "f" * 9000])
@pytest.mark.parametrize("key", ["memory", "processes", "timeout_s"])
def test_limits_are_positive_numbers(key, value, tmp_path):
    folder = write_own(tmp_path / "task")
    lines = [f"{key} = {value}" if line.startswith(f"{key} =") else line for line in OWN["task.toml"].splitlines()]
    (folder / "task.toml").write_text("\n".join(lines))
    if value.startswith("0x"):
        assert read_task(folder).spec.limits.memory < 1 << 60, "lowered, as any number that is too large"
        return
    with pytest.raises(DataError, match=rf"task.toml: \w+.{key} is .* must be a positive number"):
        read_task(folder)


def test_limits_that_a_task_does_not_set(tmp_path):
    folder = write_own(tmp_path / "task")
    (folder / "task.toml").write_text('[tests]\ncommand = ["true"]\n')
    task = read_task(folder)
    assert (task.agent_timeout_s, task.tests_timeout_s, task.spec) == (600, 60, SandboxSpec())


def test_limits_of_a_task_are_at_most_the_runs(tmp_path):
    from skyrl_megatron.config.schema.generator import TaskEnvConfig

    folder = write_own(tmp_path / "task")
    large = "\n".join(
        f"{line.partition('=')[0]}= {10**15}" if "=" in line and line[-1].isdigit() else line
        for line in OWN["task.toml"].splitlines()
    )
    (folder / "task.toml").write_text(large)
    task = read_task(
        folder, TaskEnvConfig(max_cpus=2, max_memory=1000, max_disk=2000, max_processes=3, max_timeout_s=4)
    )
    limits = task.spec.limits
    assert (limits.cpus, limits.memory, limits.disk, limits.processes) == (2, 1000, 2000, 3)
    assert (task.agent_timeout_s, task.tests_timeout_s) == (4, 4)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = read_task(folder).spec.limits
    assert limits.memory + limits.disk <= machine and limits.cpus <= os.cpu_count() and limits.processes == 4096
    harbor = write(
        tmp_path / "harbor", **{"task.toml": f"[environment]\nmemory_mb = {10**15}\nstorage = '9999999G'\n"}
    )
    assert read_task(harbor).spec.limits.memory + read_task(harbor).spec.limits.disk <= machine


@pytest.mark.parametrize(
    "text",
    [
        "FROM debian\nENV A=aaaaaaaaaaaaaaaa\n" + "ENV A=$A$A$A$A\n" * 40,
        "FROM debian\nENV A=" + "a" * 60_000 + "\n" + "".join(f"ENV B{n}=$A\n" for n in range(60)),
        "FROM debian\nARG A=" + "a" * 60_000 + "\nRUN echo " + "$A" * 900 + "\n",
        "FROM debian\nRUN echo " + "${a:-" * 10_000 + "\n",
        "FROM debian\nRUN " + "a\\\n" * 60_000 + "b\n",
    ],
)
def test_a_dockerfile_that_grows(text, tmp_path):
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.raises(SandboxError, match=r"Dockerfile:\d+: .*more than"):
        read_dockerfile(tmp_path)


def test_a_canary_of_any_length(tmp_path):
    """Of many lines, and of one line that does not end as a comment."""
    for text in ("# canary\n" * 100_000 + "x", "<!--" + "canary" * 150_000):
        folder = write(tmp_path / "task", **{"instruction.md": text})
        assert read_task(folder).text == ("x" if text.startswith("#") else text)


VALUES = (
    "nan inf -1 0 1e400 true '' 'x' [] [1] {} '\\u0000' '../..' '/' 0xffffffffffffffffffffffff 1979-05-27 12:00:00"
).split()
VALUES += [
    "'${A}'",
    '"' + "9" * 5000 + '"',
    "[" * 3000 + "]" * 3000,
    "['a', {b = 1}]",
    '"\\u0000"',
    "{env = {A = []}}",
]
WORDS = [
    "\\",
    '"',
    "'",
    "[",
    '["a"',
    "[1, 2]",
    "--chmod=x",
    "--chmod=",
    "=",
    "$",
    "${",
    "\0",
    "**",
    "..",
    "/",
    "\ud7ff",
    "<<E",
]


def mutated(rng, text):
    """The text with one change: a value, a line, or some bytes."""
    lines = text.splitlines()
    at, kind = rng.randrange(len(lines)), rng.randrange(6)
    if kind == 0 and "=" in lines[at]:
        lines[at] = f"{lines[at].partition('=')[0]}= {rng.choice(VALUES)}"
    elif kind == 1:
        lines.insert(at, lines[rng.randrange(len(lines))])
    elif kind == 2:
        words = lines[at].split(" ")
        words[rng.randrange(len(words))] = rng.choice(WORDS)
        lines[at] = " ".join(words)
    elif kind == 3:
        del lines[at]
    elif kind == 4:
        word, _, rest = lines[at].partition(" ")
        lines[at] = f"{word}{rng.choice(['', ' ', '  ', chr(9)])}{rest[: rng.randrange(8)]}"
    made = bytearray("\n".join(lines).encode())
    if kind == 5:
        for _ in range(rng.randint(1, 4)):
            made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made)


def test_mutated_settings(tmp_path):
    """Each is read, or one error that names the file."""
    rng, outcomes = random.Random(5), {"read": 0, "refused": 0}
    settings = FILES["task.toml"] + 'artifacts = ["/a", {source = "b"}]\n'
    for number in range(300):
        name = ("own", "harbor")[number % 2]
        folder = tmp_path / name
        if number < 2:
            write_own(folder) if name == "own" else write(folder)
        (folder / "task.toml").write_bytes(mutated(rng, OWN["task.toml"] if name == "own" else settings))
        try:
            read_task(folder)
            outcomes["read"] += 1
        except DataError as error:
            assert "task.toml" in str(error) and len(str(error)) < 2000, error
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 50, outcomes


def test_mutated_dockerfiles(tmp_path):
    context = write(tmp_path / "task") / "environment"
    rng, outcomes = random.Random(6), {"read": 0, "refused": 0}
    lines = DOCKERFILE + 'COPY ["hello.sh", "/app/more"]\nRUN ["ls", "-l"]\nENV ONE 1\nARG TWO\nADD hello.sh /app/x\n'
    for _ in range(300):
        (context / "Dockerfile").write_bytes(mutated(rng, lines))
        for read in (read_dockerfile, lambda folder: working_folder(folder / "Dockerfile")):
            try:
                read(context)
                outcomes["read"] += 1
            except SandboxError as error:
                assert "Dockerfile" in str(error), error
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 50, outcomes


def test_rewards_of_any_content():
    from skyrl_megatron_agents.task import reward_of

    for content in (
        b"[" * 10_000,
        b"1" * 5000,
        b"1e999",
        b"{" * 10_000,
        b"true",
        json.dumps({"reward": 10**400}).encode(),
    ):
        with pytest.raises(SandboxError, match="has no reward"):
            reward_of({"reward.json": content})
