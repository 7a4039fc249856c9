"""What users write, from the command line: one of each kind in a package of its own, beside the script of the trainer
guide, and what goes wrong with it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guides.documents import blocks
from tests.job import runs

pytestmark = [pytest.mark.process, pytest.mark.timeout(runs.TIMEOUT_S)]
ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "trainer.algorithm.policy_loss_type": "my_loss",
    "trainer.algorithm.advantage_estimator": "my_estimator",
    "generator.name": "my_generator",
    "generator.inference_engine.backend": "my_engine",
    "generator.inference_engine.weight_sync_backend": "my_transport",
}


@pytest.fixture
def folder(tmp_path):
    return with_mine(tmp_path)


def with_mine(folder):
    """Make it a working directory with the package ``mine``, which no path leads to."""
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("plugin.py"), folder / "mine" / "everything.py")
    shutil.copy(Path(__file__).with_name("family.py"), folder / "mine" / "family.py")
    (folder / "marks").mkdir()
    return folder


def install(folder):
    """Make ``mine`` an installed package with entry points; returns the folder that it is installed in."""
    site = folder / "site"
    shutil.copytree(folder / "mine", site / "mine")
    info = site / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[skyrl_megatron.plugins]\nmine = mine.everything\n[bridges.families]\nmistral = mine.family:MISTRAL\n"
    )
    return site


def write_mistral(folder):
    """The embedded tokenizer with a tiny model of a family that the package does not know."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from skyrl_megatron.tiny_model import VOCAB_SIZE, write_embedded_model

    write_embedded_model(folder, 1)
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        sliding_window=None,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    MistralForCausalLM(config).save_pretrained(folder)


def command(folder, *words, path=ROOT):
    """Run ``python …`` in ``folder``, as a user would."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(path)}
    environment["SKYRL_TEST_MARKS"] = str(folder / "marks")
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=runs.TIMEOUT_S)
    return runs.Run(process.returncode, out, err, folder), process.pid


def train(folder, *args, **options):
    return command(folder, "-m", "skyrl_megatron.entrypoints.main_base", *args, **options)


def assignments(names):
    return [f"{key}={value}" for key, value in names.items()]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(A run of two steps, its process): the guide's script with its environment, data, key, trainer and callback, on
    a plugin's loss, estimator, generator, engine, transport and family, evaluated with the plugin's environment."""
    folder = runs.prepare(with_mine(tmp_path_factory.mktemp("both")))
    shutil.rmtree(folder / "model")
    write_mistral(folder / "model")
    for block in blocks(ROOT / "docs/guides/trainer.md", "python"):
        if block.file:
            (folder / block.file).write_text(block.text)
    args = runs.arguments(
        folder,
        trainer__placement__policy_num_gpus_per_node=1,
        trainer__policy__megatron_config__expert_model_parallel_size=1,
        environment__env_class="my_env",
        trainer__eval_interval=2,
        trainer__plugins="[mine.everything]",
        trainer__price_of_a_token=0.5,
    )
    done, driver = command(folder, "train_letters.py", *args, *assignments(NAMES))
    return done.check(), driver


@pytest.mark.vllm
def test_one_of_each_kind_in_one_run(both):
    """Each is used where it belongs."""
    done, driver = both
    assert all(line["policy/loss_metrics/my_ratio"] == 0.5 for line in done.lines)
    assert "eval/sums/avg_score" in done.lines[-1]
    marks = {path.name: set(map(int, path.read_text().split())) for path in (done.folder / "marks").iterdir()}
    assert set(marks) == {"loss", "estimator", "environment", "generator", "engine", "transport", "family"}
    assert marks["estimator"] == marks["environment"] == marks["generator"] == {driver}
    (rank,), (engine,) = marks["loss"], marks["engine"]
    assert len({driver, rank, engine}) == 3 and rank in marks["family"]
    assert rank in marks["transport"] and len(marks["transport"]) == 2, "the rank and vLLM's own worker process"
    assert not marks["transport"] & {driver, engine}


@pytest.mark.vllm
def test_the_script_of_the_trainer_guide_runs(both):
    """Two steps of it: its environment, its data, its key, its trainer, its callback."""
    done, _ = both
    first, second = done.lines
    assert 1 <= first["reward/mean_length"] <= 6 and second["step"] == 2
    assert -3 <= first["reward/avg_raw_reward"] <= 0.5, "at most a share of letters, less half a point for each token"
    assert "2 of 2 steps are done" in done.out


