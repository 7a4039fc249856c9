"""``--recipe NAME`` and ``model=`` in every command that takes ``key=value``."""

import pytest

from skyrl_megatron import cli
from skyrl_megatron.config import SkyRLTrainConfig, parse
from skyrl_megatron.config.load import parse as read
from skyrl_megatron.config.schema.sft import SFTTrainConfig
from skyrl_megatron.errors import ConfigError


def test_a_recipe_comes_before_the_keys_and_model_is_a_key():
    args = ["trainer.eval_interval=1", "--recipe", "tiny-moe-cpu", "model=org/m"]
    cfg, problems = read(SkyRLTrainConfig, args)
    assert not problems
    assert cfg.trainer.project_name == "tiny-moe" and cfg.trainer.eval_interval == 1
    assert cfg.trainer.policy.model.path == "org/m"


def test_a_file_of_the_user_is_taken_by_every_verb_but_for_another_s_section(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("trainer.seed: 5\n")
    for cls in (SkyRLTrainConfig, SFTTrainConfig):
        assert read(cls, [f"--recipe={file}"])[0].trainer.seed == 5
    file.write_text("sft.max_length: 7\n")
    assert read(SFTTrainConfig, ["--recipe", str(file)])[0].sft.max_length == 7
    with pytest.raises(ConfigError, match=f"belongs to another verb: skyrl-megatron sft --recipe {file}"):
        read(SkyRLTrainConfig, ["--recipe", str(file)])


OF_SFT = "qwen3-30b-a3b-sft, qwen3-30b-a3b-sft-lora, or the path of a YAML file"


@pytest.mark.process  # a command starts its fork server first
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --recipe qwen3-30b-b3", "did you mean qwen3-30b-a3b? Use one of deepseek-v3, embedded, "),
        ("train --recipe qwen3-30b-a3b-sft", "another verb: skyrl-megatron sft --recipe qwen3-30b-a3b-sft"),
        ("sft --recipe=qwen3-30b-a3b", "another verb: skyrl-megatron train --recipe qwen3-30b-a3b"),
        ("evaluate --recipe qwen3-30b-a3b-sft", "another verb: skyrl-megatron sft --recipe qwen3-30b-a3b-sft"),
        ("sft --recipe", f"--recipe=: give a name. Use one of {OF_SFT}"),
        ("sft --recipe model=org/m", f"--recipe=: give a name. Use one of {OF_SFT}"),
        ("sft --recipe=none", f"--recipe=none: no such recipe. Use one of {OF_SFT}"),
        ("dpo --check --recipe", "--recipe=: give a name. Use one of qwen3-30b-a3b-dpo-lora, or the path of a YAML"),
        ("reward --recipe ./none.yaml", "--recipe=./none.yaml: no such file"),
        ("evaluate --recipe embedded-muon", "as only this does: skyrl-megatron train --recipe embedded-muon"),
        ("train --recipe=tiny-moe-cpu --recipe=kimi-k2", "give one recipe"),
        ("train --recipe ppo_base", "no such recipe"),
        ("check --recipe embedded --recipe=kimi-k2", "give one recipe"),
    ],
)
def test_a_wrong_recipe_is_one_error_with_its_fix(command, message, capsys):
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("1 problem"), error


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("train", cli.EMBEDDED),
        ("check trainer.seed=3 --gpu h100", cli.EMBEDDED),
        ("train-async --recipe embedded-async", cli.EMBEDDED),
        ("train model=org/m", "main_base"),
        ("train --config mine.yaml", "main_base"),
        ("train data.train_data=[mine.parquet]", "main_base"),
        ("check --recipe kimi-k2", "main_base:check_only"),
        ("check --recipe qwen3-30b-a3b-sft", "skyrl_megatron_supervised.sft"),
    ],
)
def test_what_a_command_runs(command, module):
    verb, *arguments = command.split()
    assert cli._of_the_recipe(verb, arguments)[0].endswith(module)


def test_recipes_have_the_verbs_that_take_them():
    assert {parse.TRAIN, *parse.SUPERVISED} <= cli.VERBS.keys()
    owners = {file.stem: parse.verb_of_recipe(file.stem) for file in parse.RECIPES.glob("*.yaml")}
    assert owners["qwen3-30b-a3b-sft"] == "sft" and owners["embedded"] == "train" and None not in owners.values()
