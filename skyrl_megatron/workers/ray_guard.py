"""End Ray's agents when the process that started Ray ends or is killed.

Otherwise they would run for another minute. A separate program watches the processes. It survives when all others are
killed, and imports nothing of this package.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

AGENTS = ("RuntimeEnvAgent", "DashboardAgent", "runtime_env/agent/main.py", "dashboard/agent.py")
"""Parts of the command lines of Ray's agents, after and before they set their process titles."""


def guard_agents() -> None:
    """Start the program that watches the agents of the Ray that this process has started."""
    import psutil

    processes = [os.getpid()]
    for child in psutil.Process().children(recursive=True):
        try:
            if any(name in " ".join(child.cmdline()) for name in AGENTS):
                processes.append(child.pid)
        except psutil.Error:
            continue  # it has ended
    handles = [os.pidfd_open(process) for process in processes]
    try:
        command = [sys.executable, "-I", "-S", __file__, *map(str, handles)]
        subprocess.run(command, pass_fds=handles, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    finally:
        for handle in handles:
            os.close(handle)


def _watch(starter: int, agents: set[int]) -> None:
    """Wait for the end of ``starter``, then kill the remaining ``agents``. All are handles of ``pidfd_open``."""
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
    if os.fork() == 0:  # the starter continues immediately and has no child to wait for
        os.setsid()
        _watch(int(sys.argv[1]), {int(handle) for handle in sys.argv[2:]})
