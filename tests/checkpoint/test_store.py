"""The folder of all checkpoints: what stays, what goes, where it may lie. Bytes are real, models are not needed."""

import json
import os
import shutil

import pytest

from skyrl_megatron.errors import CheckpointError, SkyRLMegatronWarning
from tests.checkpoint.ranks import newest


def write(store, step, *, ranks=1, role="policy", more_roles=(), **extras):
    """A checkpoint of plain blocks, written as ranks write theirs."""
    from skyrl_megatron.runtime.checkpoint.rank_files import _write_rank
    from tests.checkpoint.blocks import plain_blocks

    roles = {name: ranks for name in (role, *more_roles)}
    folder = store.begin(step, roles)
    for name in roles:
        for rank in range(ranks):
            layout = {"tp": 1, "dp": ranks, "world_size": ranks}
            note = {"rank": rank, "step": step, "layout": layout, "optimizer_step": step, "lr_schedule": None}
            _write_rank(folder, name, note, plain_blocks(2, 1, rank, ranks, seed=step), b"")
    return store.commit(step, roles, json_files(**extras), timeout_s=10)


def json_files(data=None, trainer_state=None):
    """The small files of a checkpoint, as the store takes them."""
    from skyrl_megatron.runtime.checkpoint.store import json_bytes

    values = {"data.json": data, "trainer_state.json": trainer_state}
    return {name: json_bytes(value or {}, name) for name, value in values.items()}


def read(store, checkpoint, role="policy"):
    """All tensors of a role, by key."""
    import torch

    from skyrl_megatron.runtime.checkpoint.rank_state import Block
    from skyrl_megatron.runtime.checkpoint.reader import RoleReader

    reader = RoleReader(store.storage, checkpoint.folder, checkpoint.manifest, role)
    blocks = [
        Block(key, stored.shape, (0,) * len(stored.shape), stored.shape, torch.empty(stored.shape).view(-1))
        for key, stored in reader.tensors.items()
    ]
    reader.load(blocks)
    return {block.key: block.data.view(block.sizes) for block in blocks}


def expected(step, ranks=1):
    import torch

    from tests.checkpoint.blocks import plain_blocks

    parts = [plain_blocks(2, 1, rank, ranks, seed=step) for rank in range(ranks)]
    return {each[0].key: torch.cat([part.data.view(part.sizes) for part in each]) for each in zip(*parts, strict=True)}


def same(a, b):
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_two_ranks_two_roles_one_checkpoint(tmp_path):
    """A critic lies beside the policy; the checkpoint is complete when both are."""
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path)
    write(store, 4, ranks=2, more_roles=("critic",), data={"cursor": 12}, trainer_state={"kl_coef": 0.5})
    found = newest(store)
    assert found.step == 4 and found.manifest.roles() == ["critic", "policy"]
    for role in ("policy", "critic"):
        assert same(read(store, found, role), expected(4, ranks=2))
    assert store.read_json(found, "data.json") == {"cursor": 12}
    assert store.read_json(found, "trainer_state.json") == {"kl_coef": 0.5}
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "4\n"
    with pytest.raises(CheckpointError, match="holds critic, policy, not reward"):
        read(store, found, "reward")
    store.close()


def test_retention_keeps_what_is_sound(tmp_path):
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        write(store, step)
    assert store.steps() == [3, 2]
    # 3 loses a file: it does not count, and pruning to one keeps 2.
    (tmp_path / "global_step_3" / "policy" / "__0_0.distcp").unlink()
    assert store.prune(1) == [] and store.steps() == [3, 2]
    # 5 is flipped: all sizes are right, so only its hashes tell. The newest verified one, 4, stays beside it.
    write(store, 4)
    write(store, 5)
    shard = tmp_path / "global_step_5" / "policy" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    assert store.prune(1) == []
    assert set(store.steps()) >= {5, 4}
    with pytest.raises(CheckpointError, match=r"global_step_5.*damaged"):
        store.verify(store.folder(5))
    assert store.verify(store.folder(4)).step == 4
    # When nothing is sound nothing is removed.
    shard = tmp_path / "global_step_4" / "policy" / "__0_0.distcp"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert store.prune(1) == []
    assert store.steps()[:2] == [5, 4]
    store.close()


