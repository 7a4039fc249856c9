"""Test processes forked from one server, which has imported torch, Megatron, transformers and the runtime.

These imports take ten seconds of a core in each process that is spawned. The server pays them once, for the ranks of
the pool and for every process that a test starts through :func:`context`.
"""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from skyrl_megatron import device

IMPORTED = ["pytest", "skyrl_megatron.runtime.engine"]


def context() -> BaseContext:
    """Return the multiprocessing context of test processes, and start the server, which imports meanwhile.

    CPython has one fork server in a process, with one list of modules, so every test takes the context from here.
    Where there are GPUs each process is spawned: what CUDA sets up on import may not survive a fork.
    """
    if device.driver_gpu_count():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    return found
