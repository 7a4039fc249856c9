"""Hub names: how they are spelled, what a run asks the hub for and keeps, and what it says when the hub says no."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from skyrl_megatron import hub as names
from skyrl_megatron.config import SkyRLTrainConfig, hf_model
from skyrl_megatron.errors import ConfigError, DataError, HubError
from skyrl_megatron.hub import Repo, download
from tests.bridges.tiny_models import SIZES
from tests.bridges.tiny_models import TINY as TINY_MODELS
from tests.job import runs
from tests.support import hub_endpoint
from tests.support.processes import left_behind

TINY = Repo("model", "acme/tiny")
CONFIG = json.dumps(
    {"model_type": "qwen3_moe", **SIZES, **TINY_MODELS["qwen3_moe"], "max_position_embeddings": 4096}
).encode()
INDEX = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}).encode()
FILES = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
    "model-1-of-2.safetensors": b"one" * 100,
    "model-2-of-2.safetensors": b"two" * 100,
}
NOT_NEEDED = {
    "pytorch_model.bin": b"pickled",
    "training.pth": b"pickled",
    "consolidated.safetensors": b"the same again",
    "onnx/model.onnx": b"another format",
    "onnx/config.json": b"{}",
    "README.md": b"# tiny",
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of ours with ``acme/tiny``, and an empty cache."""
    with hub_endpoint.serve() as server:
        hub_endpoint.use(monkeypatch, tmp_path / "hf", HF_ENDPOINT=server.url)
        server.first = server.repository(TINY.name).push(FILES | NOT_NEEDED)
        yield server


def by_hand(home, files, commit="0123456789abcdef0123456789abcdef01234567"):
    """A cache as huggingface_hub leaves it: blobs, a snapshot of links to them, a ref."""
    folder = home / "hub" / "models--acme--tiny"
    for path, content in files.items():
        blob, link = folder / "blobs" / f"blob-of-{path}", folder / "snapshots" / commit / path
        for each in (blob, link):
            each.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    return folder / "snapshots" / commit


def config(*args, model=TINY.name):
    from skyrl_megatron.config.derive import derive

    cfg = SkyRLTrainConfig.from_cli_overrides([f"trainer.policy.model.path={model}", *args])
    derive(cfg)
    return cfg


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B-Instruct", "gpt2", "a_b/c.d-e", "models/moe"])
def test_names_of_the_hub(name):
    assert names.is_hub_name(name)


@pytest.mark.parametrize(
    "name", ["./x", "../x", "/x/y", "~/x", "a/b/c", "s3://a/b", "a//b", "a--b/c", "a..b", "", "a b"]
)
def test_what_is_no_name_of_the_hub(name):
    assert not names.is_hub_name(name)


def test_a_folder_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names.is_hub_name("models/moe")
    Path("models/moe").mkdir(parents=True)
    assert not names.is_hub_name("models/moe")
    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.policy.model.path=models/moe"])
    assert hf_model.model_folder(cfg) == tmp_path / "models/moe" and hf_model.hub_models(cfg, ["policy"]) is not None
    assert not [*hf_model.hub_models(cfg, ["policy"])]


@pytest.mark.parametrize(
    ("entry", "repo", "subset", "split"),
    [
        ("acme/sums", Repo("dataset", "acme/sums"), None, "train"),
        ("acme/sums:test", Repo("dataset", "acme/sums"), None, "test"),
        ("acme/sums:hard:test[:10%]", Repo("dataset", "acme/sums"), "hard", "test[:10%]"),
        ("acme/sums@v2:train[5:10]", Repo("dataset", "acme/sums", "v2"), None, "train[5:10]"),
        ("acme/sums@refs/pr/1", Repo("dataset", "acme/sums", "refs/pr/1"), None, "train"),
    ],
)
def test_data_sets(entry, repo, subset, split):
    assert names.data_source(entry) == names.DataSource(repo, subset, split)


@pytest.mark.parametrize("entry", ["/d/a.parquet", "a.jsonl", "s3://b/c", "./x", "acme/sums:a:b:c"])
def test_what_is_no_data_set_of_the_hub(entry):
    assert names.data_source(entry) is None