def test_the_best_is_kept_beside_the_newest(tmp_path):
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path, keep=2)
    assert store.best() is None
    write(store, 1)
    store.mark_best(1, "eval/all/avg_score", 0.5)
    for step in (2, 3, 4):
        write(store, step)
    assert store.steps() == [4, 3, 1]
    store.mark_best(4, "eval/all/avg_score", 0.75)
    write(store, 5)
    assert store.steps() == [5, 4]  # the former best is one of the others
    facts = CheckpointStore(tmp_path).best()
    assert (facts["step"], facts["metric"], facts["value"]) == (4, "eval/all/avg_score", 0.75)
    store.close()
    # Another run saves a step of the same number: that is not the best of anything.
    anew = CheckpointStore(tmp_path, keep=2)
    write(anew, 4)
    assert anew.best() is None
    with pytest.raises(CheckpointError, match="global_step_9"):
        anew.mark_best(9, "eval/all/avg_score", 1.0)
    anew.close()


def test_saving_a_step_again_replaces_it(tmp_path):
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path)
    write(store, 1)
    write(store, 1, trainer_state={"again": True})
    assert store.read_json(newest(store), "trainer_state.json") == {"again": True}
    store.close()
    # Killed between the two renames: the old one comes back.
    (tmp_path / "global_step_1").rename(tmp_path / "global_step_1.replaced")
    store = CheckpointStore(tmp_path)
    store.open_for_writing()
    assert newest(store).step == 1
    store.close()


def as_before_branches(folder):
    """Write the manifest as versions without branches did."""
    from skyrl_megatron.runtime.checkpoint.manifest import _self_hash

    path = folder / "MANIFEST.json"
    body = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("branch", "ancestry", "self")}
    path.write_text(json.dumps(body | {"self": _self_hash(body)}))


@pytest.mark.parametrize("older_version", [False, True])
def test_a_run_that_starts_anew_is_not_mixed_with_the_one_before(tmp_path, older_version):
    """Higher steps of the run before are named, neither resumed nor counted nor removed."""
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path)
    for step in (4, 900, 1000):
        write(store, step)
        if older_version:
            as_before_branches(tmp_path / f"global_step_{step}")
    store.close()
    anew = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 30):
        write(anew, step)
    assert anew.complete_steps() == [30, 20] and anew.steps() == [1000, 900, 30, 20, 4]
    with pytest.warns(
        SkyRLMegatronWarning, match="global_step_1000, global_step_900, global_step_4 belong to another"
    ):
        assert [found.step for found in CheckpointStore(tmp_path).candidates()] == [30, 20]
    anew.close()


@pytest.mark.parametrize("older_version", [False, True])
def test_a_branch_that_was_given_up(tmp_path, older_version):
    """A run goes back to its step 20: what it saved after that is another branch, what came before still counts."""
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30, 40):
        write(store, step)
        if older_version:
            as_before_branches(tmp_path / f"global_step_{step}")
    store.close()
    back = CheckpointStore(tmp_path, keep=3)
    back.continue_from(back.open(20))
    write(back, 25)
    back.close()
    with pytest.warns(SkyRLMegatronWarning, match="global_step_40, global_step_30 belong to another"):
        assert [found.step for found in CheckpointStore(tmp_path).candidates()] == [25, 20, 10]
    again = CheckpointStore(tmp_path, keep=3)
    again.continue_from(again.open(25))
    write(again, 35)
    assert again.complete_steps() == [35, 25, 20] and again.steps() == [40, 35, 30, 25, 20]
    again.close()


