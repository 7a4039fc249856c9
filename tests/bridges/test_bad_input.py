"""Every kind of bad input: one BridgeError that names file, tensor and remedy, and nothing under the final name."""

import json
import pickle
import shutil
import subprocess
import sys

import pytest

from tests.bridges.tiny_models import save_tiny, tiny_config


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A sharded HF folder and its Megatron import."""
    from bridges.convert import export_megatron, import_hf

    root = tmp_path_factory.mktemp("good")
    save_tiny("qwen3_moe", root / "plain")
    import_hf(root / "plain", root / "megatron", workers=1)
    export_megatron(root / "megatron", root / "hf", max_shard_size=150_000)
    return root


INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00005.safetensors"


def truncate(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-100])


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def resave(folder, change):
    """Rewrites the second shard, index included, after ``change`` of its tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / SECOND)
    change(tensors)
    save_file(tensors, folder / SECOND)
    edit_index(folder, lambda weights: weights.update(dict.fromkeys(tensors, SECOND)))
    edit_index(
        folder, lambda weights: [weights.pop(n) for n, f in list(weights.items()) if f == SECOND and n not in tensors]
    )


def only_pickles(folder):
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def header(folder, text):
    (folder / SECOND).write_bytes(len(text).to_bytes(8, "little") + text)


def rename(tensors):
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name.replace("q_proj", "qq_proj")] = tensors.pop(name)


def misshape(tensors):
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name] = tensors[name][:-1].contiguous()


HF_FAULTS = {
    "no folder": (shutil.rmtree, "is not a folder; give the folder that holds config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json: No such file"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json must hold a JSON object"),
    "unknown family": (
        lambda f: edit_config(f, model_type="qwen4_moe"),
        "'qwen4_moe' is not supported; nearest: qwen",
    ),
    "bad config value": (
        lambda f: edit_config(f, hidden_size="many"),
        r"config\.json: hidden_size='many' must be a whole number",
    ),
    "unsupported option": (lambda f: edit_config(f, hidden_act="gelu"), "hidden_act='gelu' in config.json is not"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], r"holds no \*\.safetensors file"),
    "pickle": (only_pickles, r"as pickles \(pytorch_model\.bin\), which can run code"),
    "truncated": (lambda f: truncate(f, SECOND), rf"{SECOND} is damaged: tensor .* ends at byte \d+, the file has"),
    "empty file": (lambda f: (f / SECOND).write_bytes(b""), f"{SECOND} is damaged: it has 0 bytes"),
    "header not JSON": (lambda f: header(f, b"{xx}"), f"{SECOND} is damaged: its header is not JSON"),
    "header too long": (lambda f: (f / SECOND).write_bytes(b"\xff" * 64), f"{SECOND} is damaged: it has 64 bytes"),
    "unknown dtype": (
        lambda f: header(f, b'{"t":{"dtype":"F3","shape":[1],"data_offsets":[0,1]}}'),
        f"{SECOND} is damaged: tensor t has the entry",
    ),
    "wrong offsets": (
        lambda f: header(f, b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,9]}}'),
        r"tensor t of shape \[1\] occupies bytes 0 to 9",
    ),
    "missing shard": (lambda f: (f / SECOND).unlink(), rf"{INDEX} names {SECOND} \(for .*\), which is missing"),
    "index of absent file": (
        lambda f: edit_index(f, lambda w: w.update({"lm_head.weight": "other.safetensors"})),
        r"names other\.safetensors \(for lm_head\.weight\), which is missing",
    ),
    "index outside": (
        lambda f: edit_index(f, lambda w: w.update({"lm_head.weight": "../x.safetensors"})),
        r"names '\.\./x\.safetensors', which is outside the folder",
    ),
    "index absolute": (
        lambda f: edit_index(f, lambda w: w.update({"lm_head.weight": "/x.safetensors"})),
        "which is outside the folder",
    ),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
    "index names too much": (
        lambda f: edit_index(f, lambda w: w.update({"more.weight": SECOND})),
        rf"places more\.weight in {SECOND}, which does not hold it",
    ),
    "index names too little": (
        lambda f: edit_index(f, lambda w: w.pop("model.norm.weight")),
        r"holds model\.norm\.weight, which .* places in no file",
    ),
    "unknown tensor": (lambda f: resave(f, rename), r"unknown .*qq_proj\.weight \(nearest: .*\.q_proj\.weight\)"),
    "missing tensor": (lambda f: resave(f, rename), r"missing model\.layers\..*\.q_proj\.weight"),
    "misshapen tensor": (lambda f: resave(f, misshape), r"down_proj\.weight is \[47, 24\], expected \[48, 24\]"),
    "mixed dtypes": (
        lambda f: resave(f, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()})),
        "Megatron stores both in one tensor .*; choose one with python -m bridges import --dtype",
    ),
    "unknown quantisation": (
        lambda f: edit_config(f, quantization_config={"quant_method": "awq"}),
        "quant_method='awq' cannot be dequantised exactly",
    ),
}


