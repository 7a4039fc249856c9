"""Files that a disk or an enemy changed: one error that names the file, or what it holds is used. Nothing else is
raised, nothing outside of the folder is opened, nothing runs."""

import json
import shutil
import warnings

import pytest
from hypothesis import strategies as st

from tests.faults import fuzz
from tests.faults.fuzz import mutated

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a small checkpoint."""
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore
    from tests.checkpoint.test_store import write

    store = CheckpointStore(tmp_path_factory.mktemp("checkpoints"))
    folder = write(store, 1, trainer_state={"kl_coef": 0.5})
    store.close()
    return store.storage.path(f"{folder}")


def opened(root):
    """What a run finds in a folder of checkpoints: a step, None, or the error's text."""
    from skyrl_megatron.errors import CheckpointError
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore
    from tests.checkpoint.test_store import read

    store = CheckpointStore(root)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for found in store.candidates():
                read(store, found)
                store.verify(found.folder)
                return found.step
    except CheckpointError as error:
        return str(error)
    return None


@mutated
def test_a_checkpoint_with_changed_bytes(checkpoint, tmp_path, data):
    """Whatever file it is: every byte has a hash."""
    from pathlib import Path

    root = tmp_path / "copy"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(Path(checkpoint).parent, root, ignore=shutil.ignore_patterns(".lock"))
    folder = root / Path(checkpoint).name
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    right = path.read_bytes()
    path.write_bytes(changed := data.draw(fuzz.flipped(right)))
    found = opened(root)
    same = changed == right or (path.name == "MANIFEST.json" and _json(changed) == json.loads(right))
    assert found == 1 if same else found != 1, f"{path.name} was changed, and nobody noticed"


def _json(content):
    try:
        return json.loads(content)
    except ValueError:
        return None


@mutated
def test_a_manifest_whose_hash_is_right(checkpoint, data):
    """Its hash is no signature: whoever changes it can state the right one."""
    from pathlib import Path

    from skyrl_megatron.errors import CheckpointError
    from skyrl_megatron.runtime.checkpoint.manifest import Manifest, _self_hash

    right = json.loads((Path(checkpoint) / "MANIFEST.json").read_bytes())
    del right["self"]
    body = data.draw(fuzz.changed(right))
    if isinstance(body, dict):
        body["self"] = _self_hash(body)
    try:
        read = Manifest.from_bytes(fuzz.as_json(body), "m")
    except CheckpointError as error:
        assert str(error).startswith("m ")
    else:
        assert isinstance(read.step, int) and not [name for name in read.files if name.startswith("/")]
        again = Manifest.from_bytes(read.to_bytes(), "m")
        assert again.files == read.files


@mutated
def test_a_pickle_of_a_checkpoint(data):
    """Whatever it holds, the one error."""
    from bridges.errors import BridgeError
    from bridges.metadata import parse_common_state, parse_metadata

    content = data.draw(st.one_of(st.binary(max_size=200), st.just(fuzz.DEEP)))
    for parse in (parse_metadata, parse_common_state):
        with pytest.raises(BridgeError):
            parse(content, "x")


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """A ``torch_dist`` checkpoint of two tensors, one in two chunks."""
    import torch

    from bridges.staging import LocalFile
    from bridges.torch_dist import ChunkFile, write_metadata

    folder = tmp_path_factory.mktemp("distributed")
    file = ChunkFile("__0_0.distcp", LocalFile(folder / "__0_0.distcp"))
    for key, offsets in (("a", (0, 0)), ("a", (2, 0)), ("b", (0, 0))):
        file.append(key, offsets, (2, 3), torch.float32, [memoryview(bytes(24))])
    tensors = {"a": ((4, 3), torch.float32), "b": ((2, 3), torch.float32)}
    write_metadata(folder, tensors, [file], {"iteration": 3})
    return folder


def all_read(folder):
    """Open a ``torch_dist`` checkpoint and read every tensor and what is none."""
    from bridges.metadata import parse_common_state, parse_metadata
    from bridges.torch_dist import DistCheckpoint, common_state_chunk

    checkpoint = DistCheckpoint(folder)
    for key, stored in checkpoint.tensors.items():
        checkpoint.read(key, (0,) * len(stored.shape), stored.shape)
    place = common_state_chunk(parse_metadata((folder / ".metadata").read_bytes(), "m"), "m")
    content = (folder / place.file).read_bytes()[place.start : place.start + place.length]
    return set(checkpoint.tensors), parse_common_state(content, "m")


@mutated
def test_a_distributed_checkpoint(distributed, tmp_path, data):
    """Of its metadata or its chunks: no byte of them is trusted."""
    from bridges.errors import BridgeError

    assert all_read(distributed) == ({"a", "b"}, {"iteration": 3})
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(distributed, folder)
    path = folder / data.draw(st.sampled_from([".metadata", "__0_0.distcp", "metadata.json"]))
    path.write_bytes(data.draw(fuzz.flipped(path.read_bytes())))
    try:
        all_read(folder)
    except BridgeError as error:
        assert str(error)