@pytest.mark.parametrize("resumed", [False, True])
def test_killed_before_the_pointer_moved(tmp_path, resumed, recwarn):
    """A complete checkpoint above the pointer counts where it continues the one that the pointer names."""
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path)
    write(store, 1)
    write(store, 2)
    if resumed:
        store.close()
        store = CheckpointStore(tmp_path)
        store.continue_from(store.open(2))
    write(store, 3)
    (tmp_path / "latest_ckpt_global_step.txt").write_text("2\n")
    assert [found.step for found in store.candidates()] == [3, 2, 1]
    assert not [each for each in recwarn if issubclass(each.category, SkyRLMegatronWarning)]  # imports have others
    store.close()


def test_no_checkpoint_of_a_step_that_was_not_finite(tmp_path):
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path)
    with pytest.warns(SkyRLMegatronWarning, match="step 3 was not finite: it is not saved"):
        assert store.begin(3, {"policy": 1}, last_step_finite=False) is None
    assert store.steps() == []


def test_failed_and_late_ranks_are_named(tmp_path):
    from skyrl_megatron.runtime.checkpoint.rank_files import _note_failure
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path)
    write(store, 1)
    store.begin(2, {"policy": 2})
    with pytest.raises(CheckpointError, match=r"policy ranks \[0, 1\] have not written within"):
        store.commit(2, {"policy": 2}, {}, timeout_s=0.2)
    folder = store.begin(2, {"policy": 2})
    _note_failure(store.storage, f"{folder}/policy", 1, "rank 1 cannot write")
    with pytest.raises(CheckpointError, match="rank 1 cannot write"):
        store.commit(2, {"policy": 2}, {}, timeout_s=60)
    with pytest.raises(CheckpointError, match=r"data.json can only hold plain JSON values"):
        json_files(data={"cursor": object()})
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["global_step_1"]
    store.close()


def test_a_gap_or_an_overlap_is_refused(tmp_path):
    """The blocks of all ranks must cover every tensor exactly once."""
    from dataclasses import replace

    from skyrl_megatron.runtime.checkpoint.rank_files import _write_rank
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore
    from tests.checkpoint.blocks import plain_blocks

    note = {"rank": 0, "step": 1, "layout": {}, "optimizer_step": 1, "lr_schedule": None}
    store = CheckpointStore(tmp_path)
    for shape, message in {(1024, 1024): "262144 were written", (256, 1024): "was written twice"}.items():
        blocks = [replace(block, global_shape=shape) for block in plain_blocks(2, 1)]
        blocks += blocks if shape[0] == 256 else []
        folder = store.begin(1, {"policy": 1})
        _write_rank(folder, "policy", dict(note), blocks, b"")
        with pytest.raises(CheckpointError, match=message):
            store.commit(1, {"policy": 1}, {}, timeout_s=10)
    assert newest(store) is None
    store.close()


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_object_store(tmp_path, scheme):
    """No renames there: a prefix is a checkpoint once it has its manifest. Addresses are never taken for paths."""
    import fsspec

    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore, resume_candidates

    root = f"memory://bucket{tmp_path}" if scheme == "memory" else f"file://{tmp_path}/run"
    store = CheckpointStore(root, keep=2)
    for step in (1, 2, 3):
        folder = write(store, step)
    assert folder == f"{root}/global_step_3"
    assert store.steps() == [3, 2] and store.pointer() == 3
    assert same(read(store, newest(store)), expected(3))
    files = fsspec.filesystem(scheme)
    place = files._strip_protocol(f"{root}/global_step_3")
    assert not [name for name in files.ls(place, detail=False) if ".tmp" in name]
    files.rm(f"{place}/MANIFEST.json")
    with pytest.warns(SkyRLMegatronWarning, match=r"global_step_3 has no MANIFEST.json.*skipped"):
        assert newest(store).step == 2
    found = next(resume_candidates(store, "from_path", f"{root}/global_step_2"))
    assert found.folder == f"{root}/global_step_2" and same(read(store, found), expected(2))


