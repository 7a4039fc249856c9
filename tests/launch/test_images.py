"""``docker/``: linted, pinned, whole; what it starts; and scripts that shellcheck passes."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
HOME = "/opt/skyrl-megatron/"


def in_context(path):
    """Whether images are built from a path of the checkout: the last line of .dockerignore that fits it says so."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name = line.removeprefix("!")
        anywhere = name.removeprefix("**/")
        pattern = re.escape(anywhere).replace(r"\*", "[^/]*")
        if re.match(rf"{'(.*/)?' if anywhere != name else ''}{pattern}(/|$)", path):
            kept = line.startswith("!")
    return kept


@pytest.mark.process
def test_an_image_gets_what_runs_and_no_more():
    tracked = subprocess.run(
        ["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True
    ).stdout.split()
    needed = ("skyrl_megatron/", "bridges/", "launch/", "pyproject.toml", "docker/entrypoint.sh")
    for path in tracked:
        if path.startswith(("tests/", "benchmarks/", "docs/", ".git")):
            assert not in_context(path), path
        elif path.startswith(needed):
            assert in_context(path), path
    assert not in_context(".venv/bin/python") and not in_context("skyrl_megatron/__pycache__/errors.pyc")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_paths_of_a_dockerfile_are_there(file):
    """Everything of the checkout that it copies, runs or starts."""
    text = file.read_text()
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in line.split()]
    named = re.findall(rf"{HOME}([\w/.]+)", text) + re.findall(r"(?<![\w/.])launch/[\w/.]+", text)
    made = {".venv/bin", ".venv/bin/ray"}
    for path in {*copied, *named} - made:
        assert (ROOT / path).exists(), path
        assert path == "." or in_context(path), f"{path} is left out by .dockerignore"
    assert "docker/entrypoint.sh" in named and "launch/setup.sh" in named
    for line in ("USER 1000:1000", "HEALTHCHECK", "org.opencontainers.image.revision"):
        assert line in text, line


def test_what_is_pinned_is_locked():
    """Packages with a version are those of the lock files; bases are pinned by digest, and one for all images."""
    locks = {
        line.split()[0]
        for file in (ROOT / "launch" / "requirements").glob("*.txt")
        for line in file.open()
        if "==" in line
    }
    files = [*DOCKERFILES, *DOCKER.glob("*.sh"), *DOCKER.glob("*.yaml"), *(ROOT / "launch" / "kubernetes").iterdir()]
    for file in files:
        for pin in re.findall(r"[\w.\[\]-]+==[\w.]+", file.read_text()):
            assert pin.endswith("==VERSION") or pin in locks, f"{file.name}: {pin}"
    bases = {line for file in DOCKERFILES for line in re.findall(r"^ARG BASE=(.*)$", file.read_text(), re.MULTILINE)}
    assert len(bases) == 1 and re.fullmatch(r"docker\.io/\S+:[\w.-]+@sha256:[0-9a-f]{64}", bases.pop())


def test_the_dashboard_adds_to_both_environments():
    """Neither lock has another version of its packages, which are installed without looking at what they need."""

    def locked(name):
        lines = (ROOT / "launch" / "requirements" / name).read_text().splitlines()
        return dict(line.split(" ")[0].split("==") for line in lines if re.match(r"[\w.-]+==", line))

    added = locked("dashboard.txt")
    assert {"aiohttp-cors", "opencensus"} <= set(added)
    for lock in ("cpu.txt", "gpu.txt"):
        there = locked(lock)
        assert {name: there[name] for name in added if name in there and there[name] != added[name]} == {}


def entrypoint(*args, **env):
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SKYRL_"))}
    script = DOCKER / "entrypoint.sh"
    return subprocess.run([script, *args], env=variables | env, capture_output=True, text=True, timeout=60)


@pytest.mark.process
def test_entrypoint_runs_a_command():
    done = entrypoint("echo", "here", "it", "is")
    assert done.returncode == 0 and done.stdout == "here it is\n"
    assert entrypoint("health").returncode == 0
    assert "SKYRL_CLUSTER=DIR" in entrypoint("--help").stdout


