"""Recipes: each fits with room on the machines that its first lines name, with its own batch, and says what ran."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.support.released_models import (
    DEEPSEEK_V3,
    GLM_4_5_AIR,
    GPT_OSS_120B,
    KIMI_K2,
    OLMOE_1B_7B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    RELEASED_LATER,
)
from tests.support.whole_folder import write_sums, write_whole_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "skyrl_megatron" / "recipes"
NO_RECIPES = {"ppo_base_config"}  # Hydra's base file
EMBEDDED = {f"embedded-{name}" for name in ("lora", "ppo", "distill", "async", "mlperf", "muon")}
SMALL = {"tiny-moe-cpu", "embedded", *EMBEDDED}
SHAPES = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-30b-a3b-2x8": QWEN3_30B_A3B,
    "qwen3-30b-a3b-lora": QWEN3_30B_A3B,
    "qwen3-30b-a3b-sft": QWEN3_30B_A3B,
    "qwen3-30b-a3b-sft-lora": QWEN3_30B_A3B,
    "olmoe-1b-7b": OLMOE_1B_7B,
    "qwen3-235b-a22b": QWEN3_235B_A22B,
    "qwen3-235b-a22b-lora": QWEN3_235B_A22B,
    "glm-4.5-air": GLM_4_5_AIR,
    "deepseek-v3": DEEPSEEK_V3,
    "kimi-k2": KIMI_K2,
    "gpt-oss-120b": GPT_OSS_120B,
}
MUON = [
    "trainer.policy.optimizer_config.optimizer=muon",
    "trainer.policy.megatron_config.optimizer_config_kwargs={}",
]
CLIPPED = [
    *MUON,
    "trainer.policy.megatron_config.transformer_config_kwargs.qk_clip=true",
    "trainer.policy.megatron_config.transformer_config_kwargs.transformer_impl=local",
]
"""Keys that the recipe's first lines name for Muon, and for Muon with QK-clip."""
ROOM_GB = 3


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_each_run_has_its_own_folders(name, monkeypatch, tmp_path):
    """By project and run, also those that the command line names. The embedded run names its folders by its seed."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.schema.preferences import DPOTrainConfig
    from skyrl_megatron.config.schema.sft import SFTTrainConfig

    if name in NO_RECIPES | EMBEDDED | {"embedded"}:
        return
    monkeypatch.setenv("HOME", str(tmp_path))
    cls = SFTTrainConfig if "sft" in name else DPOTrainConfig if "dpo" in name else SkyRLTrainConfig
    given = [f"--config={FOLDER / name}.yaml", "trainer.policy.model.path=a/b", "data.train_data=[a.parquet]"]
    trainer = cls.from_cli_overrides([*given, "trainer.run_name=second"]).trainer
    assert trainer.ckpt_path == f"{tmp_path}/ckpts/{trainer.project_name}/second"
    assert trainer.export_path == f"{tmp_path}/exports/{trainer.project_name}/second"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Rows enough for every recipe's batch, and a folder for each released model, made once."""
    root = tmp_path_factory.mktemp("models")
    talk = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
    write_sums(root / "rows.parquet", rows=256, messages=[talk] * 256)
    made = {}

    def folder(config):
        key = id(config)
        if key not in made:
            made[key] = write_whole_folder(root / str(len(made)), config)
        return made[key]

    return root / "rows.parquet", folder


DPO = {"qwen3-30b-a3b-dpo-lora"}
"""Of pairs."""


@pytest.mark.parametrize("recipe", DPO)
def test_a_recipe_of_pairs_fits_with_room(models, recipe, tmp_path, capsys):
    from skyrl_megatron import cli

    text = (FOLDER / f"{recipe}.yaml").read_text()
    machine = re.search(r"--check=(\S+) --gpu h100 --host-memory (\w+)\. Only that was checked; no run", text)
    pair = {kind: [{"role": "assistant", "content": kind}] for kind in ("chosen", "rejected")}
    row = json.dumps({"prompt": [{"role": "user", "content": "1+1=?"}], **pair})
    (tmp_path / "pairs.jsonl").write_text("\n".join([row] * 256))
    words = [f"model={models[1](QWEN3_30B_A3B)}", f"data.train_data=['{tmp_path}/pairs.jsonl']", "data.val_data=[]"]
    words += [f"--check={machine[1]}", "--gpu", "80GB", "--host-memory", machine[2], "trainer.logger=console"]
    words.append("--show-config")  # the memory of all phases
    assert cli.main(["dpo", "--recipe", recipe, *words]) == 0, capsys.readouterr().err
    rooms = re.findall(r"^(.+): .* of .*, (\S+) GB free$", capsys.readouterr().out, re.MULTILINE)
    assert len(rooms) >= 3 and all(float(room) > ROOM_GB for _, room in rooms), rooms


