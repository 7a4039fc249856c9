"""Hosts on one machine: network and host-name namespaces on a bridge, with a real SLURM or real sshd on them.

Needs root, iproute2, and the packages that ``launch/setup.sh ci`` installs. The hosts share file system and process
table; addresses, ports and host names are their own. As they share /tmp, Ray may take a process of n1 that joins for
one of n2: what it loses with n2 it would not lose elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil

NET = "10.77.41"
EVERY = ("ctl", *(f"n{number}" for number in range(1, 17)))
"""All hosts that there can be."""
BRIDGE = "skyrlbr0"
NEEDED = ("ip", "unshare", "slurmctld", "slurmd", "munged", "sbatch", "sshd")

SSH_CONFIG = """
Host *
  IdentityFile {folder}/ssh/id
  GlobalKnownHostsFile {folder}/ssh/known_hosts
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""
SSHD_CONFIG = """
ListenAddress {address}
HostKey {folder}/ssh/host
AuthorizedKeysFile {folder}/ssh/id.pub
PidFile {folder}/ssh/{host}.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
SLURM_CONF = """
ClusterName=tiny
SlurmctldHost=ctl({net}.10)
AuthType=auth/munge
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctl.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctl.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=30
NodeName=n1 NodeAddr={net}.11 CPUs=2 RealMemory=8000 State=UNKNOWN
NodeName=n2 NodeAddr={net}.12 CPUs=2 RealMemory=8000 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return why hosts cannot be made here, None if they can."""
    if os.environ.get("SKYRL_TWO_HOSTS") != "1":
        return "they take this machine's network for themselves: ask for them with SKYRL_TWO_HOSTS=1"
    if os.getuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"{', '.join(missing)} are missing: launch/setup.sh ci installs them"
    tried = subprocess.run(["ip", "netns", "add", "skyrl-try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "skyrl-try"], capture_output=True)
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


def namespace(host: str) -> str:
    return f"skyrl-{host}"


class TwoHosts:
    """Hosts ``n1``, ``n2`` …, and ``ctl``, where jobs are submitted from. ``slurm``: SLURM is on them, else sshd."""

    def __init__(self, folder: Path, *, slurm: bool = True, count: int = 2) -> None:
        self.folder = folder
        self.workers = [f"n{number}" for number in range(1, count + 1)]
        self.addresses = {host: f"{NET}.{number}" for number, host in enumerate(("ctl", *self.workers), 10)}
        self._munged: subprocess.Popen[bytes] | None = None
        self.down()  # what a killed run left behind
        try:
            self.up()
            self.slurm_up() if slurm else self.ssh_up()
        except BaseException:
            self.down()
            raise

    def up(self) -> None:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{NET}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        names = "".join(f"{address} {host}\n" for host, address in self.addresses.items())
        for host, address in self.addresses.items():
            space, link = namespace(host), f"skyrl-{host}"
            ip("netns", "add", space)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", link, "master", BRIDGE, "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            hosts = Path("/etc/netns", space)
            hosts.mkdir(parents=True, exist_ok=True)
            (hosts / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def ssh_up(self) -> None:
        """Let n1 and n2 be reached by ssh, with keys of their own; ``ip netns`` shows each host its own /etc/ssh."""
        keys = self.folder / "ssh"
        keys.mkdir()
        for name in ("id", "host"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
        key = (keys / "host.pub").read_text()
        (keys / "known_hosts").write_text(
            "".join(f"{host},{address} {key}" for host, address in self.addresses.items())
        )
        for host, address in self.addresses.items():
            own = Path("/etc/netns", namespace(host), "ssh")
            own.mkdir()
            (own / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
            told = SSHD_CONFIG.format(folder=self.folder, address=address, host=host)
            (own / "sshd_config").write_text(told)
        Path("/run/sshd").mkdir(exist_ok=True)
        for host in self.workers:
            self.on(host, shutil.which("sshd"))

    def where_ssh_leads(self, host: str, *words: object) -> None:
        """Run a command in the mount namespace of a host's sshd, which all that is started by ssh shares."""
        pid = (self.folder / "ssh" / f"{host}.pid").read_text().strip()
        subprocess.run(["nsenter", "--mount", f"--target={pid}", *map(str, words)], check=True, capture_output=True)

    def slurm_up(self) -> None:
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(net=NET, folder=self.folder))
        # namespaces hide /sys/fs/cgroup, without which slurmd ends unless told so
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        if not Path("/run/munge/munge.socket.2").is_socket():
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            self._munged = subprocess.Popen(["runuser", "-u", "munge", "--", "munged", "--foreground"])
            time.sleep(1)
        conf = str(self.folder / "slurm.conf")
        self.on("ctl", "slurmctld", "-f", conf)
        for host in ("n1", "n2"):
            self.on(host, "slurmd", "-N", host, "-f", conf)
        deadline = time.monotonic() + 60
        while self.on("ctl", "sinfo", "-h", "-t", "idle", "-o", "%D").strip() != "2":
            assert time.monotonic() < deadline, self.on("ctl", "sinfo")
            time.sleep(0.5)

    def down(self) -> None:
        """End what runs on the hosts, and the hosts."""
        for host in EVERY:
            for process in self.processes(host):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for host in EVERY:  # a link stays for a while after its namespace, which processes that end still hold
            subprocess.run(["ip", "link", "del", f"skyrl-{host}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", namespace(host)], capture_output=True)
            shutil.rmtree(Path("/etc/netns", namespace(host)), ignore_errors=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)
        if self._munged is not None:
            self._munged.send_signal(signal.SIGTERM)
            self._munged.wait(10)

    # ------------------------------------------------------------------ work on hosts
    def command(self, host: str, *words: object) -> list[str]:
        """The command line that runs ``words`` on a host."""
        inside = ["sh", "-c", f'hostname {host}; exec "$@"', "sh", *map(str, words)]
        return ["ip", "netns", "exec", namespace(host), "unshare", "--uts", *inside]

    def environment(self, **variables: str) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
        return own | {"SLURM_CONF": str(self.folder / "slurm.conf")} | variables

    def run(
        self, host: str, *words: object, timeout: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host."""
        return subprocess.run(
            self.command(host, *words),
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment(**variables),
            cwd=self.folder,
        )

    def on(self, host: str, *words: object, timeout: float = 60, **variables: str) -> str:
        """Run a command on a host; its output. Raises when it fails."""
        done = self.run(host, *words, timeout=timeout, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def cut_off(self, host: str, state: str = "down") -> None:
        """Take a host off the network, or (``up``) put it back."""
        ip("link", "set", f"skyrl-{host}", state)

    def processes(self, host: str) -> list[psutil.Process]:
        """The processes on a host."""
        listed = subprocess.run(["ip", "netns", "pids", namespace(host)], capture_output=True, text=True).stdout
        found = []
        for pid in listed.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    # ------------------------------------------------------------------ jobs
    def submit(self, *words: object, options: tuple[str, ...] = (), **variables: str) -> int:
        """Submit a batch script; the number of the job, whose output goes to ``job-NUMBER.out``."""
        output = f"--output={self.folder}/job-%j.out"
        said = self.on("ctl", "sbatch", "--parsable", output, *options, *words, **variables)
        return int(said.strip().partition(";")[0])

    def state(self, job: int) -> str:
        """SLURM's word for where a job is."""
        said = self.on("ctl", "scontrol", "-o", "show", "job", job)
        return said.partition("JobState=")[2].split()[0]

    def await_state(self, job: int, *states: str, within_s: float) -> str:
        deadline = time.monotonic() + within_s
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state} after {within_s:g} s\n{self.output(job)}"
            time.sleep(1)
        return state

    def await_output(self, job: int, text: str, within_s: float, after: int = 0) -> str:
        """Wait until a job has said ``text`` beyond its first ``after`` characters; all that it said."""
        deadline = time.monotonic() + within_s
        while text not in self.output(job)[after:]:
            assert time.monotonic() < deadline and self.state(job) in ("PENDING", "RUNNING", "CONFIGURING"), (
                self.output(job)
            )
            time.sleep(0.5)
        return self.output(job)

    def output(self, job: int) -> str:
        file = self.folder / f"job-{job}.out"
        return file.read_text() if file.exists() else ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
