"""``--recipe NAME`` and ``model=`` in the verbs of ``skyrl-megatron``."""

import pytest

from skyrl_megatron import cli
from skyrl_megatron.entrypoints import recipes
from skyrl_megatron.errors import ConfigError


def test_a_recipe_comes_before_the_keys_and_model_is_a_key():
    args = ["trainer.seed=1", "--recipe", "tiny-moe-cpu", "model=/m", "--check"]
    file = f"{recipes.config_dir}/tiny-moe-cpu.yaml"
    assert recipes.with_recipe(args) == [
        "--config",
        file,
        "trainer.seed=1",
        "trainer.policy.model.path=/m",
        "--check",
    ]
    assert recipes.with_recipe(["--recipe=mine/run.yaml"]) == ["--config", "mine/run.yaml"]
    assert recipes.with_recipe(["a=1"]) == ["a=1"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--recipe", "qwen3-30b-b3"], "did you mean qwen3-30b-a3b?"),
        (["--recipe", "embedded-muon"], "start it with launch/run_moe.sh --recipe embedded-muon"),
        (["--recipe=tiny-moe-cpu", "--recipe=kimi-k2"], "give one recipe"),
    ],
)
def test_a_wrong_recipe_is_one_error_with_its_fix(args, message, capsys):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        recipes.with_recipe(args)
    assert cli.main(["train", *args]) == 2
    assert message in capsys.readouterr().err


def test_verbs_that_take_recipes_are_there():
    assert set(recipes.VERBS) <= set(cli.VERBS)