def test_the_reference_has_the_policys_revision_where_it_is_the_same_model():
    assert config("trainer.policy.model.revision=v2").trainer.ref.model.revision == "v2"
    other = config("trainer.policy.model.revision=v2", "trainer.ref.model.path=acme/other")
    assert other.trainer.ref.model.revision is None


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_name_becomes_a_commit_and_only_needed_files_are_fetched_once(hub):
    commit = names.resolve(TINY)
    assert commit == hub.first and not any(
        "safetensors" in path for _, path, _ in hub.requests if "resolve" in path and "index" not in path
    )
    folder = names.fetch(TINY, commit, names.WHOLE)
    assert hub_endpoint.folder_files(folder) == FILES
    assert (folder / "config.json").is_symlink() and "blobs" in str((folder / "config.json").resolve())
    asked = len(hub.requests)
    assert names.fetch(TINY, commit, names.WHOLE) == folder and len(hub.requests) == asked


def test_a_cache_made_elsewhere_serves_a_node_without_network(tmp_path, monkeypatch):
    hub_endpoint.use(monkeypatch, tmp_path, HF_HUB_OFFLINE="1")
    folder = by_hand(tmp_path, FILES)
    cfg = config()
    assert hf_model.model_folder(cfg) == folder
    assert names.pin(cfg.trainer.hub_commits, hf_model.hub_models(cfg, ["policy", "ref"]), {}) == []
    assert cfg.trainer.hub_commits == {"acme/tiny@main": folder.name}
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set.*HF_HOME=\S+ hf download acme/tiny"):
        hf_model.model_folder(cfg)
    assert hf_model.model_folder(cfg, weights=False) == folder


@pytest.mark.process
def test_a_download_that_breaks_off_goes_on_where_it_was(hub):
    content = os.urandom(25 << 20)
    commit = hub.repository(TINY.name).push({"config.json": CONFIG, "model.safetensors": content})
    hub.breaks["model.safetensors"] = 22 << 20  # beyond the library's second chunk of 10 MB
    folder = names.fetch(TINY, commit, names.WHOLE)
    assert (folder / "model.safetensors").read_bytes() == content
    assert hub.downloads("model.safetensors") == [None, f"bytes={20 << 20}-"]


FETCH = """
import sys
from skyrl_megatron import hub
from skyrl_megatron.hub import download
download.SAY_EVERY_S = 0.2
repo = hub.Repo("model", "acme/tiny")
print(hub.fetch(repo, sys.argv[1], hub.WHOLE, say=lambda line: print(line, flush=True)))
"""


def fetching(hub, commit):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", FETCH, commit], stdout=subprocess.PIPE, text=True, env=environment)


def until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.process
def test_a_downloader_that_is_killed_leaves_whole_files_and_no_process(hub):
    import psutil

    hub.stalls.add("model-2-of-2.safetensors")
    other = fetching(hub, hub.first)
    blobs = Path(os.environ["HF_HOME"]) / "hub/models--acme--tiny/snapshots" / hub.first
    until(lambda: (blobs / "model-1-of-2.safetensors").exists() and hub.downloads("model-2-of-2.safetensors"))
    started = psutil.Process(other.pid).children()
    other.kill()
    other.wait()
    assert started and not left_behind(started)
    hub.stalls.clear()
    assert hub_endpoint.folder_files(names.fetch(TINY, hub.first, names.WHOLE)) == FILES
    assert len(hub.downloads("model-1-of-2.safetensors")) == 1


@pytest.mark.process
def test_of_two_processes_one_downloads_and_the_other_waits(hub, monkeypatch):
    monkeypatch.setattr(download, "SAY_EVERY_S", 0.2)
    hub.stalls.add("model-2-of-2.safetensors")
    other, said, found = fetching(hub, hub.first), [], []
    until(lambda: hub.downloads("model-2-of-2.safetensors"))
    waiter = threading.Thread(
        target=lambda: found.append(names.fetch(TINY, hub.first, names.WHOLE, say=said.append)), daemon=True
    )
    waiter.start()
    until(lambda: any("another process downloads it" in line for line in said))
    assert re.match(r"download of acme/tiny: 0\.\d\d of \d+\.\d\d MB, ", said[-1]), said[-1]
    hub.stalls.clear()
    waiter.join(300)
    out, _ = other.communicate(timeout=300)
    assert [str(folder) for folder in found] == out.splitlines()[-1:]
    for path in FILES:
        assert len(hub.downloads(path)) == 1, path


@pytest.mark.process
def test_nobody_waits_for_ever(hub):
    hub.stalls.add("model-2-of-2.safetensors")
    other = fetching(hub, hub.first)
    until(lambda: hub.downloads("model-2-of-2.safetensors"))
    with pytest.raises(HubError, match=r"another process downloads acme/tiny .* no data for 2 s.*\.lock"):
        names.fetch(TINY, hub.first, names.WHOLE, stall_s=2)
    other.kill()
    other.communicate()
    with pytest.raises(
        HubError, match=r"the download from http://127.*has stalled: run the same command to continue it"
    ):
        names.fetch(TINY, hub.first, names.WHOLE, stall_s=2)
    hub.delay_s = 60
    with pytest.raises(HubError, match="has stalled"):
        names.resolve(Repo("model", "acme/slow"), stall_s=1)