def test_addresses_stay_whole():
    from skyrl_megatron.runtime.checkpoint.storage import open_storage

    with pytest.raises(CheckpointError, match=r"gs://bucket/run: .*install"):
        open_storage("gs://bucket/run")
    with pytest.raises(CheckpointError, match=r"trainer.ckpt_path is empty"):
        open_storage("")


def test_archive_of_another_torch(tmp_path):
    """The bytes around the data may differ: data is found by the zip's own directory, without unpickling."""
    import io

    import torch

    from bridges.errors import BridgeError
    from bridges.torch_dist import Chunk, tensor_in

    tensor = torch.randn(3, 5)
    buffer = io.BytesIO()
    torch.save(tensor, buffer, pickle_protocol=4)
    archive = memoryview(bytearray(buffer.getvalue()))
    chunk = Chunk((0, 0), (3, 5), "file", 0, len(archive))
    assert torch.equal(tensor_in(archive, chunk, torch.float32, "folder"), tensor)
    buffer = io.BytesIO()
    torch.save(tensor.t(), buffer)
    strided = memoryview(bytearray(buffer.getvalue()))
    found = tensor_in(strided, Chunk((0, 0), (5, 3), "file", 0, len(strided)), torch.float32, "folder")
    assert torch.equal(found, tensor.t())
    with pytest.raises(BridgeError, match="60 bytes of data instead of 64"):
        tensor_in(archive, Chunk((0, 0), (4, 4), "file", 0, len(archive)), torch.float32, "folder")


def test_a_small_file_is_on_the_disk_before_it_is_seen(tmp_path, monkeypatch):
    """After a power cut a manifest, or the pointer, is the old one or the new, and never empty."""
    from skyrl_megatron.runtime.checkpoint.storage import LocalStorage

    calls = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)

        def noted(first, *others, name=name, call=call):
            path = first if name == "replace" else os.readlink(f"/proc/self/fd/{first}")
            calls.append((name, path, os.path.exists(path) and os.path.getsize(path)))
            return call(first, *others)

        monkeypatch.setattr(os, name, noted)
    path = f"{tmp_path}/manifest.json"
    LocalStorage(tmp_path).write(path, b"content")
    assert calls[:2] == [("fsync", f"{path}.new", 7), ("replace", f"{path}.new", 7)]
    assert calls[2][:2] == ("fsync", str(tmp_path)) and len(calls) == 3


def test_manifest_refuses_damage_and_other_formats():
    from skyrl_megatron.runtime.checkpoint.manifest import FileEntry, Manifest, _self_hash

    data = Manifest(3, {"a": FileEntry(1, ["0"])}, {"policy": {"tp": 2}}).to_bytes()
    assert Manifest.from_bytes(data, "m").step == 3
    for bad in (b"", b"[]", b"{}", data[:-3], data.replace(b'"step": 3', b'"step": 4')):
        with pytest.raises(CheckpointError, match="m is damaged"):
            Manifest.from_bytes(bad, "m")
    body = json.loads(data)
    del body["self"]
    body["format"] = 99
    with pytest.raises(CheckpointError, match="has format 99"):
        Manifest.from_bytes(json.dumps(body | {"self": _self_hash(body)}).encode(), "m")
    for outside in ("/etc/passwd", "policy/../../other"):
        hostile = Manifest(3, {outside: FileEntry(1, ["0"])}, {"policy": {"tp": 2}}).to_bytes()
        with pytest.raises(CheckpointError, match="outside of the checkpoint: refused"):
            Manifest.from_bytes(hostile, "m")


def test_export_schedule(tmp_path):
    from skyrl_megatron.trainer.checkpoints import export_due, prepare_export

    assert [step for step in range(1, 8) if export_due(step, 3, is_last=step == 7)] == [3, 6, 7]
    assert not any(export_due(step, never, is_last=step == 7) for step in range(1, 8) for never in (0, -1))
    target = prepare_export(tmp_path, 6)
    assert target == tmp_path / "global_step_6" / "policy"
    target.mkdir(parents=True)
    assert prepare_export(tmp_path, 6) == target and not target.exists()
    shutil.rmtree(tmp_path)
