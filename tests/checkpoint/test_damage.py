"""Damaged and hostile folders: resume takes the newest sound checkpoint or explains, and runs nothing it finds."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from tests.checkpoint import training
from tests.checkpoint.ranks import RankCheckpointer


def flip(path, at=None):
    """Change one bit, in the middle or in the first occurrence of ``at``."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else data.index(at)] ^= 0x01
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def first_shard(folder):
    return folder / "policy" / "__0_0.distcp"


DAMAGE = {
    "shard truncated": lambda f: truncate(first_shard(f)),
    "shard flipped": lambda f: flip(first_shard(f)),
    "shard deleted": lambda f: first_shard(f).unlink(),
    "manifest truncated": lambda f: truncate(f / "MANIFEST.json"),
    "manifest flipped": lambda f: flip(f / "MANIFEST.json", at=b"world_size"),
    "manifest deleted": lambda f: (f / "MANIFEST.json").unlink(),
    "metadata flipped": lambda f: flip(f / "policy" / ".metadata"),
    "metadata emptied": lambda f: (f / "policy" / ".metadata").write_bytes(b""),
    "state deleted": lambda f: (f / "policy" / "state.json").unlink(),
    "random states flipped": lambda f: flip(f / "policy" / "rng_00000.safetensors"),
    "trainer state flipped": lambda f: flip(f / "trainer_state.json"),
    "of another step": lambda f: (shutil.rmtree(f), shutil.copytree(f.with_name("global_step_1"), f)),
}
POINTER = {
    "pointer to a missing step": lambda p: p.write_text("7\n"),
    "pointer empty": lambda p: p.write_text(""),
    "pointer truncated to garbage": lambda p: p.write_bytes(b"\xff\x00"),
    "pointer behind": lambda p: p.write_text("1\n"),
    "pointer deleted": lambda p: p.unlink(),
}


def resume_all(folder, root, out):
    """Every damage on a copy of two checkpoints: name → (step or error, warnings, whether the weights are step's)."""
    import warnings

    from skyrl_megatron.errors import CheckpointError

    engine = training.engine(folder, "single")
    state = training.state_of(engine)
    checkpointer = RankCheckpointer(root, state)
    held = {}
    for step in (1, 2):
        training.train(engine, [step])
        held[step] = training.local_digests(engine)
        checkpointer.save(step, trainer_state={"kl_coef": 0.1})
    checkpointer.close()

    def attempt(name, harm, mode="latest", path=None):
        copy = Path(out) / name.replace(" ", "_")
        shutil.copytree(root, copy)
        harm(copy)
        training.train(engine, [9])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = RankCheckpointer(copy, state, seed=0).load(mode, path and str(copy / path))
                result = found and found.step
            except CheckpointError as error:
                result = str(error)
        return result, [str(each.message) for each in caught], training.local_digests(engine) == held.get(result)

    results = {name: attempt(name, lambda c, h=harm: h(c / "global_step_2")) for name, harm in DAMAGE.items()}
    pointer = "latest_ckpt_global_step.txt"
    results |= {name: attempt(name, lambda c, h=harm: h(c / pointer)) for name, harm in POINTER.items()}
    both = ("global_step_1", "global_step_2")
    results["all damaged"] = attempt("all", lambda c: [flip(first_shard(c / step)) for step in both])
    results["nothing there"] = attempt("none", lambda c: [shutil.rmtree(c / step) for step in both])
    results["from_path"] = attempt("path", lambda c: None, "from_path", "global_step_1")
    results["from_path damaged"] = attempt("path2", lambda c: flip(first_shard(c / both[1])), "from_path", both[1])
    results["from_path missing"] = attempt("path3", lambda c: None, "from_path", "global_step_5")
    results["from_path unset"] = attempt("path4", lambda c: None, "from_path", None)
    results["none"] = attempt("mode", lambda c: None, "none")
    results["null"] = attempt("null", lambda c: None, None)
    return results


def hostile_all(folder, root, out):
    """Every attack on a copy of a checkpoint, with a manifest that fits: name → the error."""
    from skyrl_megatron.errors import CheckpointError

    engine = training.engine(folder, "single")
    state = training.state_of(engine)
    checkpointer = RankCheckpointer(root, state)
    checkpointer.save(1)
    checkpointer.close()
    results = {}
    for name, attack in ATTACKS.items():
        copy = Path(out) / name.replace(" ", "_")
        shutil.copytree(root, copy)
        trap = copy / "trap"
        attack(copy / "global_step_1", trap)
        try:
            RankCheckpointer(copy, state, seed=0).load("from_path", str(copy / "global_step_1"))
            results[name] = "loaded"
        except CheckpointError as error:
            results[name] = str(error)
        assert not trap.exists(), f"{name}: code of the checkpoint was run"
    return results