def pickled_tuple(levels):
    """A tuple of two tuples, each of two, and so on, as the key of a dict: its hash looks at 2**levels of them."""
    return b"\x80\x04})" + b"\x94h\x00h\x00\x86" + b"".join(
        b"\x94h%ch%c\x86" % (level, level) for level in range(1, levels)
    ) + b"Ns."  # fmt: skip


BOMBS = {
    "a place in the memo": b"\x80\x04Nr\xff\xff\xff\x07.",
    "a place in the memo, a later one": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "bytes that are not there": b"\x80\x04\x8e" + (16 << 30).to_bytes(8, "little") + b".",
    "text that is not there": b"\x80\x04\x8d" + (16 << 30).to_bytes(8, "little") + b".",
    "an array that is not there": b"\x80\x05\x96" + (16 << 30).to_bytes(8, "little") + b".",
    "a number of 2 GiB": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "a tuple of tuples as a key": pickled_tuple(100),
    "attributes of a class": b"\x80\x04\x8c\x05torch\x8c\x04Size\x93N}\x8c\x01xNs\x86b.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_asks_for_more_than_it_is(name):
    """Of memory, of time, or to change what this process has. A tuple bomb would never end."""
    import tracemalloc

    from bridges.errors import BridgeError
    from bridges.metadata import parse_metadata

    tracemalloc.start()
    try:
        with pytest.raises(BridgeError, match=r"the file (is damaged or not|does not hold)"):
            parse_metadata(BOMBS[name], "the file")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def zip_of(pickled, compression):
    import io
    import zipfile

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(24))
    return content.getvalue()


def test_an_archive_that_inflates():
    """``torch.save`` compresses nothing: 40 KB of an archive are not read as 40 MiB."""
    import tracemalloc
    import zipfile

    import torch

    from bridges.errors import BridgeError
    from bridges.metadata import parse_common_state
    from bridges.torch_dist import parse_archive

    content = zip_of(bytes(40 << 20), zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    try:
        with pytest.raises(BridgeError, match="is compressed"):
            parse_common_state(content, "x")
        with pytest.raises(ValueError, match="is compressed"):
            parse_archive(memoryview(content), (2, 3), torch.float32)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@mutated
def test_the_archive_of_a_tensor(data):
    """As another torch wrote it."""
    import io

    import torch

    from bridges.torch_dist import parse_archive

    buffer = io.BytesIO()
    torch.save(torch.arange(6.0).view(2, 3).t(), buffer)
    content = data.draw(fuzz.flipped(buffer.getvalue()))
    try:
        begin, (offset, size, stride) = parse_archive(memoryview(content), (3, 2), torch.float32)
    except ValueError as error:
        assert str(error)
    else:
        assert size == (3, 2) and 0 <= begin <= len(content) - 24
        assert offset + 2 * stride[0] + stride[1] < 6


def shared_chunks(metadata):
    """Every chunk of all tensors is the whole file."""
    end = max(info.offset + info.length for info in metadata.storage_data.values())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, end


def wide(metadata):
    """A tensor of 2**60 elements of which one chunk is stored."""
    import torch

    stored = metadata.state_dict_metadata["b"]
    stored.size = torch.Size((2**30, 2**30))
    stored.chunks[0].sizes = stored.size


def twice(metadata):
    stored = metadata.state_dict_metadata["a"]
    stored.chunks = [stored.chunks[0]] * 1000


@pytest.mark.parametrize("change", [shared_chunks, wide, twice], ids=lambda change: change.__name__)
def test_metadata_of_more_than_its_files(distributed, tmp_path, change):
    """Sizes that metadata declares are compared with those of the files before memory is taken."""
    import pickle

    from bridges.errors import BridgeError
    from bridges.torch_dist import DistCheckpoint

    folder = tmp_path / "copy"
    shutil.copytree(distributed, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BridgeError, match="refused"):
        DistCheckpoint(folder)


# ------------------------------------------------------------------ model and adapter folders
@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tests.support.tiny_models import write_tiny_model

    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"))


def header_of(content):
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header, rest):
    text = fuzz.as_json(header)
    return len(text).to_bytes(8, "little") + text + rest


@mutated
def test_weights_of_a_model_folder(model, tmp_path, data):
    """What stands in a header is of the file, or it is refused before anything is mapped by it."""
    from bridges.errors import BridgeError
    from bridges.hf_io import read_header

    (right,) = model.glob("*.safetensors")
    header, rest = header_of(right.read_bytes())
    few_tensors = dict(list(header.items())[:3])
    whole = with_header(few_tensors, b"")
    head = data.draw(  # without the weights, as hypothesis keeps what it draws
        st.one_of(
            fuzz.changed(few_tensors).map(lambda changed: with_header(changed, b"")),
            fuzz.flipped(whole),
            st.just(len(fuzz.DEEP).to_bytes(8, "little") + fuzz.DEEP),
        )
    )
    content = head + rest
    (tmp_path / "x.safetensors").write_bytes(content)
    try:
        found = read_header(tmp_path, "x.safetensors")
    except BridgeError as error:
        assert "x.safetensors" in str(error)
    else:
        for info in found.values():
            assert all(type(size) is int and size >= 0 for size in info.shape)
            assert type(info.start) is type(info.end) is int and 8 <= info.start <= info.end <= len(content)


