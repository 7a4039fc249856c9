"""Ray's agents end with the process that started Ray, also when that was killed.

Left alone they stay for another minute, waiting to report to a server that is gone. The watch is a program of its own,
alive when all else has been killed, and imports nothing of this package.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

AGENTS = ("RuntimeEnvAgent", "DashboardAgent", "runtime_env/agent/main.py", "dashboard/agent.py")
"""What the command lines of Ray's agents contain: after they have named themselves, and before."""


def guard_agents() -> None:
    """Watch the agents of the Ray that this process has started, until they or this process have ended."""
    import psutil

    processes = [os.getpid()]
    for child in psutil.Process().children(recursive=True):
        try:
            if any(name in " ".join(child.cmdline()) for name in AGENTS):
                processes.append(child.pid)
        except psutil.Error:
            continue  # it ended meanwhile
    handles = [os.pidfd_open(process) for process in processes]
    try:
        command = [sys.executable, "-I", "-S", __file__, *map(str, handles)]
        subprocess.run(command, pass_fds=handles, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    finally:
        for handle in handles:
            os.close(handle)


def _watch(starter: int, agents: set[int]) -> None:
    """Wait for the end of ``starter`` and end what is left of ``agents``; both are handles of ``pidfd_open``."""
    waiting = select.poll()
    for handle in (starter, *agents):
        waiting.register(handle, select.POLLIN)
    while agents:
        ended = {handle for handle, _ in waiting.poll()}
        if starter in ended:
            for agent in agents - ended:
                signal.pidfd_send_signal(agent, signal.SIGKILL)
            return
        agents -= ended
        for handle in ended:
            waiting.unregister(handle)


if __name__ == "__main__":
    if os.fork() == 0:  # the starter goes on at once and has no child to wait for
        os.setsid()
        _watch(int(sys.argv[1]), {int(handle) for handle in sys.argv[2:]})
