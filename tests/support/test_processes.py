"""What counts as shared memory that a process left."""

import multiprocessing
import os
import uuid

import pytest

from tests.support.processes import abandoned_memory, shared_memory


@pytest.mark.process
def test_memory_counts_when_no_process_uses_it():
    before = shared_memory()
    lock = multiprocessing.get_context("spawn").Lock()  # mapped under a name that is no longer there
    path = f"/dev/shm/{uuid.uuid4().hex}"
    name = os.path.basename(path)
    mine = {name, f"sem.{lock._semlock.name.removeprefix('/')}"}
    assert not abandoned_memory(before, 0) & mine
    with open(path, "w"):
        assert not abandoned_memory(before, 0) & mine
    try:
        assert abandoned_memory(before, 0) & mine == {name}
    finally:
        os.unlink(path)
