"""``python -m tests.mutations``: plant the faults of ``MUTATIONS`` one by one on a copy of the tree and see whether
the tests that each names notice. Exit code 1 if one is not caught. The checkout stays as it is."""

from __future__ import annotations

import argparse
import queue
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from tests.mutations import MUTATIONS
from tests.mutations.mutation import CAUGHT, LIMIT_S, Mutation, copy_tree, judge, run_tests


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", metavar="NAME,…", help="these mutations")
    parser.add_argument("--list", action="store_true", help="print name, file and reason of each")
    parser.add_argument("--jobs", type=int, default=1, help="so many at once, each on a copy of its own")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without a fault: all must pass")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="for the tests of each")
    given = parser.parse_args(arguments)
    known = {mutation.name: mutation for mutation in MUTATIONS}
    names = given.only.split(",") if given.only else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no mutation {', '.join(unknown)}; --list prints all")
    given.mutations = [known[name] for name in names]
    return given


def unchanged(mutations: list[Mutation], folder: Path, limit_s: float) -> int:
    """Run all named tests once on a copy without a fault."""
    tree = folder / "0"
    copy_tree(tree)
    tests = dict.fromkeys(test for mutation in mutations for test in mutation.tests)
    code, output = run_tests(list(tests), tree, limit_s * len(mutations))
    print(output)
    return 0 if code == 0 else 1


def plant(mutations: list[Mutation], folder: Path, jobs: int, limit_s: float) -> int:
    """Plant each on a copy that no other uses at the time; print the outcomes."""
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(jobs):
        copy_tree(folder / str(number))
        trees.put(folder / str(number))
    missed = []
    printing = threading.Lock()

    def one(mutation: Mutation) -> None:
        tree, began = trees.get(), time.monotonic()
        outcome, output = judge(mutation, tree, limit_s)
        trees.put(tree)
        with printing:
            print(f"{outcome:<16} {time.monotonic() - began:6.1f} s  {mutation.name}", flush=True)
            if outcome != CAUGHT:
                missed.append(mutation)
                print(f"    {mutation.file}: {mutation.why}\n{output}", flush=True)

    if jobs == 1:  # in this thread, which an interrupt reaches
        for mutation in mutations:
            one(mutation)
    else:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, mutations))
    print(f"{len(mutations) - len(missed)} of {len(mutations)} caught")
    return 1 if missed else 0


def main() -> int:
    """Run the command."""
    given = parse()
    if given.list:
        for mutation in given.mutations:
            print(f"{mutation.name:<44} {mutation.file}\n    {mutation.why}")
        return 0

    def terminated(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, terminated)
    with tempfile.TemporaryDirectory(prefix="mut-") as folder:
        if given.unchanged:
            return unchanged(given.mutations, Path(folder), given.limit)
        return plant(given.mutations, Path(folder), given.jobs, given.limit)


if __name__ == "__main__":
    sys.exit(main())