@pytest.mark.process
def test_entrypoint_says_what_a_cluster_needs(tmp_path):
    done = entrypoint("echo", SKYRL_HOSTS="2")
    assert done.returncode == 2 and "set SKYRL_CLUSTER" in done.stderr
    (tmp_path / "file").touch()
    done = entrypoint("echo", SKYRL_HOSTS="2", SKYRL_CLUSTER=str(tmp_path / "file"))
    assert done.returncode == 2 and f"SKYRL_CLUSTER={tmp_path / 'file'} cannot be made" in done.stderr


@pytest.mark.process
def test_entrypoint_starts_over_after_a_cluster_that_ended(tmp_path):
    """The first host clears what an earlier start left; one that is no first host leaves it."""
    cluster = tmp_path / "cluster"
    cluster.mkdir()
    (cluster / "ended").touch()
    lonely = {"SKYRL_HOSTS": "2", "SKYRL_CLUSTER": str(cluster), "SKYRL_INTERFACE": "none0"}
    assert entrypoint("echo", SKYRL_HOST="1", **lonely).returncode != 0 and (cluster / "ended").exists()
    done = entrypoint("echo", SKYRL_HOST="0", **lonely)
    assert done.returncode != 0 and "no interface none0" in done.stderr
    assert "health" not in entrypoint("health", SKYRL_HOST="0", **lonely).stdout
    assert entrypoint("health", SKYRL_HOST="0", **lonely).returncode != 0, "no cluster is there"


def build(tmp_path, *args, engine="docker", script='printf "%s\\n" "$@"'):
    """Run build.sh where ``engine``, which stands for the machine's, only notes what it is asked for."""
    (tmp_path / engine).write_text(f"#!/bin/bash\n{script}\n")
    (tmp_path / engine).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    return subprocess.run([DOCKER / "build.sh", *args], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.process
@pytest.mark.parametrize("engine", ["docker", "podman", "buildah"])
def test_build_asks_the_engine(tmp_path, engine):
    done = build(tmp_path, "cuda", "--engine", engine, "--build-arg", "MAX_JOBS=2", "--no-cache", engine=engine)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[0] == "build" and str(DOCKER / "Dockerfile.cuda") in words and words[-2] == str(ROOT)
    assert "MAX_JOBS=2" in words and "--no-cache" in words and "skyrl-megatron:0.1.0-cuda" in words
    assert (engine == "docker") != ("--format" in words), "health checks need docker's format"


@pytest.mark.process
@pytest.mark.parametrize(
    "args, says",
    [([], "give cpu or cuda"), (["rocm"], "unknown argument 'rocm'"), (["cpu", "--engine", "kaniko"], "give docker")],
    ids=str,
)
def test_build_says_what_is_wrong(tmp_path, args, says):
    done = build(tmp_path, *args)
    assert done.returncode == 2 and says in done.stderr


@pytest.mark.process
def test_a_docker_without_its_daemon_is_one_line(tmp_path):
    """The engine stands for one whose daemon does not run, which this machine's may do."""
    done = build(tmp_path, "cpu", "--engine", "docker", script="printf 'line %s\\n' 1 2 3 4 5 >&2; exit 1")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "docker's daemon does not answer: start it" in line and not done.stdout


def test_compose_file_is_a_cluster():
    from skyrl_megatron.config import SkyRLTrainConfig

    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    hosts = compose["services"]
    variables = [host["environment"] for host in hosts.values()]
    assert sorted(each["SKYRL_HOST"] for each in variables) == list(range(len(hosts)))
    assert {each["SKYRL_HOSTS"] for each in variables} == {len(hosts)} and len(
        {each["SKYRL_CLUSTER"] for each in variables}
    ) == 1
    for name, host in hosts.items():
        assert host["hostname"] == name and {mount.split(":")[0] for mount in host["volumes"]} <= set(
            compose["volumes"]
        )
    [first] = [name for name, host in hosts.items() if host["environment"]["SKYRL_HOST"] == 0]
    others = [host for name, host in hosts.items() if name != first]
    assert all(host["depends_on"] == {first: {"condition": "service_healthy"}} for host in others)
    cfg = SkyRLTrainConfig.from_cli_overrides(hosts[first]["command"])
    assert cfg.trainer.placement.policy_num_nodes == len(hosts)
