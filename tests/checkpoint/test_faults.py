"""Processes that are killed, refused or interrupted in the middle of a save. Real signals to real processes."""

import os
import signal
import time

import pytest

from tests.checkpoint import training
from tests.checkpoint.ranks import RankCheckpointer, newest
from tests.support import forked

WAIT_S = 120.0


class Children:
    """Processes of a test's own. Every wait is bounded; all end with the module."""

    def __init__(self):
        self._context = forked.context()
        self._started = []

    def start(self, body, *args):
        """(process, pipe): the child's end of the pipe is the last argument of ``body``."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=body, args=(*args, theirs))
        process.start()
        theirs.close()
        self._started.append(process)
        return process, ours

    def run(self, body, *args):
        """Exit code (negative: the signal) of a child, and what it sent."""
        process, pipe = self.start(body, *args)
        sent = None
        if pipe.poll(WAIT_S):
            try:
                sent = pipe.recv()
            except EOFError:
                pass
        process.join(WAIT_S)
        assert process.exitcode is not None, "the child did not end"
        return process.exitcode, sent

    def close(self):
        for process in self._started:
            if process.is_alive():
                process.kill()
            process.join(10)


@pytest.fixture(scope="module")
def children():
    pool = Children()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return training.save_model(tmp_path_factory.mktemp("model"))


def join_group(rank=0, world=1, port=None):
    import datetime

    import torch
    import torch.distributed as dist

    from skyrl_megatron import device
    from tests.support.rank_pool import free_port

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port or free_port(), world, rank == 0, limit)
    dist.init_process_group(device.collective_backend(), store=store, rank=rank, world_size=world, timeout=limit)


def two_saves(folder, root, layout="single", **options):
    """An engine with checkpoints 1 and 2, ready to save step 3."""

    engine = training.engine(folder, layout)
    checkpointer = RankCheckpointer(root, training.state_of(engine), **options)
    for step in (1, 2):
        training.train(engine, [step])
        checkpointer.save(step)
        checkpointer.finish()
    training.train(engine, [3])
    return engine, checkpointer


def signal_at(point, number):
    """Arrange that this process gets a signal when it reaches ``point``."""
    from tests.checkpoint import places_of_a_save

    def reached(name):
        if name == point:
            os.kill(os.getpid(), number)

    places_of_a_save.watch(reached)


def killed_at(folder, root, point, asynchronous, pipe):
    join_group()
    engine, checkpointer = two_saves(folder, root, keep=2, asynchronous=asynchronous)
    signal_at(point, signal.SIGKILL)
    checkpointer.save(3)
    checkpointer.finish()
    pipe.send("survived")


def resume_and_save(folder, root):
    """What a new run finds, whether it holds exactly what was trained to that step, and that it can go on."""

    fresh = training.engine(folder, "single")
    checkpointer = RankCheckpointer(root, training.state_of(fresh), keep=2)
    resumed = checkpointer.load()
    held = training.global_digests(fresh)
    checkpointer.save(resumed.step + 1)
    checkpointer.close()
    left = sorted(os.listdir(root))
    for step in checkpointer.store.steps():
        checkpointer.store.verify(f"{root}/global_step_{step}")
    return resumed.step, held, left


def expected_digests(folder):
    """Step → digests of an undisturbed run."""
    engine = training.engine(folder, "single")
    held = {}
    for step in (1, 2, 3):
        training.train(engine, [step])
        held[step] = training.global_digests(engine)
    return held


@pytest.fixture(scope="module")
def expected(ranks, folder):
    return ranks(1, expected_digests, folder)[0]


SURVIVES = {
    "before data": 2,
    "between shards": 2,
    "before manifest": 2,
    "before rename": 2,
    "before pointer": 3,
    "during prune": 3,
}


@pytest.mark.parametrize(
    ("point", "asynchronous"),
    [*((point, False) for point in SURVIVES), ("between shards", True), ("before rename", True)],
)
def test_killed(children, ranks, folder, expected, tmp_path, point, asynchronous):
    root = str(tmp_path)
    code, sent = children.run(killed_at, folder, root, point, asynchronous)
    assert (code, sent) == (-signal.SIGKILL, None)
    step, held, left = ranks(1, resume_and_save, folder, root)[0]
    assert step == SURVIVES[point]
    assert held == expected[step]
    kept = [f"global_step_{step}", f"global_step_{step + 1}"]
    assert left == [".lock", *kept, "latest_ckpt_global_step.txt"]


def rank_of_two(folder, root, rank, port, pipe):
    join_group(rank, 2, port)
    engine, checkpointer = two_saves(folder, root, "dp2")
    if rank == 1:
        signal_at("between shards", signal.SIGKILL)
    try:
        checkpointer.save(3)
        pipe.send("saved")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(3)


def test_one_rank_of_two_is_killed(children, ranks, folder, tmp_path):
    """The other rank raises instead of waiting, and the checkpoint before is whole."""
    from tests.support.rank_pool import free_port

    port = free_port()
    first, pipe = children.start(rank_of_two, folder, str(tmp_path), 0, port)
    second, _ = children.start(rank_of_two, folder, str(tmp_path), 1, port)
    second.join(WAIT_S)
    began = time.monotonic()
    assert second.exitcode == -signal.SIGKILL
    assert pipe.poll(WAIT_S) and "Error" in pipe.recv()
    assert time.monotonic() - began < 60  # the group's own deadline
    first.join(WAIT_S)
    assert not os.path.exists(tmp_path / "global_step_3")
    assert ranks(1, resume_and_save_elsewhere, folder, str(tmp_path))[0] == 2


def resume_and_save_elsewhere(folder, root):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another layout: random states start anew
        return resume_and_save(folder, root)[0]


def ends_in_async_save(folder, root, how, pipe):
    """End this process, in one of several ways, while the background save of step 3 is half done."""
    import threading

    from tests.checkpoint import places_of_a_save

    join_group()
    engine, checkpointer = two_saves(folder, root, asynchronous=True)
    half, go_on = threading.Event(), threading.Event()

    def reached(point):
        if point == "between shards":
            half.set()
            go_on.wait(5)

    places_of_a_save.watch(reached)
    checkpointer.save(3)
    half.wait(WAIT_S)
    threading.Timer(0.3, go_on.set).start()
    if how == "exit":
        raise SystemExit(0)
    if how == "exception":
        raise RuntimeError("the training loop failed")
    if how == "SIGTERM with a handler":
        signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(143)))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(WAIT_S)


ENDS = {"exit": (0, 3), "exception": (1, 3), "SIGTERM with a handler": (143, 3), "SIGTERM": (-signal.SIGTERM, 2)}


@pytest.mark.parametrize("how", ENDS)
def test_ends_during_an_async_save(children, ranks, folder, expected, tmp_path, how):
    """A process that ends finishes its save; one that is ended leaves the checkpoint before."""
    code, step = ENDS[how]
    assert children.run(ends_in_async_save, folder, str(tmp_path), how)[0] == code
    found, held, left = ranks(1, resume_and_save, folder, str(tmp_path))[0]
    assert found == step and held == expected[step]
    assert not [name for name in left if name.endswith(".tmp")]


def saves_while_busy(folder, root, pipe):
    """A second save while the first is half done."""
    import threading

    from tests.checkpoint import places_of_a_save

    join_group()
    engine, checkpointer = two_saves(folder, root, asynchronous=True)
    half, go_on = threading.Event(), threading.Event()

    def reached(point):
        if point == "between shards":
            half.set()
            go_on.wait(WAIT_S)

    places_of_a_save.watch(reached)
    checkpointer.save(3)
    half.wait(WAIT_S)
    threading.Timer(0.3, go_on.set).start()
    made = checkpointer.save(4)
    checkpointer.close()
    pipe.send((made, checkpointer.store.steps(), newest(checkpointer.store).step))


def test_save_while_busy(children, folder, tmp_path):
    """It waits for the save before it."""
    code, sent = children.run(saves_while_busy, folder, str(tmp_path))
    assert code == 0
    assert sent == (f"{tmp_path}/global_step_4", [4, 3, 2, 1], 4)


def loses_a_writer(folder, root, pipe):
    """The rank that writes a save in the background is lost half way, and another process has its place."""
    import threading

    from skyrl_megatron.runtime.checkpoint.rank_files import RankWriter
    from tests.checkpoint import places_of_a_save

    join_group()
    engine, checkpointer = two_saves(folder, root, asynchronous=True)
    checkpointer.finish()
    half, never = threading.Event(), threading.Event()

    def reached(point):
        if point == "between shards" and not half.is_set():
            half.set()
            never.wait()

    places_of_a_save.watch(reached)
    checkpointer.save(3)
    half.wait(WAIT_S)
    checkpointer.roles["policy"].writer = RankWriter()
    began = time.monotonic()
    checkpointer.driven.drop_lost_ranks({"policy": [0]})
    sent = [checkpointer.driven.saved_step, newest(checkpointer.store).step, time.monotonic() - began < WAIT_S / 2]
    checkpointer.save(3)
    checkpointer.finish()
    pipe.send([*sent, newest(checkpointer.store).step])
    os._exit(0)


def test_a_lost_rank_costs_the_save_in_work(children, folder, tmp_path):
    """It is given up at once, and made again."""
    assert children.run(loses_a_writer, folder, str(tmp_path)) == (0, [2, 2, True, 3])


def full_disk(folder, root, asynchronous, pipe):
    import resource

    from skyrl_megatron.errors import CheckpointError

    join_group()
    engine, checkpointer = two_saves(folder, root, asynchronous=asynchronous)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        checkpointer.save(3)
        checkpointer.finish()
        pipe.send("saved")
    except CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        left = sorted(os.listdir(root))
        checkpointer.save(4)  # room was made
        checkpointer.close()
        pipe.send((str(error), left, newest(checkpointer.store).step))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_disk_is_full(children, folder, tmp_path, asynchronous):
    code, sent = children.run(full_disk, folder, str(tmp_path), asynchronous)
    message, left, latest = sent
    assert code == 0
    assert "rank 0 cannot write" in message and "File too large" in message
    assert left == [".lock", "global_step_1", "global_step_2", "latest_ckpt_global_step.txt"]
    assert latest == 4


def without_rights(folder, root, pipe):
    from skyrl_megatron.errors import CheckpointError

    join_group()
    engine, checkpointer = two_saves(folder, root)
    checkpointer.store.close()
    os.chmod(root, 0o555)
    os.setuid(65534)
    try:
        checkpointer.save(3)
        pipe.send("saved")
    except CheckpointError as error:
        pipe.send((str(error), newest(checkpointer.store).step))


def test_folder_is_read_only(children, folder, tmp_path):
    if os.getuid() != 0:
        pytest.skip("needs to give up root's right to write anywhere")
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == 0 and parent.as_posix().count("/") > 1:
            parent.chmod(0o755)
    root = tmp_path / "checkpoints"
    _, sent = children.run(without_rights, folder, str(root))
    message, latest = sent
    assert str(root) in message and "cannot be" in message and "trainer.ckpt_path" in message
    assert latest == 2


def hold_lock(root, pipe):
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    CheckpointStore(root).open_for_writing()
    pipe.send("held")
    time.sleep(WAIT_S)


def test_two_jobs_in_one_folder(children, tmp_path):
    from skyrl_megatron.errors import CheckpointError
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    process, pipe = children.start(hold_lock, str(tmp_path))
    assert pipe.poll(WAIT_S) and pipe.recv() == "held"
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=f"is being written by process {process.pid} on .*trainer.ckpt_path"):
        store.begin(1, {"policy": 1})
    assert newest(store) is None  # reading needs no lock
    process.kill()
    process.join(WAIT_S)
    assert store.begin(1, {"policy": 1})
    with pytest.raises(CheckpointError, match="already being written by this process"):
        CheckpointStore(tmp_path).begin(1, {"policy": 1})
    store.close()
    again = CheckpointStore(tmp_path)
    assert again.begin(1, {"policy": 1})
    again.close()
