"""Changed files whose readers are libraries in other languages, or take what the files declare: each is read or ends
in the project's error, in a process with bounds (:mod:`tests.faults.bounded`)."""

import json
import shutil

import pytest
from hypothesis import strategies as st

from tests.faults import fuzz
from tests.faults.bounded import Reader
from tests.faults.fuzz import mutated

pytestmark = [pytest.mark.slow, pytest.mark.process]

ASKED = [{"role": "user", "content": "What is 1 + 1? é"}]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATE = "chat_template.jinja"


@pytest.fixture(scope="module")
def reader():
    with Reader() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's folder with its weights in two files, and with the files of older tokenizers too."""
    import safetensors.torch

    from tests.support.tiny_models import write_tiny_model

    folder = write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"))
    (single,) = folder.glob("*.safetensors")
    weights = sorted(safetensors.torch.load_file(single).items())
    single.unlink()
    parts = {"model-1.safetensors": weights[:3], "model-2.safetensors": weights[3:6]}
    for name, part in parts.items():
        safetensors.torch.save_file(dict(part), folder / name)
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {key: name for name, part in parts.items() for key, _ in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    special = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 2}))
    return folder


def copy_of(model, folder):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    return folder


def body_of(data, path):
    """A JSON file with one of its parts changed: vocabularies, with most of a file's values, are one part of many."""
    right = json.loads(path.read_bytes())
    if path.name == "tokenizer.json" and data.draw(st.booleans()):
        holder = data.draw(st.sampled_from([right, right["model"]]))
        key = data.draw(st.sampled_from(sorted(holder)))
        holder[key] = data.draw(fuzz.changed(holder[key]))
        return fuzz.as_json(right)
    return data.draw(fuzz.bodies(right))


# ------------------------------------------------------------------ tokenizers
def use_tokenizer(folder):
    """Load a tokenizer and use it as a run does: a prompt, its measure, its text."""
    import warnings
    from pathlib import Path

    from skyrl_megatron.data.tokenizer import load_tokenizer
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_observe.preflight.data_checks import _tokens

    warnings.simplefilter("ignore")
    _tokens(Path(folder))
    tokenizer = load_tokenizer(folder)
    ids = ChatFormat(tokenizer).prompt(ASKED)
    measured = tokenizer([ASKED[0]["content"]], add_special_tokens=False)["input_ids"]
    tokenizer.decode(ids), tokenizer.batch_decode(measured), tokenizer.pad_token_id


@mutated
def test_the_files_of_a_tokenizer(model, reader, tmp_path, data):
    """What names the tokenizer, the special tokens or the vocabulary is changed."""
    folder = copy_of(model, tmp_path / "copy")
    path = folder / data.draw(st.sampled_from(TOKENIZER_FILES))
    path.write_bytes(body_of(data, path))
    if error := reader(use_tokenizer, str(folder), str(model)):
        assert str(folder) in error


PIECES = ["{{", "}}", "{%", "%}", "{% for x in range(10 ** 9) %}", "{% endfor %}", "{{ messages }}", "{{ self }}",
          "{{ 'a' * 10 ** 9 }}", "{{ [0] * 10 ** 9 }}", "{{ raise_exception('no') }}", "{{ x.y.z }}", "{% if x %}",
          "{% include 'x' %}", "{{ ''.__class__.__mro__ }}", "{% set messages = 1 %}", "{{ messages | tojson }}",
          "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ 9 ** 9 ** 9 }}", "{% generation %}"]  # fmt: skip


@mutated
def test_a_chat_template(model, reader, tmp_path, data):
    """A template is a program: of pieces in any order, and changed in its bytes."""
    folder = copy_of(model, tmp_path / "copy")
    right = (folder / TEMPLATE).read_bytes()
    at = data.draw(st.integers(0, len(right)))
    piece = data.draw(st.lists(st.sampled_from(PIECES), max_size=3).map("".join)).encode()
    whole = right[:at] + piece + right[at:]
    (folder / TEMPLATE).write_bytes(data.draw(st.one_of(st.just(whole), fuzz.flipped(right), fuzz.flipped(whole))))
    reader(use_tokenizer, str(folder), str(model))