class Trap:
    """A pickle of it creates a file when it is loaded without care."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def sign_again(folder):
    """A manifest for the folder as it is now: what an attacker would write."""
    from skyrl_megatron.runtime.checkpoint.manifest import Manifest, hash_bytes

    path = folder / "MANIFEST.json"
    manifest = Manifest.from_bytes(path.read_bytes(), str(path))
    manifest.files = {name: hash_bytes((folder / name).read_bytes()) for name in manifest.files}
    path.write_bytes(manifest.to_bytes())


def replace_metadata(folder, trap):
    (folder / "policy" / ".metadata").write_bytes(pickle.dumps(Trap(trap)))
    sign_again(folder)


def poison_metadata(folder, trap):
    """The true metadata with a trap inside."""
    path = folder / "policy" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Trap(trap)
    path.write_bytes(pickle.dumps(metadata))
    sign_again(folder)


def poison_object(folder, trap):
    """A trap as the object ``common_state``."""
    import io

    import torch

    path, shard = folder / "policy" / ".metadata", first_shard(folder)
    metadata = pickle.loads(path.read_bytes())
    place = next(info for index, info in metadata.storage_data.items() if index.fqn.startswith("common_state"))
    buffer = io.BytesIO()
    torch.save([Trap(trap)], buffer)
    place.offset, place.length = shard.stat().st_size, len(buffer.getvalue())
    shard.write_bytes(shard.read_bytes() + buffer.getvalue())
    path.write_bytes(pickle.dumps(metadata))
    sign_again(folder)


def poison_tensor(folder, trap):
    """A trap in the place of a tensor."""
    import io

    import torch

    path, shard = folder / "policy" / ".metadata", first_shard(folder)
    metadata = pickle.loads(path.read_bytes())
    place = next(
        info for index, info in metadata.storage_data.items() if index.fqn == "embedding.word_embeddings.weight"
    )
    buffer = io.BytesIO()
    torch.save((Trap(trap), " " * 2**20), buffer)  # as long as the tensor
    place.offset, place.length = shard.stat().st_size, len(buffer.getvalue())
    shard.write_bytes(shard.read_bytes() + buffer.getvalue())
    path.write_bytes(pickle.dumps(metadata))
    sign_again(folder)


def link_file(folder, trap):
    shard = first_shard(folder)
    outside = folder.parent / "outside"
    shard.rename(outside)
    shard.symlink_to(outside)


def link_folder(folder, trap):
    outside = folder.parent / "outside"
    (folder / "policy").rename(outside)
    (folder / "policy").symlink_to(outside)


def name_outside(folder, trap):
    path = folder / "MANIFEST.json"
    from skyrl_megatron.runtime.checkpoint.manifest import Manifest, hash_bytes

    manifest = Manifest.from_bytes(path.read_bytes(), str(path))
    (folder.parent / "outside").write_bytes(b"x")
    manifest.files["policy/../../outside"] = hash_bytes(b"x")
    path.write_bytes(manifest.to_bytes())


def point_outside(folder, trap):
    """Metadata that sends the reader to a file which is no part of the checkpoint."""
    path = folder / "policy" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../outside"
    (folder.parent / "outside").write_bytes(first_shard(folder).read_bytes())
    path.write_bytes(pickle.dumps(metadata))
    sign_again(folder)


ATTACKS = {
    "metadata": replace_metadata,
    "metadata inside": poison_metadata,
    "common state": poison_object,
    "tensor": poison_tensor,
    "link to a file": link_file,
    "link to a folder": link_folder,
    "path in the manifest": name_outside,
    "path in the metadata": point_outside,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return training.save_model(tmp_path_factory.mktemp("model"))


def test_damage(ranks, folder, tmp_path):
    results = ranks(1, resume_all, folder, str(tmp_path / "run"), str(tmp_path / "copies"))[0]
    for name in DAMAGE:
        step, messages, same = results[name]
        assert (step, same) == (1, True), (name, step, messages)
        assert any("global_step_2" in message and "skipped" in message for message in messages), (name, messages)
    for name in POINTER:
        step, messages, same = results[name]
        assert (step, same) == (2, True), (name, step, messages)
    for name, words in {"pointer to a missing step": "step 7", "pointer empty": "does not contain a step"}.items():
        assert any(words in message for message in results[name][1])
    assert "can be loaded" in results["all damaged"][0] and "resume_mode=none" in results["all damaged"][0]
    assert results["nothing there"][0] is None
    assert results["from_path"][::2] == (1, True)
    assert "is damaged between bytes" in results["from_path damaged"][0]
    assert "trainer.resume_path=" in results["from_path missing"][0]
    assert "trainer.resume_path is not set" in results["from_path unset"][0]
    assert results["none"][0] is None and results["null"][0] is None


def test_hostile(ranks, folder, tmp_path):
    results = ranks(1, hostile_all, folder, str(tmp_path / "run"), str(tmp_path / "copies"))[0]
    for name in ("metadata", "metadata inside", "common state"):
        assert "mkdir" in results[name] and "refused" in results[name], results[name]
    assert "not an archive of a tensor" in results["tensor"]
    for name in ("link to a file", "link to a folder", "path in the manifest"):
        assert "outside" in results[name] and "refused" in results[name], results[name]
    assert "does not say where" in results["path in the metadata"]
    check_manifest(tmp_path / "run" / "global_step_1")


def check_manifest(checkpoint):
    """The manifest lists every file but itself, and a one-block file has the hash that b3sum prints."""
    import blake3

    manifest = json.loads((checkpoint / "MANIFEST.json").read_bytes())
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == files - {"MANIFEST.json"}
    state = checkpoint / "policy" / "state.json"
    assert manifest["files"]["policy/state.json"]["blake3"] == [blake3.blake3(state.read_bytes()).hexdigest()]


def test_a_file_is_closed_while_it_is_read_ahead(tmp_path):
    """As after damage in its first block: the thread that reads ahead ends, wherever it is."""
    import threading

    from skyrl_megatron.runtime.checkpoint.manifest import BLOCK_BYTES, hash_bytes
    from skyrl_megatron.runtime.checkpoint.reader import HostBuffer, VerifiedFile
    from skyrl_megatron.runtime.checkpoint.storage import open_storage

    content = bytes(range(256)) * (BLOCK_BYTES // 256) * 8
    (tmp_path / "file").write_bytes(content)
    storage, entry = open_storage(tmp_path), hash_bytes(content)
    for number in range(20):
        file = VerifiedFile(storage, storage.path("file"), entry, HostBuffer(), [(0, len(content))])
        if number % 2:
            assert bytes(file.read(1, 9)) == content[1:9]
        closing = threading.Thread(target=file.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
