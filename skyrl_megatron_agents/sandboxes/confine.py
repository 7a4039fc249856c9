"""What the kernel enforces on a sandbox of namespaces: its root file system, its user, capabilities, system calls.

:mod:`.process_one` calls this inside the new namespaces. It imports the standard library only,
and everything before the root changes, because the files of this Python may not be in the sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import resource
import signal
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

AGENT = 1000
"""User and group id of the commands in a sandbox whose users are mapped; otherwise they have id 0 without rights."""
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders of this machine that image ``host`` consists of."""
SETTINGS = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "ssl/certs")
"""Files and folders of this machine's ``/etc`` in image ``host``. None of them names a user or a host."""
WRITABLE = ("/work", "/home/agent", "/tmp")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAPABILITY_VERSION_3 = 0x20080522
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

# name → number on x86_64, on aarch64. The first two are of the kernel's tables of all architectures.
CALLS = {
    "pivot_root": (155, 41),
    "mount_setattr": (442, 442),
    "socket": (41, 198),
}
DENIED = {
    "add_key": (248, 217),  # key rings are not in any namespace
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),  # makes sockets without the call that is filtered below
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
}
UNCOUNTED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
}
"""Memory that belongs to no process. Without a control group nothing limits it."""
FILES = {True: 4096, False: 1024}
"""Open files of a process, with control groups and without: pipes and queues are not counted there."""
TCP_BYTES = 212_992
"""Most bytes of a TCP socket's buffer in each direction, as of a Unix socket; the kernel grows them to megabytes."""
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Address families with a network namespace. AF_VSOCK has none: in a virtual machine it reaches the host."""
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine → its column of the tables above, and its ``AUDIT_ARCH``."""

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, *values: Any) -> None:
    """Call ``prctl(2)``. Raises OSError."""
    padded = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    padded += [ctypes.c_ulong(0)] * (4 - len(padded))
    _check(_libc.prctl(option, *padded), f"prctl({option})")


def _column() -> int:
    return ARCHITECTURES[platform.machine()][0]


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call ``mount(2)``. Raises OSError that names the target."""
    given = [os.fsencode(each) if each else None for each in (source, target, kind)]
    result = _libc.mount(*given, ctypes.c_ulong(flags), os.fsencode(options) if options else None)
    _check(result, f"cannot mount {kind or source} at {target}")


def bind(source: str, target: str, *, read_only: bool = True) -> None:
    """Show a file or folder at another place, with everything mounted below it; read-only including that."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        _set_attributes(target, AT_RECURSIVE, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)


def _set_attributes(target: str, flags: int, on: int, off: int = 0) -> None:
    attributes = struct.pack("QQQQ", on, off, 0, 0)
    number, path = CALLS["mount_setattr"][_column()], os.fsencode(target)
    result = _libc.syscall(number, AT_FDCWD, path, flags, attributes, ctypes.c_size_t(len(attributes)))
    _check(result, f"cannot change whether {target} is read-only")


@contextlib.contextmanager
def writable_root() -> Iterator[None]:
    """Let this process write to the root of the sandbox. No command may run meanwhile."""
    _set_attributes("/", 0, 0, MOUNT_ATTR_RDONLY)
    try:
        yield
    finally:
        _set_attributes("/", 0, MOUNT_ATTR_RDONLY)


def give(folder: str) -> None:
    """Make a folder of the read-only root writable for whom its rights allow it. No link is followed."""
    if os.path.realpath(folder) == folder and os.path.isdir(folder):
        mount(folder, folder, flags=MS_BIND | MS_REC)


def inside(root: str, path: str) -> str:
    """Return where a path of a sandbox is below ``root``. Links of an image lead from its root on, and not out of it.
    Raises OSError for links in a circle."""
    at, parts, links = root, path.split("/")[::-1], 0
    while parts:
        part = parts.pop()
        if part == "..":
            at = at if at == root else os.path.dirname(at)
        elif part not in ("", "."):
            there = f"{at}/{part}"
            if os.path.islink(there):
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, f"{path} of an image has links in a circle")
                target = os.readlink(there)
                at = root if target.startswith("/") else at
                parts += target.split("/")[::-1]
            else:
                at = there
    return at