@pytest.mark.parametrize("recipe", sorted(set(SHAPES) | DPO | {"tiny-moe-cpu"}))
def test_a_recipe_has_folders_that_stay_and_that_nodes_share(recipe):
    trainer = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())["trainer"]
    if recipe not in SMALL:
        assert trainer["flash_attn"] is True, "else it would become a run on the CPU where no GPU is visible"
    assert all(trainer[f"{name}_path"].startswith("~/") for name in ("log", "ckpt", "export"))


@pytest.mark.parametrize("recipe", sorted(set(SHAPES) | DPO))
def test_without_model_a_recipe_is_of_the_model_that_it_is_for(recipe, tmp_path, monkeypatch, capsys):
    """Where the hub is not reached, one line names it, not the default of all runs."""
    from skyrl_megatron import cli
    from tests.support import hub_endpoint

    hub_endpoint.use(monkeypatch, tmp_path / "hf", HF_HUB_OFFLINE="1")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())["trainer"]["policy"]["model"]["path"]
    simple = re.sub(r"[^a-z0-9]", "", path.rpartition("/")[2].lower())
    assert simple.startswith(re.sub(r"(2x8|(dpo|sft)?lora|sft)$", "", re.sub(r"[^a-z0-9]", "", recipe)))
    verb = "sft" if "-sft" in recipe else "dpo" if recipe in DPO else "train"
    assert cli.main([verb, "--recipe", recipe, "--check=1x8", "data.train_data=[a.parquet]"]) == 2
    error = capsys.readouterr().err
    assert f"trainer.policy.model.path={path}: " in error and "Qwen2.5" not in error, error


