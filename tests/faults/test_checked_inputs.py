"""``--check`` of settings, models and data that are wrong in any way: a report, or one list of problems. Nothing else
is raised, and nothing hangs."""

import json

import pytest
from hypothesis import strategies as st

from tests.faults import fuzz
from tests.faults.bounded import Reader
from tests.faults.fuzz import times

pytestmark = [pytest.mark.slow, pytest.mark.process]


def check(argv):
    """Run ``--check`` in this process. Raises its problems as one error."""
    import contextlib
    import io
    import os

    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    from skyrl_megatron.entrypoints.check import run
    from skyrl_megatron.errors import SkyRLMegatronError

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(argv)
    said = err.getvalue()
    assert "Traceback" not in said, said
    if code:
        assert code in (1, 2) and not out.getvalue(), f"exit code {code}, {out.getvalue()[:500]}"
        raise SkyRLMegatronError("\n".join(line for line in said.splitlines() if not line.startswith("warning: ")))
    assert out.getvalue().startswith("it can run on")


@pytest.fixture(scope="module")
def reader():
    with Reader() as made:
        yield made


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Key → value of a small run that is right."""
    from skyrl_megatron.data import prepare
    from skyrl_megatron.tiny_model import write_embedded_model
    from tests.config.settings import base

    folder = tmp_path_factory.mktemp("run")
    write_embedded_model(folder / "model")
    sums = [(a, b) for a in range(4) for b in range(4)]
    prepare.write(prepare.addition_rows("train", sums), folder / "train.parquet")
    prepare.write(prepare.addition_rows("more", [(20, 21)]), folder / "more.parquet")
    (folder / "databases" / "spider" / "database").mkdir(parents=True)
    return base.base(folder)


def arguments(settings):
    return ["--check=1x8", *(f"{key}={value}" for key, value in settings.items())]


TEXTS = [
    "", "x", "null", "true", "0", "-1", "1", "2", "3", "64", "0.5", "-0.5", "1e400", "nan", "inf", "-inf", "9" * 30,
    "9" * 5000, "1e18", str(2**31), str(2**63), "[]", "{}", "[1, 2]", "[x, 1]", "{a: 1}", "{1: [2]}", "[[", "a: b: c",
    "${oc.env:HOME}", "!!python/name:os.system", "é", "'", "2024-01-01", "*a", "/", "/dev/zero", "a/b", "~", " ", "\n",
]  # fmt: skip
"""What values of settings are written as."""


def overrides():
    """A key of the schema, and a text that is right for it or for another."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.fields import default_of, leaves
    from tests.config.settings.table import REFUSED, ROWS

    known = {key: row.value for key, row in ROWS.items()} | REFUSED

    def texts(leaf):
        key, cls, name = leaf
        own = st.sampled_from([str(default_of(cls, name)), str(known.get(key))])
        return st.tuples(st.just(key), st.one_of(st.sampled_from(TEXTS), own))

    return st.sampled_from(list(leaves(SkyRLTrainConfig))).flatmap(texts)


@times(20, 300, same=True)
def test_settings(given, reader, data):
    changed = dict(data.draw(st.lists(overrides(), min_size=1, max_size=2)))
    if error := reader(check, arguments(given | changed), arguments(given)):
        assert "problem" in error and any(key.rpartition(".")[2] in error for key in [*changed, *given]), error


@pytest.fixture(scope="module")
def configs():
    """``config.json`` of families with different keys, of sizes that vLLM's kernels for CPU take."""
    from tests.bridges.tiny_models import tiny_config

    sizes = {family: dict(hidden_size=96, head_dim=32) for family in ("qwen3_moe", "gpt_oss", "qwen3_next", "llama")}
    sizes["deepseek_v3"] = dict(hidden_size=96, kv_lora_rank=512, qk_rope_head_dim=64)
    return [tiny_config(family, **own) for family, own in sizes.items()]


@times(20, 100, same=True)
def test_the_config_of_a_model(given, configs, reader, tmp_path, data):
    """Without weights, which need not be there yet; on GPUs and on CPU."""
    import shutil

    from tests.support.tiny_models import write_tokenizer

    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_tokenizer(folder)
    right = data.draw(st.sampled_from(configs))
    changed = fuzz.changed(right).map(fuzz.as_json)
    (folder / "config.json").write_bytes(data.draw(st.one_of(changed, changed, changed, fuzz.bodies(right))))
    asked = arguments(given | {"trainer.policy.model.path": folder})
    asked[0] = f"--check=1x{data.draw(st.sampled_from([0, 8]))}"
    if error := reader(check, asked, arguments(given)):
        assert "problem" in error and str(folder) in error, error


def test_a_config_that_leaves_out_a_size(given, configs, reader, tmp_path):
    """Its family has a default, and the kernels for CPU are compared with that."""
    from tests.support.tiny_models import write_tokenizer

    write_tokenizer(tmp_path)
    config = configs[0] | {"head_dim": 16}
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = arguments(given | {"trainer.policy.model.path": tmp_path})
    error = reader(check, ["--check=1x0", *asked[1:]], arguments(given))
    assert error is not None and f"{tmp_path}: head_dim=16: on CPU" in error and "hidden_size" not in error


@times(20, 100, same=True)
def test_a_data_file(given, reader, tmp_path, data):
    """JSON lines and parquet, with changed values and with changed bytes."""
    import pyarrow.parquet as pq

    (right,) = given["data.train_data"]
    kind = data.draw(st.sampled_from(["jsonl", "parquet"]))
    path = tmp_path / f"changed.{kind}"
    if kind == "parquet":
        with open(right, "rb") as file:
            path.write_bytes(data.draw(fuzz.flipped(file.read())))
    else:
        rows = data.draw(fuzz.changed(pq.read_table(right).to_pylist()[:4]))
        lines = b"\n".join(map(fuzz.as_json, rows if isinstance(rows, list) else [rows]))
        path.write_bytes(data.draw(st.one_of(st.just(lines), fuzz.flipped(lines))))
    if error := reader(check, arguments(given | {"data.train_data": [str(path)]}), arguments(given)):
        assert "problem" in error and path.name in error, error
