"""The classes against the recorded contract: names, types and defaults of every field."""

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
import types
import typing

import pytest

from skyrl_megatron import config
from skyrl_megatron.config import document, get_config_as_dict
from skyrl_megatron.config.fields import default_of, field_docstrings, field_types, leaves, sections_of

ON_PURPOSE = {
    ("TrainerConfig", "strategy"): "megatron",
    ("InferenceEngineConfig", "enforce_eager"): False,
}
"""Defaults that differ from the contract."""
WIDER = {("TrainerConfig", "logger"): "str | list[str]"}
"""Types that take more than the contract: SkyRL's users write a list of trackers, although it declares a string."""


def contract(data_dir):
    return json.loads((data_dir / "config_fields.json").read_text())


def names(**extra):
    return vars(typing) | vars(config) | {"os": os, "copy": copy} | extra


def normal(kind):
    """A type with ``List``/``list``, ``Optional``/``|`` and bare ``dict`` made alike."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return frozenset(normal(arg) for arg in args)
    if origin is list:
        return ("list", *map(normal, args))
    if kind is dict or origin is dict:
        return ("dict", *map(normal, args or (str, typing.Any)))
    return kind


def test_contract_is_whole(data_dir):
    recorded = contract(data_dir)
    assert len(recorded) == 32 and sum(map(len, recorded.values())) == 249


def test_every_recorded_field_has_its_type_and_default(data_dir):
    for class_name, fields in contract(data_dir).items():
        cls = getattr(config, class_name)
        hints = typing.get_type_hints(cls)
        ours = list(field_types(cls))
        assert ours[: len(fields)] == list(fields), f"{class_name}: order of fields"
        for name, field in fields.items():
            expected = WIDER.get((class_name, name), field["type"])
            assert normal(hints[name]) == normal(eval(expected, names())), f"{class_name}.{name}"
            expected = ON_PURPOSE.get((class_name, name), eval(field["default"], names()))
            default = default_of(cls, name)
            assert default == expected and type(default) is type(expected), f"{class_name}.{name}"


def test_defaults_obey_their_own_rules():
    """Each default, given as a value, is accepted and unchanged."""
    for cls in {owner for _, owner, _ in leaves(config.SkyRLTrainConfig)}:
        values = {n: default_of(cls, n) for n in field_types(cls) if n not in sections_of(cls)}
        made = cls.from_dict_config(values)
        assert get_config_as_dict(made).items() >= values.items(), cls
        for name, value in values.items():
            assert type(getattr(made, name)) is type(value), f"{cls.__name__}.{name}"


def test_every_field_is_explained_and_config_md_is_fresh():
    for _, cls, name in leaves(config.SkyRLTrainConfig):
        assert field_docstrings(cls).get(name), f"{cls.__name__}.{name} has no docstring"
    stale = "CONFIG.md is stale: run python -m skyrl_megatron.config.document"
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    with open(os.path.join(root, "CONFIG.md")) as file:
        assert file.read() == document.document(), stale
    with open(os.path.join(root, "skyrl_megatron/recipes/ppo_base_config.yaml")) as file:
        assert file.read() == document.base_config(), f"its keys too: {stale}"


def test_the_page_of_options_has_the_whole_text_of_every_key(tmp_path):
    """``launch/docs.sh`` writes it; CONFIG.md has the same lines, cut after a clause."""
    assert document.main([str(tmp_path / "options.md")]) == 0
    lines = (tmp_path / "options.md").read_text().splitlines()
    for _, cls, name in leaves(config.SkyRLTrainConfig):
        text = " ".join(field_docstrings(cls)[name].split()).replace("|", "\\|")
        assert any(line.startswith(f"- `{name}=") and line.endswith(f": {text}") for line in lines), name
    short = [line for line in document.document().splitlines() if line.startswith("- `") and "=" in line]
    begun = {line.split("`: ")[0].split(") ")[0] for line in lines}
    assert len(short) > 250 and all(line.split("`: ")[0].split(") ")[0] in begun for line in short if "`: " in line)


def test_a_key_of_another_role_is_that_of_the_policy_or_has_a_line():
    """CONFIG.md has few lines, because a model's settings stand there once."""
    every, shown = (
        {key: (cls, name) for key, cls, name in leaves(config.SkyRLTrainConfig)},
        list(document.shown_keys()),
    )
    assert len(shown) == len(set(shown)) <= 350 and set(shown) <= every.keys()
    for key in every.keys() - set(shown):
        cls, name = every[key]
        if field_docstrings(cls)[name].startswith("No effect"):  # one line has all of a section
            continue
        as_policy = re.sub(r"^trainer\.(ref|critic|teacher)\.", "trainer.policy.", key)
        assert as_policy.replace("eval_sampling_params", "sampling_params") in shown


def test_a_field_of_the_block_is_one_of_every_role():
    block = set(typing.get_type_hints(config.schema.models.RoleConfig))
    for cls in (config.PolicyConfig, config.CriticConfig, config.RefConfig, config.TeacherConfig):
        assert block <= set(field_types(cls)) and issubclass(cls, config.schema.models.RoleConfig)
    assert config.RefConfig().fsdp_config is not config.RefConfig().fsdp_config


@pytest.mark.process
def test_import_loads_neither_torch_nor_ray():
    heavy = ("torch", "ray", "transformers", "megatron", "vllm", "numpy", "omegaconf")
    code = f"import sys, skyrl_megatron.config.validate; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_kwargs_defaults_are_not_shared():
    one, other = config.MegatronConfig(), config.MegatronConfig()
    one.transformer_config_kwargs["recompute_modules"].append("moe")
    assert other.transformer_config_kwargs == config.DEFAULT_TRANSFORMER_CONFIG_KWARGS
    assert config.DEFAULT_TRANSFORMER_CONFIG_KWARGS["recompute_modules"] == ["core_attn"]


@pytest.mark.parametrize("name", ["BaseConfig", "Text2SQLEnvConfig", "SearchEnvConfig", "DPPOConfig"])
def test_classes_beyond_the_contract_exist(name):
    assert dataclasses.is_dataclass(getattr(config, name)) or name == "BaseConfig"
