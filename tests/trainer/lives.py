"""Processes that are killed: each runs a function that says over a pipe what it did."""

from tests.support import forked


def killed(target, *arguments, after):
    """Run ``target(*arguments, said)`` in a process of its own, kill it when it has said ``after`` things, and return
    all that it said."""
    context = forked.context()
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
