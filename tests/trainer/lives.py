"""Processes that are killed: each runs a function that says over a pipe what it did."""

import multiprocessing


def killed(target, *arguments, after):
    """Run ``target(*arguments, said)`` in a process of its own, kill it when it has said ``after`` things, and return
    all that it said. Processes are forked from a server that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    modules = ["tests.trainer.journal_writer", "tests.trainer.store_runner", "skyrl_megatron.trainer.stream.store"]
    context.set_forkserver_preload(modules)
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(*arguments, there))
    child.start()
    there.close()
    said = [here.recv() for _ in range(after)]  # EOFError: it ended by itself
    child.kill()
    while here.poll(60):
        try:
            said.append(here.recv())
        except (EOFError, OSError):
            break
    child.join(60)
    return said
