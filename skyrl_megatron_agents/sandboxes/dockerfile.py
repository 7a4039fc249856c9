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
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from bridges.errors import BridgeError
from bridges.files import TreeEntry, list_tree, open_regular, read_inside
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
MOST_BYTES, MOST_LINE, MOST_VALUE, MOST_VARIABLES = 1 << 18, 1 << 16, 1 << 16, 1 << 20
"""Most bytes of a Dockerfile, of a joined line, of the value of a variable, and of all variables together."""
MOST_REFERENCES, MOST_COPIES, MOST_PATTERNS = 1000, 500, 300
"""Most variables that a line refers to, most COPY lines, and most patterns of ``.dockerignore``."""
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
    number, parts = 0, list[str]()
    for at, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#") or (not stripped and not parts):
            continue
        number = number if parts else at
        if stripped.endswith("\\"):
            parts.append(stripped[:-1] + " ")
            continue
        word, _, rest = ("".join(parts) + stripped).partition(" ")
        parts.clear()
        yield number, word.upper(), rest.strip()


def _lines(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each line of a Dockerfile as (``file:4: RUN make`` for errors, instruction, arguments). What its consumer
    raises of a bad line is its own: see :func:`_line`. Raises SandboxError that names the file."""
    try:
        text = read_inside(file, file.parent, MOST_BYTES).decode()
    except (OSError, ValueError, BridgeError) as error:
        raise SandboxError(f"{file} cannot be read: {error}") from error
    for number, word, rest in instructions(text):
        where = f"{file}:{number}: {word} {rest}"
        if len(rest) > MOST_LINE or rest.count("$") > MOST_REFERENCES or "\0" in rest:
            why = f"more than {MOST_LINE:,} characters or {MOST_REFERENCES:,} variables, or a NUL"
            raise SandboxError(f"{where[:200]}…: the line has {why}: split or correct it")
        yield where, word, rest


@contextmanager
def _line(where: str) -> Iterator[None]:
    """Make what the parsers of a line's arguments raise (quotes, JSON, numbers) one SandboxError that names it."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise SandboxError(f"{where[:500]}: cannot be read: {error}: correct the line") from error


def working_folder(file: Path) -> tuple[str, dict[str, str]]:
    """Return the last stage's WORKDIR ("" if it has none, so that of its base) and its ENV. Other lines may be
    anything. Raises SandboxError that names the line."""
    folder = ""
    environment: dict[str, str] = {}
    arguments: dict[str, str] = {}
    for where, word, rest in _lines(file):
        with _line(where):
            if word == "FROM":
                folder, environment = "", {}
            elif word == "WORKDIR":
                folder = _absolute(_filled(rest, arguments | environment), folder)
            elif word == "ENV":
                environment = _bounded(environment | _pairs(rest, arguments | environment))
            elif word == "ARG":
                arguments = _bounded(arguments | _argument(rest))
    return folder, environment


def read_dockerfile(context: Path) -> BuildPlan:
    """Return the plan of ``context/Dockerfile``. Raises SandboxError that names the first line that needs a container
    engine, and why."""
    file = context / NAME
    builder = _Builder(context)
    for where, word, rest in _lines(file):
        with _line(where):
            builder.follow(where, word, rest)
    if not builder.stages:
        raise SandboxError(f"{file} has no FROM: add it")
    return BuildPlan(
        builder.folder, builder.environment, tuple(builder.steps), tuple(own_folders(list(builder.paths)))
    )


class _Builder:
    """The state of a build after some lines."""

    def __init__(self, context: Path) -> None:
        self.context, self.folder, self.stages = context, "/", 0
        self.steps: list[BuildStep] = []
        self.paths: dict[str, None] = {}
        self.environment: dict[str, str] = {}
        self.arguments: dict[str, str] = {}
        self._files: _Files | None = None

    def follow(self, where: str, word: str, rest: str) -> None:
        """Follow a line."""
        variables = self.arguments | self.environment
        if "<<" in rest and word in ("RUN", "COPY", "ADD"):
            raise _unsupported(where, "it has a here-document")
        if word == "FROM":
            self.stages += 1
            image = _filled(
                next((argument for argument in rest.split() if not argument.startswith("--")), ""), variables
            )
            if self.stages > 1:
                raise _unsupported(where, "it has several stages")
            if not _is_plain(image):
                raise _unsupported(where, f"nothing here replaces image {image}")
        elif word == "WORKDIR":
            self.folder = _absolute(_filled(rest, variables), self.folder)
            self.steps.append(BuildStep(where, command=f"mkdir -p {shlex.quote(self.folder)}"))
            self.paths[self.folder] = None
        elif word == "ENV":
            self.environment = _bounded(self.environment | _pairs(rest, variables))
        elif word == "ARG":
            self.arguments = _bounded(self.arguments | _argument(rest))
        elif word in ("COPY", "ADD"):
            self._files = self._files or _Files(self.context)
            if sum(bool(step.copied) for step in self.steps) >= MOST_COPIES:
                raise SandboxError(f"{where[:500]}: more than {MOST_COPIES} lines copy files: join some")
            step = _copy(self._files, where, word, _filled(rest, variables), self.folder)
            self.steps.append(step)
            self.paths |= dict.fromkeys(os.path.dirname(path) for path in step.copied.values())
        elif word == "RUN":
            command = _shell(rest)
            self.steps.append(BuildStep(where, command=command, folder=self.folder, environment=dict(variables)))
            self.paths |= dict.fromkeys(_PATH.findall(_filled(command, variables)))
        elif word not in WITHOUT_EFFECT:
            raise _unsupported(where, "it is not supported")


def is_path(image: str) -> bool:
    """Return whether the name of an image is a path of this machine, and no name of an engine or a registry. A path
    begins with ``/``, ``./``, ``../`` or ``~``; no name does."""
    return image.startswith(("/", "./", "../", "~"))


def is_context(image: str) -> bool:
    """Return whether the name of an image is a folder with a Dockerfile."""
    return is_path(image) and Path(image).expanduser().joinpath(NAME).is_file()


class _Files:
    """The files of a context, listed once. Raises SandboxError for what a context may not have."""

    def __init__(self, context: Path) -> None:
        self.context = context
        ignored = _ignored(context)
        self.entries = {
            entry.name: entry for entry in _listed(context) if stat.S_ISDIR(entry.mode) or not ignored(entry.name)
        }

    def matching(self, pattern: str) -> list[TreeEntry]:
        """Return the entries that a source of COPY names, by the wildcards of its parts."""
        parts = [re.compile(fnmatch.translate(part)) for part in pattern.split("/")]
        return [
            entry
            for name, entry in self.entries.items()
            if name.count("/") + 1 == len(parts)
            and all(part.match(each) for part, each in zip(parts, name.split("/"), strict=True))
        ]

    def target(self, entry: TreeEntry, where: str) -> TreeEntry:
        """Return what a source that is a link leads to, which is in the context. Raises SandboxError."""
        for _ in range(MOST_LINKS):
            if entry.link is None:
                return entry
            name = os.path.normpath(os.path.join(os.path.dirname(entry.name), entry.link))
            if name not in self.entries:
                why = f"{entry.name} is a link to {entry.link}, which is not in {self.context}"
                raise SandboxError(f"{where}: {why}: replace the link with the file")
            entry = self.entries[name]
        raise SandboxError(f"{where}: {entry.name} is one of links in a circle: replace it with the file")

    def below(self, folder: str) -> list[TreeEntry]:
        """Return the files and links below a folder ("" is the context)."""
        start = f"{folder}/" if folder else ""
        return [
            entry
            for name, entry in self.entries.items()
            if name.startswith(start) and (entry.is_file or entry.link is not None)
        ]


MOST_LINKS = 40
"""Most links that a source of COPY follows, as the kernel's."""


def _listed(context: Path) -> list[TreeEntry]:
    try:
        return list_tree(context)
    except (OSError, BridgeError) as error:
        raise SandboxError(f"the files of {context} cannot be read: {error}") from error


def fingerprint(context: Path) -> str:
    """Return a hash of all that a build can read: names, modes, contents, and where links lead, which are not
    followed. Raises SandboxError."""
    made = hashlib.sha256()
    for entry in _listed(context):
        if entry.is_file:
            made.update(f"{entry.name}\0{entry.mode:o}\0{entry.size}\0".encode())
            try:
                with open_regular(context / entry.name) as file:
                    while part := file.read(1 << 20):
                        made.update(part)
            except (OSError, BridgeError) as error:
                raise SandboxError(f"{context / entry.name} cannot be read: {error}") from error
        elif entry.link is not None:
            made.update(f"{entry.name}\0link\0{entry.link}\0".encode())
    return made.hexdigest()


def packed(context: Path, names: Mapping[str, str] | None = None, mode: int | None = None) -> bytes:
    """Return files of a context as a tar archive: all of them, or those of ``names`` at the paths there. Links stay
    links, so they lead to nothing of this machine. Raises SandboxError."""
    listed = {entry.name for entry in _listed(context)}
    names = dict.fromkeys(sorted(listed), "") if names is None else names
    if missing := next((name for name in names if name not in listed), None):
        raise SandboxError(f"{missing} is not in {context}: add it")

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
        return shlex.join(_words(rest))
    return rest


def _words(rest: str) -> list[str]:
    """Return the words of a line in the form of JSON. Raises ValueError."""
    words = json.loads(rest)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("it is no list of words")
    return words


def _copy(files: _Files, where: str, word: str, rest: str, folder: str) -> BuildStep:
    """Return the files that a COPY or ADD copies."""
    flags = [argument for argument in rest.split() if argument.startswith("--")]
    words = (
        _words(rest) if rest.startswith("[") else [argument for argument in shlex.split(rest) if argument not in flags]
    )
    if any(flag.startswith("--from") for flag in flags):
        raise _unsupported(where, "it copies from another image")
    if word == "ADD" and any("://" in path or path.startswith("git@") for path in words[:-1]):
        raise _unsupported(where, "it needs a network")
    if len(words) < 2:
        raise _unsupported(where, "it has no destination")
    if not all(isinstance(path, str) and path and "\0" not in path for path in words):
        raise SandboxError(f"{where}: a source or a destination is no path: correct the line")
    *sources, target = words
    destination = _absolute(target, folder)
    copied: dict[str, str] = {}
    for source in sources:
        pattern = os.path.normpath(source.lstrip("/") or ".")
        if pattern.split("/")[0] == "..":
            raise SandboxError(f"{where}: {source} leaves {files.context}: copy the file into it")
        chosen = [] if pattern == "." else files.matching(pattern)
        if not chosen and pattern != ".":
            raise SandboxError(f"{where}: {source} is not in {files.context}: add it")
        inside = target.endswith("/") or target == "." or len(sources) > 1 or len(chosen) > 1
        targets = [("", True, "")] if pattern == "." else []
        for entry in chosen:
            leads = files.target(entry, where)
            targets.append((leads.name, not leads.is_file, os.path.basename(entry.name)))
        for name, is_folder, base in targets:
            if is_folder:  # its content is copied, not the folder
                start = len(name) + 1 if name else 0
                copied |= {file.name: f"{destination}/{file.name[start:]}" for file in files.below(name)}
            else:
                copied[name] = f"{destination}/{base}" if inside else destination
    mode = next((int(flag.partition("=")[2], 8) for flag in flags if flag.startswith("--chmod=")), None)
    copied = {source: os.path.normpath(path) for source, path in copied.items()}
    if blocked := next((path for path in copied.values() if _owner(path) is None), None):
        raise _unsupported(where, f"{blocked} belongs to the system")
    return BuildStep(where, copied=copied, mode=mode)


def _ignored(context: Path) -> _Ignored:
    file = context / ".dockerignore"
    try:
        lines = read_inside(file, context, MOST_BYTES).decode().splitlines() if os.path.lexists(file) else []
    except (OSError, ValueError, BridgeError) as error:
        raise SandboxError(f"{file} cannot be read: {error}") from error
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if len(patterns) > MOST_PATTERNS:
        raise SandboxError(f"{file} has more than {MOST_PATTERNS:,} patterns: join some")
    compiled = [re.compile(fnmatch.translate(pattern.removeprefix("!").strip("/"))) for pattern in patterns]
    return _Ignored([(regex, not pattern.startswith("!")) for regex, pattern in zip(compiled, patterns, strict=True)])


@dataclass(frozen=True, slots=True)
class _Ignored:
    """The patterns of ``.dockerignore``; the last one that matches decides."""

    patterns: list[tuple[re.Pattern[str], bool]]

    def __call__(self, name: str) -> bool:
        ignored, parts = False, PurePosixPath(name).parts
        heads = ["/".join(parts[: at + 1]) for at in range(len(parts))]
        for pattern, ignores in self.patterns:
            if any(pattern.match(head) for head in heads):
                ignored = ignores
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


def _pairs(rest: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an ENV line, in both of its forms."""
    if not rest:
        raise ValueError("it names no variable")
    if "=" not in rest.split()[0]:
        name, _, value = rest.partition(" ")
        return {name: _filled(value.strip(), variables)}
    return {name: _filled(value, variables) for name, _, value in (pair.partition("=") for pair in shlex.split(rest))}


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables. A name that is not known is empty, as in a build. Raises ValueError for a long result."""
    parts, size, at = list[str](), 0, 0

    def value(match: re.Match[str]) -> str:
        escaped, plain, braced, sign, other = match.groups()
        if escaped is not None:
            return escaped if escaped == "$" else match[0]
        found = variables.get(plain or braced, "/usr/local/bin:/usr/bin:/bin" if (plain or braced) == "PATH" else "")
        if sign == "+":
            return other if found else ""
        return found or (other or "" if sign else "")

    for match in _VARIABLE.finditer(text):
        parts += [text[at : match.start()], value(match)]
        size, at = size + len(parts[-2]) + len(parts[-1]), match.end()
        if size > MOST_VALUE:  # before it is joined: a value that holds the last one twice doubles with each line
            break
    if size + len(text) - at > MOST_VALUE:
        raise ValueError(f"with its variables it has more than {MOST_VALUE:,} characters")
    return "".join(parts) + text[at:]


def _bounded(variables: dict[str, str]) -> dict[str, str]:
    """Return variables of a build. Raises ValueError for a name that none can have, and for too much of them."""
    for name in variables:
        if not name or "\0" in name or "=" in name:
            raise ValueError(f"{name!r} is no name of a variable")
    if sum(len(name) + len(value) for name, value in variables.items()) > MOST_VARIABLES:
        raise ValueError(f"all variables together have more than {MOST_VARIABLES:,} characters")
    return variables


def _unsupported(where: str, why: str) -> SandboxError:
    return SandboxError(f"{where}: namespaces cannot do this, as {why}: {FIX}")