@pytest.mark.process
def test_models_that_are_no_such_thing(hub):
    pickled = hub.repository("acme/pickled").push({"config.json": CONFIG, "pytorch_model.bin": b""})
    with pytest.raises(HubError, match="has no safetensors files"):
        names.fetch(Repo("model", "acme/pickled"), pickled, names.WHOLE)
    hub.repository("acme/adapter").push({"adapter_config.json": b"{}"})
    cfg = config(model="acme/adapter")
    (problem,) = names.pin(cfg.trainer.hub_commits, hf_model.hub_models(cfg, ["policy"]), {})
    assert "has no config.json" in str(problem)


# --- what a run keeps -----------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_checkpoints_commits_count_where_branches_moved(hub):
    moved = hub.repository(TINY.name).push(FILES | {"config.json": b"{}"})
    cfg = config()
    asked = hf_model.hub_models(cfg, ["policy", "ref"])
    assert names.pin(cfg.trainer.hub_commits, asked, {"acme/tiny@main": hub.first}) == []
    assert cfg.trainer.hub_commits == {"acme/tiny@main": hub.first}
    assert (hf_model.model_folder(cfg) / "config.json").read_bytes() == CONFIG
    other = config("trainer.policy.model.revision=main")
    names.pin(other.trainer.hub_commits, hf_model.hub_models(other, ["policy"]), {"acme/tiny@v1": hub.first})
    assert other.trainer.hub_commits == {"acme/tiny@main": moved}


def test_an_export_names_its_origin(tmp_path):
    import yaml

    from bridges.peft import adapter_config

    repo = names.origin(by_hand(tmp_path, FILES))
    assert repo == Repo("model", "acme/tiny", "0123456789abcdef0123456789abcdef01234567")
    assert names.origin(tmp_path) is None and names.origin(Path("/")) is None
    settings = dict(rank=1, scale=1.0, modules=["q_proj"])
    written = json.loads(adapter_config(**settings, base=repo.name, revision=repo.revision))
    assert (written["base_model_name_or_path"], written["revision"]) == (repo.name, repo.revision)

    cfg = config("trainer.policy.model.revision=v2")
    assert names.model_card(cfg.trainer.hub_commits, cfg.trainer.policy.model.path) is None
    cfg.trainer.hub_commits = {"acme/tiny@v2": "a" * 40, "datasets/acme/sums@main": "b" * 40}
    card = names.model_card(cfg.trainer.hub_commits, cfg.trainer.policy.model.path)
    assert yaml.safe_load(card.split("---")[1]) == {"base_model": "acme/tiny", "datasets": ["acme/sums"]}
    assert f"- acme/tiny (v2): `{'a' * 40}`" in card


# --- data sets ------------------------------------------------------------------------------------------------------

CARD = b"""---
configs:
- config_name: easy
  default: true
  data_files: {split: train, path: easy/train.jsonl}
- config_name: hard
  data_files:
  - {split: train, path: hard/train-*.jsonl}
  - {split: test, path: hard/test.jsonl}
- config_name: huge
  data_files: huge/*.jsonl
---
"""


def rows(count, text):
    line = {"prompt": [{"role": "user", "content": text}]}
    return b"".join(json.dumps(line | {"number": i}).encode() + b"\n" for i in range(count))


@pytest.mark.process
def test_data_by_subset_split_and_slice(hub, tmp_path, monkeypatch):
    import datasets

    from skyrl_megatron.data.row_files import load_source

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    card = CARD.replace(b"{split: train, path: easy/train.jsonl}", b"easy/train.jsonl")
    files = {
        "easy/train.jsonl": rows(3, "easy"),
        "hard/train-0.jsonl": rows(4, "hard"),
        "hard/test.jsonl": rows(5, "hard"),
    }
    files |= {"README.md": card, "huge/all.jsonl": rows(6, "huge")}
    commit = hub.repository("datasets/acme/sums").push(files)
    commits = {"datasets/acme/sums@main": commit}
    assert len(load_source("acme/sums", hub_commits=commits)) == 3
    assert not hub.downloads("huge/all.jsonl") and not hub.downloads("hard/test.jsonl")
    assert len(load_source("acme/sums:hard:test[:2]", hub_commits=commits)) == 2
    assert load_source("acme/sums:hard:train", hub_commits=commits)[3]["number"] == 3
    assert not hub.downloads("huge/all.jsonl")
    with pytest.raises(DataError, match=r"acme/sums:medium:train cannot be read.*hard"):
        load_source("acme/sums:medium:train", hub_commits=commits)
    with pytest.raises(DataError, match=r"acme/sums:validation cannot be read.*train"):
        load_source("acme/sums:validation", hub_commits=commits)