def test_every_recipe_is_checked_here_and_named_in_the_documents():
    names = {file.stem for file in FOLDER.glob("*.yaml")} - NO_RECIPES
    assert names == set(SHAPES) | SMALL | DPO
    guide = (ROOT / "docs" / "guides" / "recipes.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in guide] == []


@pytest.mark.parametrize(
    ("recipe", "keys"), [*((recipe, []) for recipe in SHAPES), ("kimi-k2", MUON), ("kimi-k2", CLIPPED)]
)
def test_recipe_fits_with_room(models, recipe, keys, capsys):
    from skyrl_megatron_tools.embedded import run_moe

    rows, folder = models
    text = (FOLDER / f"{recipe}.yaml").read_text()
    machine = re.search(r"--check=(\S+) --gpu h100 --host-memory (\w+)\. Only that was checked; no run", text)
    assert machine, "the first lines name the machines, and what was done"
    assert all(key in text for key in keys)
    files = [f"model={folder(SHAPES[recipe])}", f"data.train_data=['{rows}']", "data.val_data=[]"]
    sizes = [f"--check={machine[1]}", "--gpu", "80GB", "--host-memory", machine[2], "trainer.logger=console"]
    sizes.append("--show-config")  # the memory of all phases
    assert run_moe.main(["--recipe", recipe, *files, *sizes, *keys]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    rooms = re.findall(r"^(.+): .* of .*, (\S+) ([GT])B free$", out.partition("# memory")[2], re.MULTILINE)
    config = yaml.safe_load(text)
    phases = 3 if "sft" in config else 6  # nothing is sampled, scored or synchronized
    assert len(rooms) >= phases, out
    assert {name: room for name, room, unit in rooms if unit == "G" and float(room) <= ROOM_GB} == {}
    check_batch(config, machine[1], out)


def test_a_tiny_moe_on_this_machine(tmp_path, capsys):
    from skyrl_megatron.tiny_model import write_embedded_model
    from skyrl_megatron_tools.embedded import run_moe

    rows = write_sums(tmp_path / "rows.parquet", 64)
    model = write_embedded_model(tmp_path / "model", 1)
    words = [f"model={model}", f"data.train_data=['{rows}']", "data.val_data=[]", "--check"]
    assert run_moe.main(["--recipe", "tiny-moe-cpu", *words]) == 0, capsys.readouterr().err
    assert "32 prompts · 8 samples = 256 sequences of at most 640 tokens" in capsys.readouterr().out


def check_batch(config, nodes, out):
    """Sequences of an optimizer step, over replicas, as the recipe's own numbers have them."""
    trainer, generator = config["trainer"], config.get("generator")
    placement, degrees = trainer["placement"], trainer["policy"]["megatron_config"]
    hosts, gpus = (int(number) for number in nodes.split("x"))
    assert placement.get("policy_num_nodes", 1) == hosts and placement["policy_num_gpus_per_node"] == gpus
    split = degrees.get("tensor_model_parallel_size", 1) * degrees.get("pipeline_model_parallel_size", 1)
    replicas = hosts * gpus // split
    if "sft" in config:
        batch, longest = trainer["train_batch_size"], config["sft"]["max_length"]
        said = out.partition("\ndata:")[0]  # the resolved configuration follows
        assert f"{batch} rows of at most {longest} tokens" in said and "engines" not in said
        step = f"each on {batch} sequences = dp {replicas} · {batch // replicas}"
        assert f"policy: 1 optimizer steps ({batch}/{batch} · 1 epochs), {step}" in out
        return
    batch, mini, samples = (
        trainer["train_batch_size"],
        trainer["policy_mini_batch_size"],
        generator["n_samples_per_prompt"],
    )
    longest = trainer["max_prompt_length"] + generator["sampling_params"]["max_generate_length"]
    assert f"{batch} prompts · {samples} samples = {batch * samples} sequences of at most {longest} tokens" in out
    step = f"each on {mini * samples} sequences = dp {replicas} · {mini * samples // replicas}"
    assert f"policy: {batch // mini} optimizer steps ({batch}/{mini} · 1 epochs), {step}" in out
    engine = generator["inference_engine"]
    ranks = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    assert "num_engines" not in engine and f"{hosts * gpus // ranks} · {ranks} ranks (tp " in out, (
        "they follow the GPUs"
    )


TP_2 = "tensor_model_parallel_size=2"
ACCEPTED = {  # nodes of eight GPUs, tp of an engine, pipeline stages, expert parallelism, what else differs
    "MiniMax-M2": (16, 8, 2, 32),
    "GLM-4.7-Flash": (4, 4, 1, 16),
    "ERNIE-4.5-21B-A3B": (4, 4, 2, 16),
    "ERNIE-4.5-300B-A47B": (32, 16, 2, 32),
    "Hy3-preview": (32, 16, 2, 32),
    "Qwen3-Next-80B-A3B": (8, 8, 2, 16, TP_2),
    "Qwen3.5-35B-A3B": (4, 4, 2, 16, TP_2),
    "MiMo-V2-Flash": (32, 16, 2, 64),
    "DeepSeek-V3.2": (64, 64, 4, 32, "num_layers_in_last_pipeline_stage=13"),
    "GLM-5": (64, 64, 2, 64),
}
"""Released models without a recipe. A recipe's settings with these fit."""


@pytest.mark.parametrize(
    "name", [name if name == "MiniMax-M2" else pytest.param(name, marks=pytest.mark.full_matrix) for name in ACCEPTED]
)
def test_released_configurations_are_accepted(models, name, capsys):
    from skyrl_megatron_tools.embedded import run_moe

    rows, folder = models
    nodes, ranks, stages, experts, *more = ACCEPTED[name]
    megatron, engine = "trainer.policy.megatron_config.", "generator.inference_engine."
    words = [
        f"model={folder(RELEASED_LATER[name])}",
        f"data.train_data=['{rows}']",
        "data.val_data=[]",
        f"trainer.placement.policy_num_nodes={nodes}",
        f"{megatron}pipeline_model_parallel_size={stages}",
        f"{megatron}expert_model_parallel_size={experts}",
        *(f"{megatron}{word}" for word in more),
        f"{engine}tensor_parallel_size={ranks}",
        f"{engine}num_engines={nodes * 8 // ranks}",
        f"--check={nodes}x8",
        *("--gpu", "80GB", "--host-memory", "2TB", "trainer.logger=console"),
    ]
    assert run_moe.main(["--recipe", "glm-4.5-air", *words]) == 0, capsys.readouterr().err
    assert "# memory" in capsys.readouterr().out


def test_a_family_that_no_engine_runs_is_refused(models, capsys):
    from skyrl_megatron_tools.embedded import run_moe

    rows, folder = models
    words = [f"model={folder(RELEASED_LATER['dots.llm1'])}", f"data.train_data=['{rows}']", "data.val_data=[]"]
    assert run_moe.main(["--recipe", "glm-4.5-air", *words, "--check=4x8", "--gpu", "80GB"]) == 2
    assert "no engine runs dots1: vLLM removed its architecture" in capsys.readouterr().err