MOST_LINKS = 40
"""Most links in a path, as the kernel's."""


def make_root(settings: Mapping[str, Any]) -> None:
    """Build the file system of a sandbox and make it the root of this process. The old root is out of reach.

    ``settings``: ``root`` (an existing empty folder to mount on), ``disk`` (bytes that may be written), ``layers``
    (folders below the writable layer, the upper first; an image or cached dependencies), ``host`` (whether this
    machine's system folders are the image), ``mounts`` (place in the sandbox → folder here), ``mapped``.

    Only :data:`WRITABLE` and what :func:`give` adds can be written to, whoever owns the rest: where users are not
    mapped, the commands have the id that owns all of it.
    """
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    base, disk = settings["root"], int(settings["disk"])
    inodes = max(4096, disk >> 13)  # each costs the kernel about a kilobyte
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes={inodes},mode=755")
    root = base
    if settings["layers"]:
        root = f"{base}/merged"
        for name in ("upper", "work", "merged"):
            os.mkdir(f"{base}/{name}", 0o755)
        lower = ":".join(layer.replace("\\", "\\\\").replace(":", "\\:") for layer in settings["layers"])
        options = f"lowerdir={lower},upperdir={base}/upper,workdir={base}/work"
        mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, options)
    if settings["host"]:
        _system_folders(root)
    for path, outside in sorted(settings["mounts"].items()):
        bind(outside, inside(root, path))
    _settings_files(root, settings["mapped"])
    _devices(root, base)
    owner = AGENT if settings["mapped"] else 0
    for folder in WRITABLE:
        os.makedirs(inside(root, folder), exist_ok=True)
        os.chown(inside(root, folder), owner, owner)
    os.chmod(inside(root, "/tmp"), 0o1777)
    os.makedirs(inside(root, "/proc"), exist_ok=True)
    mount("proc", inside(root, "/proc"), "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(root)
    _check(_libc.syscall(CALLS["pivot_root"][_column()], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "cannot detach the old root")
    os.chdir("/")
    socket.sethostname("sandbox")
    # No command of the sandbox makes user namespaces, in which it would have capabilities.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    for name in ("tcp_rmem", "tcp_wmem"):
        Path("/proc/sys/net/ipv4", name).write_text(f"4096 16384 {TCP_BYTES}")
    for folder in (*WRITABLE, "/dev/shm"):
        give(os.path.realpath(folder))
    for folder in ("/", "/dev") if root != base else ("/",):
        _set_attributes(os.path.realpath(folder), 0, MOUNT_ATTR_RDONLY)


def _system_folders(root: str) -> None:
    for name in SYSTEM:
        source = Path("/", name)
        if source.is_symlink():
            if not os.path.lexists(f"{root}/{name}"):
                os.symlink(os.readlink(source), f"{root}/{name}")
        elif source.is_dir():
            bind(str(source), f"{root}/{name}")
    for name in SETTINGS:
        source = Path("/etc", name)
        if source.exists():
            bind(os.path.realpath(source), f"{root}/etc/{name}")


def _settings_files(root: str, mapped: bool) -> None:
    """Write what programs look up: users, the name of the loopback interface. An image's users are kept."""
    number, etc = AGENT if mapped else 0, inside(root, "/etc")
    os.makedirs(etc, exist_ok=True)
    agent = f"agent:x:{number}:{number}:agent:/home/agent:/bin/sh\n"
    group = f"agent:x:{number}:\n"
    for name, line, first in (("passwd", agent, "root:x:0:0:root:/root:/bin/sh\n"), ("group", group, "root:x:0:\n")):
        path = Path(etc, name)
        entries = first
        if path.is_file() and not path.is_symlink():
            with open(path, errors="replace") as file:
                entries = file.read(MOST_USERS)
        _replace(path, (line if not mapped else "") + entries + (line if mapped else ""))
    _replace(Path(etc, "hosts"), "127.0.0.1 localhost sandbox\n::1 localhost\n")
    _replace(Path(etc, "resolv.conf"), "")
    _replace(Path(etc, "nsswitch.conf"), "passwd: files\ngroup: files\nhosts: files\n")


MOST_USERS = 1 << 20
"""Characters that are read of an image's lists of users and groups."""


def _replace(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # an image may have a link here, which leads to files of this machine
    path.write_text(text)


def _devices(root: str, base: str) -> None:
    """Make ``/dev``. That of an image is covered: it may have links, which lead to files of this machine."""
    folder, shared = inside(root, "/dev"), f"{base}/shared"
    os.makedirs(folder, exist_ok=True)
    if root != base:
        mount("tmpfs", folder, "tmpfs", MS_NOSUID, "size=64k,nr_inodes=64,mode=755")
    for name in DEVICES:
        if stat.S_ISCHR(os.stat(f"/dev/{name}").st_mode):
            bind(f"/dev/{name}", f"{folder}/{name}", read_only=False)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1")):
        os.symlink(target, f"{folder}/{name}")
    os.makedirs(f"{folder}/pts")
    mount("devpts", f"{folder}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", f"{folder}/ptmx")
    if root == base:
        os.makedirs(f"{folder}/shm")
    else:  # its files count as the other ones
        os.mkdir(shared)
        bind(shared, f"{folder}/shm", read_only=False)
    os.chmod(f"{folder}/shm", 0o1777)


def loopback_up() -> None:
    """Switch the loopback interface of this network namespace on."""
    with socket.socket() as any_socket:
        request = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1] | IFF_UP
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags))