# ------------------------------------------------------------------ model folders
def open_weights(folder):
    from bridges.hf_io import HfFolder

    opened = HfFolder(folder)
    for name in opened.tensors:
        opened.read(name).sum()


@mutated
def test_an_index_of_weights(model, reader, tmp_path, data):
    """The file that says which tensor is in which file."""
    folder = copy_of(model, tmp_path / "copy")
    path = folder / "model.safetensors.index.json"
    right = json.loads(path.read_bytes())
    names = st.sampled_from(
        ["", ".", "..", "config.json", "model-3.safetensors", "/etc/passwd", "x" * 5000, "\x00", "\ud800"]
    )
    other = names.map(lambda name: fuzz.as_json({"weight_map": right["weight_map"] | {"x": name}}))
    path.write_bytes(data.draw(st.one_of(fuzz.bodies(right), other)))
    if error := reader(open_weights, str(folder), str(model)):
        assert str(folder) in error


@mutated
def test_a_header_of_weights(model, reader, tmp_path, data):
    """Every tensor that a changed header names is read, or the file is refused."""
    folder = copy_of(model, tmp_path / "copy")
    path = folder / "model-1.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])

    def with_header(changed):
        text = fuzz.as_json(changed)
        return len(text).to_bytes(8, "little") + text + content[end:]

    flipped = fuzz.flipped(content[:end]).map(lambda head: head + content[end:])
    path.write_bytes(data.draw(st.one_of(fuzz.changed(header).map(with_header), flipped)))
    if error := reader(open_weights, str(folder), str(model)):
        assert str(folder) in error


def read_model(folder):
    """Read ``config.json`` as a run and its engines do."""
    from pathlib import Path

    from skyrl_megatron.inference.vllm.settings import cpu_kv_cache_bytes, cpu_weight_bytes
    from skyrl_megatron.runtime.model.description import read_hf_model

    read_hf_model(folder)
    cpu_kv_cache_bytes(Path(folder), "auto", 128, 2), cpu_weight_bytes(Path(folder), "auto")


@mutated
def test_a_config(model, reader, tmp_path, data):
    folder = copy_of(model, tmp_path / "copy")
    (folder / "config.json").write_bytes(data.draw(fuzz.bodies(json.loads((model / "config.json").read_bytes()))))
    if error := reader(read_model, str(folder), str(model)):
        assert "config.json" in error


# ------------------------------------------------------------------ data
ROWS = [
    {"prompt": [{"role": "user", "content": "1+1"}], "env_class": "gsm8k", "reward_spec": {"ground_truth": "2"}}
] * 3


def open_data(asked):
    """Open a data set as a run does, and read every row."""
    import os
    import shutil

    cache, path, model = asked
    os.environ["HF_DATASETS_CACHE"] = cache  # before the library is imported
    from datasets import disable_progress_bars
    from transformers import AutoTokenizer

    from skyrl_megatron.data.prompts import PromptDataset

    disable_progress_bars()
    tokenizer = _tokenizers.setdefault(model, None) or AutoTokenizer.from_pretrained(model)
    _tokenizers[model] = tokenizer
    try:
        prompts = PromptDataset(path, tokenizer, 64)
        assert len([prompts[number] for number in range(len(prompts))]) == len(prompts)
        assert prompts.fingerprint and prompts.env_classes("gsm8k")
    finally:
        shutil.rmtree(cache, ignore_errors=True)


_tokenizers = {}