@pytest.mark.parametrize("key, count", [("num_hidden_layers", 10**9), ("num_experts", 10**40)])
def test_a_model_of_a_billion_layers(model, key, count):
    """Names of its weights would fill the memory."""
    from bridges.errors import BridgeError
    from bridges.plan import Plan

    right = json.loads((model / "config.json").read_text())
    with pytest.raises(BridgeError, match="implausibly large"):
        Plan.of(right | {key: count})


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """An adapter of one projection, as PEFT writes it."""
    import torch
    from safetensors.torch import save_file

    folder, config = tmp_path_factory.mktemp("adapter"), json.loads((model / "config.json").read_text())
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    heads = config["num_attention_heads"] * config["head_dim"]
    factors = {name.format("A"): torch.zeros(4, config["hidden_size"]), name.format("B"): torch.zeros(heads, 4)}
    save_file(factors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


@mutated
def test_an_adapter_folder(model, adapter, tmp_path, data):
    from bridges.errors import BridgeError
    from bridges.peft import PeftFolder
    from bridges.plan import Plan

    plan = Plan.of(json.loads((model / "config.json").read_text()))
    assert PeftFolder(adapter, plan).modules
    about = json.loads((adapter / "adapter_config.json").read_text())
    header, rest = header_of((adapter / "adapter_model.safetensors").read_bytes())
    (tmp_path / "adapter_config.json").write_bytes(data.draw(fuzz.bodies(about)))
    weights = with_header(data.draw(st.one_of(st.just(header), fuzz.changed(header))), rest)
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    try:
        found = PeftFolder(tmp_path, plan)
        for module in found.modules:
            found.factor(module, "A"), found.factor(module, "B")
    except BridgeError as error:
        assert str(tmp_path) in str(error), error


def test_the_settings_of_an_adapter_of_stacked_experts(model, tmp_path):
    """300 of them with another value of a field: the adapter, or one error that names the file."""
    import math
    import random

    import torch
    from safetensors.torch import save_file

    from bridges.errors import BridgeError
    from bridges.peft import CONFIG, WEIGHTS, PeftFolder
    from bridges.plan import Plan
    from tests.lora.stacked import stack_experts

    plan = Plan.of(json.loads((model / "config.json").read_text()))
    experts = [piece for entry in plan.entries if entry.is_expert and entry.layer == 0 for piece in entry.hf]
    factors = {
        f"{piece.name.removesuffix('.weight')}.{letter}": torch.zeros(shape)
        for piece in experts
        for letter, shape in (("A", (4, piece.shape[1])), ("B", (piece.shape[0], 4)))
    }
    save_file({name: each.contiguous() for name, each in stack_experts(factors, plan).items()}, tmp_path / WEIGHTS)
    right = {
        **{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True, "bias": "none", "target_modules": ["x"]},
        **{"rank_pattern": {"gate_up_proj": 4}, "alpha_pattern": {"gate_up_proj": 8}, "base_model_name_or_path": "m"},
    }
    values = [None, True, 0, -1, 3, 4.0, 1e300, math.inf, math.nan, 10**400, "", "4", [], [4], {}]
    values += [{"gate_up_proj": each} for each in (0, -4, None, "4", [4], 1e300, 10**400, True)]
    rng, refused = random.Random(7), 0
    for _ in range(300):
        about = dict(right)
        for key in rng.sample(list(about), rng.randint(1, 2)):
            if rng.random() < 0.1:
                del about[key]
            else:
                about[key] = rng.choice(values)
        (tmp_path / CONFIG).write_text(json.dumps(about))
        try:
            assert math.isfinite(PeftFolder(tmp_path, plan).config.scale)
        except BridgeError as error:
            assert str(tmp_path) in str(error), error
            refused += 1
    assert 100 < refused < 300


# ------------------------------------------------------------------ settings
@mutated
def test_settings(data):
    """Of a command line and of a mapping: every mistake is a ConfigError, and a value stays a value."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.errors import ConfigError, SkyRLMegatronWarning

    key = st.sampled_from(
        ["trainer.seed", "trainer", "data.train_data", "generator.sampling_params.stop", "x", "", "a..b"]
    )
    text = st.one_of(
        st.text(max_size=30),
        st.sampled_from(
            [
                "!!python/object/apply:os.system [id]",
                "${oc.env:HOME}",
                "&a [*a]",
                "[" * 5000,
                "{a: " * 500,
                "!!binary x",
                "9" * 5000,
                "2024-01-01",
                "<<: x",
            ]
        ),
    )
    arguments = data.draw(st.lists(st.one_of(st.tuples(key, text).map("=".join), text), min_size=1, max_size=2))
    mapping = data.draw(fuzz.changed({"trainer": {"seed": 1, "run_name": "a"}, "data": {"train_data": ["x"]}}))
    for made in (arguments, mapping):
        if made is arguments or isinstance(made, dict):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="given twice", category=SkyRLMegatronWarning)
                try:
                    SkyRLTrainConfig.from_cli_overrides(made)
                except ConfigError as error:
                    assert str(error)
