"""A Dockerfile as a sandbox without a container engine can follow it.

:func:`read_dockerfile` reads the file of a build context. What the programs of this machine can stand in for is
followed: a plain base image, folders, copies of the context's files, environment variables, and ``RUN`` lines that
need neither a network nor the rights of root. The rest is an error that names the line.

Format: https://docs.docker.com/reference/dockerfile/
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import os
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from skyrl_megatron.errors import SandboxError

NAME = "Dockerfile"
FIX = "use generator.agent.sandbox=docker"
PLAIN = ("ubuntu", "debian", "python", "buildpack-deps", "bash", "busybox", "alpine")
"""Base images for which this machine's programs stand in. Their versions are not looked at."""
WITHOUT_EFFECT = ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME", "USER")
"""Instructions that change nothing in a sandbox: each command is given, and runs as the agent's user."""
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "dev", "proc", "sys")
"""Folders at the root that an agent cannot own."""
SHARED = ("opt", "home", "root", "var", "srv", "mnt")
"""Folders at the root of which an agent owns folders, but not the whole."""
_VARIABLE = re.compile(r"\\(.)|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
_PATH = re.compile(r"(?<![\w$.}:/-])/[\w.@+-]+(?:/[\w.@+-]+)*")


@dataclass(frozen=True, slots=True)
class BuildStep:
    """A line that makes files: ``copied`` (path in the context → path in the sandbox), or a shell command."""

    where: str
    """``Dockerfile:4: RUN make``, for errors."""
    copied: Mapping[str, str] = field(default_factory=dict)
    mode: int | None = None
    command: str = ""
    folder: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What a Dockerfile asks for. ``folders``: those that the agent has to own, without one below another."""

    folder: str
    environment: Mapping[str, str]
    steps: tuple[BuildStep, ...]
    folders: tuple[str, ...]


def instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, instruction and arguments. Comments are dropped and continued lines joined."""
    number, joined = 0, ""
    for at, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#") or (not stripped and not joined):
            continue
        number = number if joined else at
        if stripped.endswith("\\"):
            joined += stripped[:-1] + " "
            continue
        word, _, rest = (joined + stripped).partition(" ")
        joined = ""
        yield number, word.upper(), rest.strip()


def working_folder(file: Path) -> tuple[str, dict[str, str]]:
    """Return the last stage's WORKDIR ("" if it has none, so that of its base) and its ENV. Other lines may be
    anything."""
    folder = ""
    environment: dict[str, str] = {}
    arguments: dict[str, str] = {}
    for _, word, rest in instructions(file.read_text()):
        if word == "FROM":
            folder, environment = "", {}
        elif word == "WORKDIR":
            folder = _absolute(_filled(rest, arguments | environment), folder)
        elif word == "ENV":
            environment |= _pairs(rest, arguments | environment)
        elif word == "ARG":
            arguments |= _argument(rest)
    return folder, environment


def read_dockerfile(context: Path) -> BuildPlan:
    """Return the plan of ``context/Dockerfile``. Raises SandboxError that names the first line that needs a container
    engine, and why."""
    file = context / NAME
    folder, steps, paths, stages = "/", [], [], 0
    environment: dict[str, str] = {}
    arguments: dict[str, str] = {}
    for number, word, rest in instructions(file.read_text()):
        where = f"{file}:{number}: {word} {rest}"
        known = arguments | environment
        if "<<" in rest and word in ("RUN", "COPY", "ADD"):
            raise _unsupported(where, "it has a here-document")
        if word == "FROM":
            stages += 1
            image = _filled(next((each for each in rest.split() if not each.startswith("--")), ""), known)
            if stages > 1:
                raise _unsupported(where, "it has several stages")
            if not _is_plain(image):
                raise _unsupported(where, f"nothing here replaces image {image}")
        elif word == "WORKDIR":
            folder = _absolute(_filled(rest, known), folder)
            steps.append(BuildStep(where, command=f"mkdir -p {shlex.quote(folder)}"))
            paths.append(folder)
        elif word == "ENV":
            environment |= _pairs(rest, known)
        elif word == "ARG":
            arguments |= _argument(rest)
        elif word in ("COPY", "ADD"):
            step = _copy(context, where, word, _filled(rest, known), folder)
            steps.append(step)
            paths += [os.path.dirname(path) for path in step.copied.values()]
        elif word == "RUN":
            command = _shell(rest)
            steps.append(BuildStep(where, command=command, folder=folder, environment=dict(known)))
            paths += _PATH.findall(_filled(command, known))
        elif word not in WITHOUT_EFFECT:
            raise _unsupported(where, "it is not supported")
    if not stages:
        raise SandboxError(f"{file} has no FROM: add it")
    return BuildPlan(folder, environment, tuple(steps), tuple(own_folders(paths)))


def is_context(image: str) -> bool:
    """Return whether the name of an image is a folder with a Dockerfile."""
    return Path(image).expanduser().joinpath(NAME).is_file()


def fingerprint(context: Path) -> str:
    """Return a hash of all that a build can read: names, modes and contents."""
    made = hashlib.sha256()
    for path in sorted(context.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            made.update(f"{path.relative_to(context)}\0{path.stat().st_mode:o}\0{len(content)}\0".encode() + content)
    return made.hexdigest()


def packed(context: Path, names: Mapping[str, str] | None = None, mode: int | None = None) -> bytes:
    """Return files of a context as a tar archive: all of them, or those of ``names`` at the paths there."""
    if names is None:
        names = {str(path.relative_to(context)): "" for path in sorted(context.rglob("*"))}

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode = entry.mode if mode is None else mode
        return entry

    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, path in names.items():
            archive.add(context / name, arcname=path.lstrip("/") or name, recursive=False, filter=owned)
    return written.getvalue()


def _is_plain(image: str) -> bool:
    name = image.partition("@")[0]
    name = name.removeprefix("docker.io/").removeprefix("library/")
    return name.partition(":")[0] in PLAIN


def _shell(rest: str) -> str:
    """Return a RUN line as a command of a shell."""
    while rest.startswith("--"):  # --mount, --network, --security: caches and rights of a builder
        rest = rest.partition(" ")[2].lstrip()
    if rest.startswith("["):
        return shlex.join(json.loads(rest))
    return rest


def _copy(context: Path, where: str, word: str, rest: str, folder: str) -> BuildStep:
    """Return the files that a COPY or ADD copies."""
    flags = [each for each in rest.split() if each.startswith("--")]
    words = json.loads(rest) if rest.startswith("[") else [each for each in shlex.split(rest) if each not in flags]
    if any(each.startswith("--from") for each in flags):
        raise _unsupported(where, "it copies from another image")
    if word == "ADD" and any("://" in each or each.startswith("git@") for each in words[:-1]):
        raise _unsupported(where, "it needs a network")
    if len(words) < 2:
        raise _unsupported(where, "it has no destination")
    *sources, target = words
    place = _absolute(target, folder)
    ignored = _ignored(context)
    copied: dict[str, str] = {}
    for source in sources:
        found = [context] if os.path.normpath(source.lstrip("/")) == "." else sorted(context.glob(source.lstrip("/")))
        if not found:
            raise SandboxError(f"{where}: {source} is not in {context}: add it")
        inside = target.endswith("/") or target == "." or len(sources) > 1 or len(found) > 1
        for path in found:
            if path.is_dir():  # its content is copied, not the folder
                files = [each for each in sorted(path.rglob("*")) if each.is_file() or each.is_symlink()]
                copied |= {str(each.relative_to(context)): f"{place}/{each.relative_to(path)}" for each in files}
            else:
                copied[str(path.relative_to(context))] = f"{place}/{path.name}" if inside else place
    mode = next((int(each.partition("=")[2], 8) for each in flags if each.startswith("--chmod=")), None)
    copied = {source: os.path.normpath(path) for source, path in copied.items() if not ignored(source)}
    if blocked := next((path for path in copied.values() if _owner(path) is None), None):
        raise _unsupported(where, f"{blocked} belongs to the system")
    return BuildStep(where, copied=copied, mode=mode)


def _ignored(context: Path) -> _Ignored:
    file = context / ".dockerignore"
    lines = file.read_text().splitlines() if file.is_file() else []
    return _Ignored([line.strip() for line in lines if line.strip() and not line.startswith("#")])


@dataclass(frozen=True, slots=True)
class _Ignored:
    """The patterns of ``.dockerignore``; the last one that matches decides."""

    patterns: list[str]

    def __call__(self, name: str) -> bool:
        ignored = False
        for pattern in self.patterns:
            plain = pattern.removeprefix("!").strip("/")
            parts = PurePosixPath(name).parts
            if any(fnmatch.fnmatch("/".join(parts[: at + 1]), plain) for at in range(len(parts))):
                ignored = not pattern.startswith("!")
        return ignored


def own_folders(paths: Sequence[str]) -> list[str]:
    """Return the folders that the agent has to own to write to these paths."""
    return sorted({owner for path in paths if (owner := _owner(path)) not in (None, "/tmp", "/home/agent", "/work")})


def _owner(path: str) -> str | None:
    """Return the folder at or near the root that a path is in; None for one of the system, and for the root."""
    parts = PurePosixPath(os.path.normpath(path)).parts[1:]
    if not parts or parts[0] in SYSTEM:
        return None
    return "/" + "/".join(parts[: 2 if parts[0] in SHARED else 1])


def _absolute(path: str, folder: str) -> str:
    path = path.strip("\"'")
    return os.path.normpath(path if path.startswith("/") else f"{folder}/{path}")


def _argument(rest: str) -> dict[str, str]:
    name, found, value = rest.partition("=")
    return {name.strip(): value.strip("\"'")} if found else {}


def _pairs(rest: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an ENV line, in both of its forms."""
    if "=" not in rest.split()[0]:
        name, _, value = rest.partition(" ")
        return {name: _filled(value.strip(), known)}
    return {name: _filled(value, known) for name, _, value in (each.partition("=") for each in shlex.split(rest))}


def _filled(text: str, known: Mapping[str, str]) -> str:
    """Replace variables. A name that is not known is empty, as in a build."""

    def value(match: re.Match[str]) -> str:
        escaped, plain, braced, sign, other = match.groups()
        if escaped is not None:
            return escaped if escaped == "$" else match[0]
        found = known.get(plain or braced, "/usr/local/bin:/usr/bin:/bin" if (plain or braced) == "PATH" else "")
        if sign == "+":
            return other if found else ""
        return found or (other or "" if sign else "")

    return _VARIABLE.sub(value, text)


def _unsupported(where: str, why: str) -> SandboxError:
    return SandboxError(f"{where}: namespaces cannot do this, as {why}: {FIX}")
