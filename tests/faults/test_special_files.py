"""Pipes, sockets, devices and links in folders of models, adapters, checkpoints and data: one error, before anything
opens them. What the Hugging Face hub's cache has is opened as ever."""

import json
import os
import shutil
import socket

import pytest


@pytest.fixture
def model(tmp_path):
    """A folder with the files of a model, and an adapter for it."""
    folder = tmp_path / "model"
    folder.mkdir()
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def pipe(path):
    os.mkfifo(path)


def bound_socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(path.parent, os.O_RDONLY)  # the names of sockets are short
        bound.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def device(path):
    path.symlink_to("/dev/zero")


def outside(path):
    other = path.parent.with_name("secret")
    other.write_text("{}")
    path.symlink_to(other)


KINDS = {"pipe": (pipe, "is a pipe"), "socket": (bound_socket, "is a socket"), "device": (device, "is a device"),
         "outside": (outside, "is a link to .*secret, outside of the folder")}  # fmt: skip


def put(path, kind):
    path.unlink()
    KINDS[kind][0](path)
    return KINDS[kind][1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_folder(model, name, kind):
    from bridges.errors import BridgeError
    from bridges.hf_io import HfFolder
    from skyrl_megatron.data.tokenizer import load_tokenizer
    from skyrl_megatron.errors import EngineError, ModelLoadError
    from skyrl_megatron.inference.vllm.settings import hf_config

    says = f"{name} {put(model / name, kind)}"
    with pytest.raises(BridgeError, match=says):
        HfFolder(model)
    with pytest.raises(ModelLoadError, match=says):
        load_tokenizer(model)
    with pytest.raises(EngineError, match=says):
        hf_config(model)


@pytest.mark.around
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_the_files_that_are_read_by_themselves(model, kind):
    """Whoever opens one file of a folder has not looked at the others."""
    from bridges.errors import BridgeError
    from bridges.files import read_hf_config, weights_fingerprint
    from bridges.hf_io import map_file, read_header
    from skyrl_megatron_lora.targets import BASE, base_mismatch
    from skyrl_megatron_observe.preflight.data_checks import _embeddings, _tokens

    (model / BASE).write_text("{}")
    for name in ("config.json", "model.safetensors", "tokenizer.json", BASE):
        put(model / name, kind)
    with pytest.raises(BridgeError, match="refused"):
        read_hf_config(model)
    for read in (lambda: read_header(model, "model.safetensors"), lambda: map_file(model / "model.safetensors"),
                 lambda: weights_fingerprint(model)):  # fmt: skip
        with pytest.raises(BridgeError, match="refused"):
            read()
    assert _tokens(model) == {} and _embeddings(model) is None and base_mismatch(model, "") is None


def test_a_header_of_more_than_its_file(model):
    """Of the file that is hashed to know a base model by."""
    from bridges.files import weights_fingerprint

    (model / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    assert len(weights_fingerprint(model)) == 64


def test_links_of_the_hub_cache(model, tmp_path):
    """A snapshot's files are links to blobs next to it; one to any other place is refused there too."""
    from bridges.errors import BridgeError
    from bridges.files import check_folder
    from bridges.source import copy_assets

    snapshot, blobs = tmp_path / "models--a--b/snapshots/abc", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, blobs / f"{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    check_folder(snapshot)
    copy_assets(snapshot, tmp_path / "out", {})
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    (tmp_path / "other").symlink_to(snapshot)
    check_folder(tmp_path / "other")
    (blobs / "2").unlink()
    outside(blobs / "2")
    with pytest.raises(BridgeError, match="outside of the folder"):
        check_folder(snapshot)


@pytest.mark.parametrize("kind", ["outside", "pipe"])
def test_nothing_from_elsewhere_is_exported(model, tmp_path, kind):
    from bridges.errors import BridgeError
    from bridges.source import copy_assets

    put(model / "tokenizer.json", kind)
    with pytest.raises(BridgeError, match=f"tokenizer.json {KINDS[kind][1]}"):
        copy_assets(model, tmp_path / "out", {})
    assert not (tmp_path / "out/tokenizer.json").exists()


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_an_adapter_folder(tmp_path, kind):
    from bridges.errors import BridgeError
    from bridges.peft import PeftFolder

    KINDS[kind][0](tmp_path / "adapter_config.json")
    with pytest.raises(BridgeError, match=f"adapter_config.json {KINDS[kind][1]}"):
        PeftFolder(tmp_path, None)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_a_checkpoint(tmp_path, kind):
    from bridges.errors import BridgeError
    from bridges.torch_dist import DistCheckpoint
    from skyrl_megatron.errors import CheckpointError
    from skyrl_megatron.runtime.checkpoint.manifest import MANIFEST, read_manifest
    from skyrl_megatron.runtime.checkpoint.storage import open_storage

    KINDS[kind][0](tmp_path / MANIFEST)
    storage = open_storage(tmp_path)
    with pytest.raises(CheckpointError, match=f"{KINDS[kind][1]}|outside"):
        read_manifest(storage, storage.root)
    with pytest.raises(CheckpointError, match=KINDS[kind][1]):
        storage.open(storage.path(MANIFEST))
    (tmp_path / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    KINDS[kind][0](tmp_path / ".metadata")
    with pytest.raises(BridgeError, match=f".metadata {KINDS[kind][1]}"):
        DistCheckpoint(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_a_data_set(tmp_path, name, kind):
    from skyrl_megatron.data.row_files import load_source
    from skyrl_megatron.errors import DataError

    KINDS[kind][0](tmp_path / name)
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(DataError):
            load_source(str(source))