@pytest.fixture(scope="module")
def data_files(tmp_path_factory, model):
    """(cache, folder with train.jsonl and two parquet files, model)"""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("data")
    (folder / "train.jsonl").write_bytes(b"\n".join(map(fuzz.as_json, ROWS)))
    (folder / "array.json").write_bytes(fuzz.as_json(ROWS))
    numbered = [row | {"number": number, "score": [0.5, None]} for number, row in enumerate(ROWS)]
    pq.write_table(pa.Table.from_pylist(numbered), folder / "snappy.parquet")
    plain = dict(compression="none", use_dictionary=False, data_page_version="2.0", write_statistics=False)
    pq.write_table(pa.Table.from_pylist(numbered), folder / "plain.parquet", **plain)
    pq.write_table(pa.Table.from_pylist(numbered), folder / "zstd.parquet", compression="zstd")
    return str(folder / "cache"), folder, str(model)


@mutated
def test_a_data_set_of_json(data_files, reader, tmp_path, data):
    """A row a line, or one array."""
    cache, folder, model = data_files
    right = (cache, str(folder / "train.jsonl"), model)
    rows = data.draw(fuzz.changed(ROWS))
    lines = b"\n".join(map(fuzz.as_json, rows if isinstance(rows, list) else [rows]))
    whole = data.draw(st.sampled_from([lines, fuzz.as_json(rows)]))
    path = tmp_path / "changed.jsonl"
    path.write_bytes(data.draw(st.one_of(st.just(whole), fuzz.flipped(whole), st.just(fuzz.DEEP))))
    if error := reader(open_data, (cache, str(path), model), right):
        assert path.name in error


@mutated
def test_a_data_set_of_parquet(data_files, reader, tmp_path, data):
    """Pages, their headers and the footer, whose reader is in C++."""
    cache, folder, model = data_files
    right = (cache, str(folder / "snappy.parquet"), model)
    content = (folder / data.draw(st.sampled_from(["snappy", "plain", "zstd"]))).with_suffix(".parquet").read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    of_footer = fuzz.flipped(content[footer:-8]).map(
        lambda changed: content[:footer] + changed + len(changed).to_bytes(4, "little") + b"PAR1"
    )
    of_pages = fuzz.flipped(content[:footer]).map(lambda pages: (pages + bytes(footer))[:footer] + content[footer:])
    path = tmp_path / "changed.parquet"
    path.write_bytes(data.draw(st.one_of(of_footer, of_pages, fuzz.flipped(content))))
    if error := reader(open_data, (cache, str(path), model), right):
        assert path.name in error


# ------------------------------------------------------------------ what was found once
FOUND = {
    "a length that is a list": (use_tokenizer, "tokenizer_config.json", "model_max_length", []),
    "a merge shorter than the prefix": (
        use_tokenizer,
        "tokenizer.json",
        "model",
        {"type": "BPE", "vocab": {"": 0, "i": 1}, "merges": [["i", ""]], "continuing_subword_prefix": "#"},
    ),
    "a name that is too long": (open_weights, "model.safetensors.index.json", "weight_map", {"x": "x" * 5000}),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_file_that_ended_in_another_error(model, reader, tmp_path, name):
    read, file, key, value = FOUND[name]
    folder = copy_of(model, tmp_path / "copy")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_bytes()) | {key: value}))
    error = reader(read, str(folder), str(model))
    assert error is not None and str(folder) in error and len(error) < 1000


def test_a_config_that_leaves_out_a_size(model, reader, tmp_path):
    """Its family has a default."""
    folder = copy_of(model, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_bytes())
    del config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    assert reader(read_model, str(folder), str(model)) is None


# ------------------------------------------------------------------ the bounds themselves
def test_what_is_out_of_bounds_is_seen(reader):
    """A reader that takes memory, ends its process, or raises what it should not."""
    for wrong, says in ((takes_memory, "MiB of memory"), (ends, "process ended with -6"), (raises, "KeyError")):
        with pytest.raises(AssertionError, match=says):
            reader(wrong, True, False)


def takes_memory(wrong):
    return len(b"x" * ((1 << 30) * wrong))


def ends(wrong):
    import os

    return os.abort() if wrong else None


def raises(wrong):
    return {False: 1}[wrong]