# --- --check --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its tokenizer, and prompts."""
    return runs.prepare(tmp_path_factory.mktemp("run"))


@pytest.fixture
def check(folder, tmp_path, capsys):
    """Exit code, report and messages of ``--check`` with a model named so."""
    from skyrl_megatron.entrypoints import check

    def run(model, *args):
        settings = ["trainer.logger=console", "data.val_data=[]", f"data.train_data=['{folder}/prompts.jsonl']"]
        settings += ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "trainer.max_prompt_length=32"]
        settings += [f"trainer.{name}={tmp_path / name}" for name in ("log_path", "ckpt_path", "export_path")]
        code = check.run([f"trainer.policy.model.path={model}", *settings, *args])
        return code, *capsys.readouterr()

    return run


@pytest.mark.process
def test_check_reads_small_files_alone_and_shows_the_commit(hub, check, folder):
    files = hub_endpoint.folder_files(folder / "model")
    commit = hub.repository(TINY.name).push(files)
    code, out, err = check(TINY.name, "--show-config")
    assert code == 0, err
    assert f"acme/tiny@main: {commit}" in out and "model: qwen3_moe, " in out
    assert "trainer.policy.model.path=acme/tiny: the run downloads the weights when it starts" in out
    assert hub.downloads("tokenizer.json") and not hub.downloads(".safetensors")


def gated(hub):
    hub.repository("acme/gated").push(FILES)
    hub.repository("acme/gated").gated = True


REFUSED = {
    "misspelt": (
        "acme/tinny",
        {},
        [],
        ["has no model acme/tinny, or it is private and no token is set (HF_TOKEN", "correct the name"],
    ),
    "misspelt, with a token": (
        "acme/tinny",
        {"HF_TOKEN": hub_endpoint.TOKEN},
        [],
        ["the token in HF_TOKEN has no access to it"],
    ),
    "gated": (
        "acme/gated",
        {},
        [],
        ["acme/gated is gated: request access at http://", "/acme/gated and set a token of that account"],
    ),
    "wrong token": (
        "acme/gated",
        {"HF_TOKEN": "hf_wrong"},
        [],
        ["refuses the token in HF_TOKEN", "HTTP 401", "/settings/tokens"],
    ),
    "no such revision": (TINY.name, {}, ["trainer.policy.model.revision=v9"], ["no branch, tag or commit 'v9'"]),
    "no network": (
        TINY.name,
        {"HF_ENDPOINT": "http://127.0.0.1:9"},
        [],
        [
            "no local folder acme/tiny",
            "http://127.0.0.1:9 cannot be reached",
            "hf download acme/tiny",
            "HF_HUB_OFFLINE=1",
        ],
    ),
    "offline": (
        TINY.name,
        {"HF_HUB_OFFLINE": "1"},
        [],
        ["HF_HUB_OFFLINE is set", "does not hold all of acme/tiny@main", "hf download acme/tiny"],
    ),
    "no such folder": ("./models/moe", {}, [], ["no such folder", "ORG/NAME of a model on the hub"]),
    "data": (TINY.name, {}, ["data.train_data=[acme/smus]"], ["has no data set acme/smus"]),
}


@pytest.mark.process
@pytest.mark.parametrize("mistake", REFUSED)
def test_check_says_what_the_hub_refuses(hub, check, folder, tmp_path, monkeypatch, mistake):
    """One problem with cause and fix, exit code 2, for what would end a run after it started."""
    model, variables, args, words = REFUSED[mistake]
    hub.repository(TINY.name).push(hub_endpoint.folder_files(folder / "model"))
    gated(hub)
    hub_endpoint.use(monkeypatch, tmp_path / "empty", **{"HF_ENDPOINT": hub.url} | variables)
    code, out, err = check(model, *args)
    assert code == 2 and not out and "Traceback" not in err
    assert err.count("\n  - ") == 1, err
    for word in words:
        assert word in err


@pytest.mark.process
def test_a_gated_model_opens_with_its_token(hub, tmp_path, monkeypatch):
    gated(hub)
    hub_endpoint.use(monkeypatch, tmp_path / "hf", HF_ENDPOINT=hub.url, HF_TOKEN=hub_endpoint.TOKEN)
    assert names.resolve(Repo("model", "acme/gated"))
