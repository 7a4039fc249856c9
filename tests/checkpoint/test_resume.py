"""Resumed equals uninterrupted, bit for bit; an asynchronous save holds its own step; Megatron opens the files."""

import pytest

from tests.checkpoint import training
from tests.checkpoint.ranks import RankCheckpointer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return training.save_model(tmp_path_factory.mktemp("model"))


def uninterrupted(folder, root, layout):
    """Two steps, an asynchronous save, five more steps; digests at the save and at the end."""

    engine = training.engine(folder, layout, dropout=0.1)
    training.train(engine, [1, 2])
    checkpointer = RankCheckpointer(root, training.state_of(engine), asynchronous=True)
    at_save = training.local_digests(engine)
    assert checkpointer.save(2)
    training.train(engine, [3])
    after_one = training.local_digests(engine)
    assert checkpointer.save(3)  # waits for the first
    training.train(engine, [4, 5, 6, 7])
    checkpointer.close()
    return at_save, after_one, training.local_digests(engine)


def resumed(folder, root, layout, step, more):
    engine = training.engine(folder, layout, seed=7, dropout=0.1)
    if step == 2:
        training.train(engine, [20])  # once from a used optimizer, once from a fresh one
    checkpointer = RankCheckpointer(root, training.state_of(engine), seed=1)
    found = checkpointer.load("from_path", f"{root}/global_step_{step}")
    assert found.step == step
    checkpointer.close()
    loaded = training.local_digests(engine)
    training.train(engine, more)
    return loaded, training.local_digests(engine)


@pytest.mark.parametrize(
    "layout",
    ["tp2·dp2·ep2", *(pytest.param(name, marks=pytest.mark.full_matrix) for name in ("pp2·vpp2", "dp2", "tp2·etp2"))],
)
def test_resumed_equals_uninterrupted(ranks, folder, tmp_path, layout):
    """With dropout, so that random states count. The saves are asynchronous with a step right behind each."""
    world, root = training.LAYOUTS[layout]["world"], str(tmp_path)
    whole = ranks(world, uninterrupted, folder, root, layout)
    second = ranks(world, resumed, folder, root, layout, 2, [3, 4, 5, 6, 7])
    third = ranks(world, resumed, folder, root, layout, 3, [])
    for rank in range(world):
        at_save, after_one, end = whole[rank]
        assert at_save != after_one != end
        assert second[rank] == (at_save, end)
        assert third[rank][0] == after_one


def megatron_loads(folder, root, layout):
    """Train and save, forget everything, then let ``megatron.core.dist_checkpointing`` fill weights and moments."""
    import torch
    from megatron.core import dist_checkpointing

    from skyrl_megatron.runtime.checkpoint.rank_state import CONTENT

    engine = training.engine(folder, layout)
    training.train(engine, [1, 2])
    checkpointer = RankCheckpointer(root, training.state_of(engine))
    checkpointer.save(2)
    checkpointer.close()
    before = training.global_digests(engine)
    for chunk in engine.chunks:
        for parameter in chunk.parameters():
            torch.nn.init.zeros_(parameter)
    # Nothing may be missing and nothing may be left over: raise_all.
    policy = f"{root}/global_step_2/policy"
    loaded = dist_checkpointing.load(training.megatron_state(engine, is_loading=False), policy, strict="raise_all")
    optimizers = _put_back(engine, loaded)
    content = dist_checkpointing.load_content_metadata(policy)
    shapes = {k: tuple(v.global_shape) for k, v in dist_checkpointing.load_tensors_metadata(policy).items()}
    return before, training.global_digests(engine), optimizers, content == CONTENT, shapes


def _put_back(engine, loaded):
    """Weights through ``load_state_dict``, moments through Megatron's own loader; returns the number of optimizers."""
    from skyrl_megatron.runtime.checkpoint.rank_state import unwrapped

    for index, chunk in enumerate(engine.chunks):
        result = unwrapped(chunk).load_state_dict(loaded[f"model{index}"], strict=False)
        assert not result.unexpected_keys
        assert all(key.endswith("_extra_state") for key in result.missing_keys)
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    states = [value for key, value in loaded.items() if key.startswith("optimizer ")]
    assert len(parts) == len(states)
    for part, state in zip(parts, states, strict=True):
        steps = [(moments, moments.pop("step")) for moments in part.optimizer.state.values()]
        part.load_parameter_state_from_fully_reshardable(state)  # would look for "step" among the loaded tensors
        for moments, step in steps:
            moments["step"] = step
    return len(states)


def test_megatron_opens_it(ranks, folder, tmp_path):
    results = ranks(2, megatron_loads, folder, str(tmp_path), "dp2·ep2")
    before, after, optimizers, same_content, shapes = results[0]
    assert before == after and len(before) == 48
    assert optimizers == 2 and same_content
    assert shapes["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == (4, 4, 48, 48)


def memory_body(root, background):
    """Largest growth of anonymous memory while 384 MB of weights and moments are saved."""
    import threading
    import time

    import torch

    from skyrl_megatron.runtime.checkpoint.rank_files import RankWriter, _write_rank
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore
    from tests.checkpoint.blocks import plain_blocks

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    blocks = plain_blocks(tensors=24, mib=16)
    folder = CheckpointStore(root).begin(1, {"policy": 1})
    note = {"rank": 0, "step": 1, "layout": {}, "optimizer_step": 1, "lr_schedule": None}
    writer = RankWriter()
    torch.zeros(1).numpy()
    peak, done, start = [0], threading.Event(), anonymous()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if background:
        copies = writer.copy(blocks)
        blocks = copies
    _write_rank(folder, "policy", note, blocks, b"")
    done.set()
    watcher.join()
    return peak[0] - start, sum(block.data.numel() * 4 for block in blocks)


@pytest.mark.parametrize("background", [False, True])
def test_memory_is_bounded(ranks, tmp_path, background):
    """In the foreground at most a bucket; in the background one copy of the rank's own state and a bucket."""
    from skyrl_megatron.runtime.checkpoint.rank_state import BUCKET_BYTES

    grown, state = ranks(1, memory_body, str(tmp_path / "c"), background)[0]
    assert state == 384 * 2**20
    assert grown <= BUCKET_BYTES + (state if background else 0)