@pytest.mark.vllm
def test_a_recorder_sees_the_run_in_order(both):
    """Beside one that fails, whose name is in the log."""
    done, _ = both
    step = ["rollouts 16", "batch {0} 16", "update {0} True", "metrics 16 None", "end of step {0}"]
    events = (done.folder / "events").read_text().splitlines()
    assert events == [
        "load None",
        "start 0 policy",
        *(line.format(number) for number in (1, 2) for line in step),
        "end",
    ]
    assert all(line["mine/longest"] > 0 for line in done.lines)
    assert done.err.count("the recorder mine.everything.Broken failed in on_batch") == 1
    assert "KeyError: 'no such column', at" in done.err


def test_an_installed_package_is_found(folder):
    """By its entry points, without a word on the command line: by a training command and by ``bridges``."""
    site = install(folder)
    shutil.rmtree(folder / "mine")
    path = f"{ROOT}:{site}"
    listed, _ = command(folder, "-m", "bridges", "list", path=path)
    assert listed.returncode == 0 and listed.out.splitlines()[-1].split() == ["mistral", "not", "checked", "yet"]
    checked, _ = train(folder, "--check", "data.train_data=[./none.jsonl]", *assignments(NAMES), path=path)
    assert checked.returncode == 2 and "none.jsonl: no such file" in checked.err
    assert "not registered" not in checked.err


def test_families_of_a_module_named_to_bridges(folder):
    listed, _ = command(folder, "-m", "bridges", "--plugin", "mine.family", "list", "--json")
    assert listed.returncode == 0 and json.loads(listed.out)["families"][-1]["model_type"] == "mistral"
    lost, _ = command(folder, "-m", "bridges", "--plugin", "nowhere", "list")
    assert lost.returncode == 2
    why = "cannot be imported (No module named 'nowhere'); give a module on PYTHONPATH"
    assert lost.err == f"error: --plugin nowhere: {why}\n"


def test_unknown_names_are_refused_with_what_is_known(folder):
    done, _ = train(folder, "--check", *assignments(NAMES))
    assert done.returncode == 2
    known = {
        "trainer.algorithm.policy_loss_type": ": choose one of regular, dual_clip,",
        "trainer.algorithm.advantage_estimator": ": choose one of grpo, rloo,",
        "generator.name": "; known: skyrl_gym, agent\n",
        "generator.inference_engine.backend": "; known: vllm\n",
        "generator.inference_engine.weight_sync_backend": "; known: nccl, gloo\n",
    }
    for key, names in known.items():
        assert f"  - {key}={NAMES[key]}: not registered{names}" in done.err


@pytest.mark.parametrize(
    ("module", "text", "cause"),
    [
        ("nowhere", None, r"(ModuleNotFoundError: No module named 'nowhere')"),
        ("broken", "1 / 0", "broken.py:1 in <module>)"),
        (
            "taken",
            "from skyrl_megatron.plugins import register_engine\nregister_engine('vllm')(object)",
            "generator.inference_engine.backend=vllm: is taken (built in): register under another name",
        ),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_problem(folder, module, text, cause):
    if text:
        (folder / f"{module}.py").write_text(text)
    done, _ = train(folder, "--check", f"trainer.plugins=[{module}]", *assignments(NAMES))
    assert done.returncode == 2 and "Traceback" not in done.err
    assert f"trainer.plugins={module}: cannot be imported" in done.err and cause in done.err
    assert "not registered" not in done.err


def test_registering_again(monkeypatch):
    """The same class or function again is no mistake, as when several processes or an entry point import a module."""
    import importlib

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.plugins import ClassRegistry, load_plugins

    registry = ClassRegistry("some.key", "ours")
    registry.register("theirs")(Path)
    registry.register("theirs")(Path)
    assert registry.find("theirs") is Path and registry.find("ours") is None
    with pytest.raises(ConfigError, match=r"some\.key=theirs: is taken \(pathlib.*Path\)"):
        registry.register("theirs")(dict)
    PolicyLossRegistry.register("theirs", os.path.join)
    PolicyLossRegistry.register("theirs", os.path.join)
    with pytest.raises(ValueError, match="already registered"):
        PolicyLossRegistry.register("theirs", os.path.split)
    PolicyLossRegistry.unregister("theirs")
    monkeypatch.setenv("SKYRL_MEGATRON_PLUGINS", "json")
    load_plugins(["importlib"])
    load_plugins()
    assert os.environ["SKYRL_MEGATRON_PLUGINS"] == "json,importlib" and importlib is sys.modules["importlib"]


def test_a_registry_that_no_package_fills_says_what_to_do():
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.plugins import ClassRegistry

    with pytest.raises(ConfigError, match=r"trainer.policy.model.lora=trained: no installed package .*launch/setup"):
        ClassRegistry("trainer.policy.model.lora").require("trained")
    with pytest.raises(ConfigError, match="colour=red: not registered; known: blue"):
        ClassRegistry("colour", "blue").require("red")