@pytest.mark.parametrize("fault", HF_FAULTS)
def test_bad_hf_folder(fault, good, tmp_path):
    from bridges.convert import import_hf
    from bridges.errors import BridgeError

    break_it, message = HF_FAULTS[fault]
    folder = tmp_path / "hf"
    shutil.copytree(good / "hf", folder)
    break_it(folder)
    with pytest.raises(BridgeError, match=message) as error:
        import_hf(folder, tmp_path / "out")
    assert str(folder) in str(error.value) or "config.json" in str(error.value) or "model_type" in str(error.value)
    assert [path.name for path in tmp_path.iterdir() if path.name != "hf"] == []


class Evil:
    def __reduce__(self):
        return (exec, ("print('this must never run')",))


def swap_bytes(path):
    data = bytearray(path.read_bytes())
    data[:64] = bytes(64)
    path.write_bytes(data)


def retype(folder, **values):
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_metadata(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata.state_dict_metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def edit_storage(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        change(info)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


MEGATRON_FAULTS = {
    "no checkpoint": (
        lambda f: [p.unlink() for p in f.iterdir() if p.is_file()],
        r"holds neither metadata\.json nor \*\.distcp",
    ),
    "interrupted": (lambda f: (f / "metadata.json").unlink(), "has no metadata.json: .* whose save was interrupted"),
    "other version": (
        lambda f: retype(f, sharded_backend_version=2),
        "sharded_backend_version=2, only 1 can be read; load the checkpoint with the Megatron that wrote it",
    ),
    "other format": (lambda f: retype(f, sharded_backend="zarr"), "sharded_backend='zarr', only 'torch_dist'"),
    "metadata.json damaged": (lambda f: (f / "metadata.json").write_text("{"), r"metadata\.json is damaged"),
    "no metadata": (lambda f: (f / ".metadata").unlink(), r"\.metadata: No such file"),
    "metadata damaged": (lambda f: truncate(f, ".metadata"), r"\.metadata is damaged or not a checkpoint's"),
    "metadata runs code": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps(Evil())),
        r"not a checkpoint's: it asks for builtins\.exec",
    ),
    "metadata of something else": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps({})),
        "does not hold the metadata of a torch_dist checkpoint",
    ),
    "file missing": (lambda f: (f / "__0_0.distcp").unlink(), r"__0_0\.distcp \(for .*\) is missing"),
    "file outside": (
        lambda f: edit_storage(f, lambda info: setattr(info, "relative_path", "../x.distcp")),
        r"names '\.\./x\.distcp', which is outside the folder",
    ),
    "file truncated": (lambda f: truncate(f, "__0_0.distcp"), r"__0_0\.distcp is truncated: .* ends at byte"),
    "data damaged": (lambda f: swap_bytes(f / "__0_0.distcp"), r"__0_0\.distcp is damaged at byte 0"),
    "tensor missing": (
        lambda f: edit_metadata(f, lambda m: m.pop("decoder.layers.mlp.router.weight")),
        r"missing decoder\.layers\.mlp\.router\.weight",
    ),
    "tensor unknown": (
        lambda f: edit_metadata(f, lambda m: m.update(more=m["decoder.final_layernorm.weight"], common=None)),
        r"does not say where more at",
    ),
    "no config": (
        lambda f: (f / "huggingface" / "config.json").unlink(),
        "holds no config.json; convert it with .* --hf-template FOLDER",
    ),
    "other config": (lambda f: edit_config(f / "huggingface", hidden_size=96), r"is \[3, 48\], expected \[3, 96\]"),
    "other family": (lambda f: edit_config(f / "huggingface", model_type="qwen3"), r"unknown decoder\..*experts"),
}


@pytest.mark.parametrize("fault", MEGATRON_FAULTS)
def test_bad_megatron_folder(fault, good, tmp_path, capsys):
    from bridges.convert import export_megatron
    from bridges.errors import BridgeError

    break_it, message = MEGATRON_FAULTS[fault]
    folder = tmp_path / "megatron"
    shutil.copytree(good / "megatron", folder)
    break_it(folder)
    with pytest.raises(BridgeError, match=message) as error:
        export_megatron(folder, tmp_path / "out")
    assert str(folder) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
    assert "never run" not in capsys.readouterr().out


