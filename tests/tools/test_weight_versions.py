"""Versions of weights in a folder and in an object store: what a reader has is what was published, bit for bit."""

from __future__ import annotations

import pytest

BASE_EVERY = 4


@pytest.fixture(params=["folder", "object store"])
def root(request, tmp_path):
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    import fsspec

    address = f"memory://{tmp_path.name}"
    yield address
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def weights():
    """Tensors of several types and sizes."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(300, 257, generator=generator).bfloat16(),
        "far apart": torch.zeros(200_000, dtype=torch.bfloat16),
        "bias": torch.randn(7, generator=generator),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "quantised": torch.randn(64, 64, generator=generator).to(torch.float8_e4m3fn),
        "never": torch.randn(50, 50, generator=generator).half(),
    }


def trained(tensors, step):
    """A step later: some elements have other bits, among them other zeros and other NaNs."""
    import torch

    new = {name: tensor.clone() for name, tensor in tensors.items()}
    new["matrix"].view(-1)[step::997] *= 1.01
    new["far apart"][0], new["far apart"][-1] = -0.0 if step % 2 else 0.0, float("nan")
    new["far apart"].view(torch.int16)[-1] += step  # another NaN
    new["bias"] += 1
    new["scalar"] *= 2
    new["quantised"].view(torch.uint8)[step] ^= 1
    return new


def same(one, other):
    import torch

    assert list(one) == list(other)
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name


def test_readers_have_what_was_published(root):
    """One that follows, one that comes late, and one that slept through two bases; payloads follow what changed."""
    from skyrl_megatron_tools.weight_versions import VersionReader, VersionWriter

    writer, tensors = VersionWriter(root, BASE_EVERY), weights()
    follows, sleeps = VersionReader(root), VersionReader(root)
    for step in range(1, 12):
        done = writer.publish(f"step {step}", tensors.items())
        assert done.base == (step % BASE_EVERY == 1) and done.number == step
        changed = follows.update()
        same(follows.tensors, tensors)
        if not done.base:
            assert changed == ["matrix", "far apart", "bias", "scalar", "quantised"]
            assert done.changed == 78 + 2 + 7 + 1 + 64 and done.nbytes < 2000, "of 555 kB"
        if step == 2:
            sleeps.update()
        tensors = trained(tensors, step)
    late = VersionReader(root)
    for reader in (late, sleeps):
        reader.update()
        same(reader.tensors, follows.tensors)
        assert (reader.number, reader.version, reader.chain) == (11, "step 11", follows.chain)
    assert follows.update() == [] and len(late.storage.names(root)) == 11 - BASE_EVERY


def test_a_writer_that_dies_leaves_the_version_before(root):
    """The next one goes on behind it, with what changed since; the one before then publishes nothing more."""
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron_tools.weight_versions import VersionReader, VersionWriter

    first, reader = weights(), VersionReader(root)
    second = trained(first, 1)
    VersionWriter(root).publish("first", first.items())

    def until_it_dies():
        yield from list(second.items())[:3]
        raise KeyboardInterrupt

    writer = VersionWriter(root)
    with pytest.raises(KeyboardInterrupt):
        writer.publish("second", until_it_dies())
    reader.update()
    same(reader.tensors, first)
    for step, again in ((2, lambda: writer), (3, lambda: VersionWriter(root))):
        tensors = trained(first, step)
        assert not again().publish("again", tensors.items()).base
        reader.update()
        same(reader.tensors, tensors)
    with pytest.raises(WeightSyncError, match="another writer published 00000003-delta; use one writer per store"):
        writer.publish("too late", first.items())


def test_a_tensor_that_comes_goes_or_grows(root):
    import torch

    from skyrl_megatron_tools.weight_versions import VersionReader, VersionWriter

    writer, reader, tensors = VersionWriter(root), VersionReader(root), weights()
    writer.publish("first", tensors.items())
    reader.update()
    del tensors["bias"]
    tensors |= {"new": torch.ones(3), "matrix": tensors["matrix"][:200]}
    assert not writer.publish("second", tensors.items()).base
    assert reader.update() == ["matrix", "new"]
    same(reader.tensors, tensors)


@pytest.mark.parametrize(
    "damage, message",
    [
        ("a bit of the data", r"2-delta: matrix is damaged \(hash .* remove this version"),
        ("the end of the data", "2-delta: quantised: 0 bytes are stored for 64 changed elements"),
        ("the manifest", "2-delta/manifest.json is damaged"),
        ("a version is gone", "3-delta does not follow version 1: another writer"),
        ("another run's version", "3-delta does not follow version 2: another writer published it"),
    ],
)
def test_damage_is_named_and_never_served(tmp_path, damage, message):
    import shutil

    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron_tools.weight_versions import VersionReader, VersionWriter

    tensors = weights()
    for root in (tmp_path / "store", tmp_path / "other"):
        writer = VersionWriter(root)
        for step in (1, 2, 3):
            writer.publish(f"{root.name} {step}", tensors.items())
            tensors = trained(tensors, step)
    root = tmp_path / "store"
    second, third = root / "00000002-delta", root / "00000003-delta"
    data = bytearray((second / "data").read_bytes())
    if damage == "a bit of the data":
        data[200] ^= 4
        (second / "data").write_bytes(data)
    if damage == "the end of the data":
        (second / "data").write_bytes(data[:-128])
    if damage == "the manifest":
        (second / "manifest.json").write_bytes(b'{"number": 2,')
    if damage == "a version is gone":
        shutil.rmtree(second)
    if damage == "another run's version":
        shutil.rmtree(third)
        shutil.copytree(tmp_path / "other" / third.name, third)
    reader = VersionReader(root)
    for _ in range(2):
        with pytest.raises(WeightSyncError, match=message):
            reader.update()
        assert not reader.tensors and not reader.number


def test_nothing_published_is_one_error(tmp_path):
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron_tools.weight_versions import VersionReader

    with pytest.raises(WeightSyncError, match="store contains no version: publish one first"):
        VersionReader(tmp_path / "store").update()


def test_folders_are_published_and_fetched(tmp_path, capsys):
    """By the command; what is fetched is the folder, tensors and config."""
    from safetensors.torch import load_file, save_file

    from skyrl_megatron_tools.weight_versions import main

    store, tensors = str(tmp_path / "store"), {name: weights()[name] for name in ("matrix", "bias", "never")}
    for step in (1, 2):
        folder = tmp_path / f"step {step}"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
        save_file(tensors, folder / "model.safetensors")
        assert main(["publish", str(folder), store]) == 0
        tensors["bias"] = tensors["bias"] + 1
    assert main(["fetch", store, str(tmp_path / "made"), "--like", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "version 2: 7 of 79607 elements" in said and "version 2, step 2, 3 tensors" in said
    same(*(dict(sorted(load_file(f / "model.safetensors").items())) for f in (tmp_path / "made", folder)))
    assert main(["fetch", store, str(tmp_path / "made"), "--like", str(folder)]) == 1
    assert main(["fetch", str(tmp_path / "none"), str(tmp_path / "more"), "--like", str(folder)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "made exists" in told[0] and "contains no version" in told[1]