def become_agent(settings: Mapping[str, Any]) -> None:
    """Make this process one that may do what an agent may: to be called between fork and exec.

    It gets the unprivileged user, no capabilities for it and its descendants, resource limits, and the filter of
    system calls. ``settings``: ``mapped``, ``memory``, ``disk`` and ``processes`` of the limits, ``counted``: whether
    control groups limit memory and processes.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and so would the command
    for name, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, FILES[settings["counted"]]),
        (resource.RLIMIT_FSIZE, int(settings["disk"])),
        (resource.RLIMIT_MEMLOCK, 1 << 16),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, int(settings["processes"])),
        *(() if settings["counted"] else ((resource.RLIMIT_DATA, int(settings["memory"])),)),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
    prctl(PR_SET_DUMPABLE, 1)  # otherwise its files in /proc belong to another user
    Path("/proc/self/oom_score_adj").write_text("1000")  # a command is ended before the process that reports it
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the last one that this kernel knows
                raise
            break
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    if settings["mapped"]:
        os.setgroups([])
        os.setresgid(AGENT, AGENT, AGENT)
        os.setresuid(AGENT, AGENT, AGENT)
    header, nothing = struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    _check(_libc.capset(header, nothing), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    filter_calls(counted=settings["counted"])


def filter_calls(*, counted: bool) -> None:
    """Deny system calls that reach past the namespaces, for this process and its descendants (seccomp).

    They fail with ENOSYS, as on a kernel without them. Other architectures' calls end the process.
    """
    column, architecture = ARCHITECTURES[platform.machine()]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06  # BPF: LD|W|ABS, JMP|JEQ|K, JMP|JGE|K, RET|K
    allow, kill, fail = 0x7FFF0000, 0x80000000, 0x00050000
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill), (load, 0, 0, 0)]
    if platform.machine() == "x86_64":
        program += [(at_least, 0, 1, 0x40000000), (end, 0, 0, fail | errno.ENOSYS)]  # the x32 calls
    for numbers in (DENIED if counted else DENIED | UNCOUNTED).values():
        program += [(equal, 0, 1, numbers[column]), (end, 0, 0, fail | errno.ENOSYS)]
    program += [(equal, 0, len(FAMILIES) + 2, CALLS["socket"][column]), (load, 0, 0, 16)]
    program += [(equal, len(FAMILIES) - index, 0, family) for index, family in enumerate(FAMILIES)]
    program += [(end, 0, 0, fail | errno.EAFNOSUPPORT), (end, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code)
    prctl(
        PR_SET_SECCOMP, 2, ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(held)))
    )