MISTYPED = {
    "quantization_config": ["fp8", 8, ["fp8"]],
    "num_local_experts": ["", "8", -2, 1.5],
    "num_experts": [True, [4]],
    "num_nextn_predict_layers": [[1], "1"],
    "decoder_sparse_step": [0, "1"],
    "num_attention_heads": [0, {}],
    "head_dim": ["64", 0],
    "rms_norm_eps": ["1e-6", [1]],
    "layer_types": ["full_attention", [{}]],
    "mlp_only_layers": [1],
    "rope_scaling": ["yarn"],
}


@pytest.mark.parametrize("key", MISTYPED)
def test_fields_of_another_type(key, tmp_path, good):
    """Of the file, whoever reads it, and of a configuration that was changed: the key and its value are named."""
    from bridges.errors import BridgeError
    from bridges.files import read_hf_config
    from bridges.plan import Plan

    right = json.loads((good / "plain" / "config.json").read_text())
    for value in MISTYPED[key]:
        (tmp_path / "config.json").write_text(json.dumps(right | {key: value}))
        for read in (lambda: read_hf_config(tmp_path), lambda: Plan.of(right | {key: value})):  # noqa: B023
            with pytest.raises(BridgeError, match=rf"config\.json.*: {key}=.* must be "):
                read()


HOSTILE_QUANTISATION = [
    {"quant_method": "fp8", "weight_block_size": 8},
    {"quant_method": "fp8", "weight_block_size": ["a", "b"]},
    {"quant_method": "fp8", "ignored_layers": [1]},
    {"quant_method": "compressed-tensors"},
    {"quant_method": "compressed-tensors", "config_groups": []},
    {"quant_method": "compressed-tensors", "config_groups": {"a": "b"}},
    {"quant_method": "mxfp8", "ignore": ["re:(a+)+$"]},
    {"quant_method": "mxfp8", "ignore": ["re:["]},
    {"quant_method": "mxfp8", "ignore": ["re:" + ".*" * 20 + "x"]},
    {"quant_method": ["fp8"]},
]


@pytest.mark.parametrize("found", HOSTILE_QUANTISATION, ids=str)
def test_quantisation_that_is_none(found):
    from bridges.errors import BridgeError
    from bridges.quantisation import Quantisation

    with pytest.raises(BridgeError, match="cannot be dequantised exactly"):
        Quantisation.of({"quantization_config": found}, "config.json")


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("olmoe", dict(clip_qkv=8.0), "olmoe: clip_qkv=8.0 in config.json is not supported"),
        ("deepseek_v3", dict(attention_bias=True), "attention_bias=True"),
        ("deepseek_v3", dict(norm_topk_prob=False), "norm_topk_prob=False"),
        ("deepseek_v3", dict(num_experts_per_tok=3), "topk_group=2 .* HF by their best 2"),
        ("deepseek_v3", dict(scoring_func="softmax"), "scoring_func='softmax'"),
        ("gpt_oss", dict(swiglu_alpha=1.0), "swiglu_alpha=1.0"),
        ("llama", dict(attention_bias=True), "mlp_bias=False"),
        ("qwen3", dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "rope_type='dynamic'"),
        ("qwen3", dict(num_key_value_heads=4), "num_key_value_heads=4 .* does not divide 6"),
    ],
)
def test_options_that_megatron_cannot_express_are_refused(model_type, values, message):
    from bridges.errors import BridgeError
    from bridges.families import get_family

    with pytest.raises(BridgeError, match=message):
        family = get_family(model_type)
        config = tiny_config(model_type) | values
        family.shape(config)
        family.megatron_config(config)


def test_output_that_exists_is_left_alone(good, tmp_path):
    from bridges.convert import import_hf
    from bridges.errors import BridgeError

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(BridgeError, match="out exists; remove it, or name another folder"):
        import_hf(good / "hf", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_disk_too_small_is_said_before_anything_is_written(good, tmp_path):
    from bridges.errors import BridgeError
    from bridges.staging import staged

    with (
        pytest.raises(BridgeError, match=r"needs 1000000000\.00 GB, .* GB free; make room") as error,
        staged(tmp_path / "out", 10**18),
    ):
        pass
    assert error.value.exit_code == 3 and not any(tmp_path.iterdir())


@pytest.mark.process
def test_write_failure_leaves_nothing(good, tmp_path):
    """A limit on file sizes makes the operating system refuse a write in the middle, as a full disk does."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from bridges.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "import", "--hf", str(good / "hf"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert "cannot be written (File too large); make room" in done.stderr and "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())
