"""Facts of losses, estimators, optimizers and roles: one row each, and one file for a loss that is not built in."""

import importlib
import sys

import pytest
import yaml

from skyrl_megatron.config import (
    AlgorithmConfig,
    OptimizerConfig,
    SkyRLTrainConfig,
    document,
    get_config_as_yaml_str,
)
from skyrl_megatron.config.fields import field_docstrings, field_types, leaves, sections_of
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.table import ESTIMATORS, LOSSES, OPTIMIZERS, ROLES, LossRow
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.errors import AlgorithmError, ConfigError, SkyRLMegatronWarning
from skyrl_megatron.plugins import VARIABLE

A = "trainer.algorithm."
GPUS = Hardware(8, 2)
BASE = ["trainer.logger=console", "trainer.policy.model.path=some/model"]
FLOORED = '''
from dataclasses import dataclass

import torch

from skyrl_megatron.algorithms import register_policy_loss
from skyrl_megatron.config import BaseConfig
from skyrl_megatron.config.fields import NonNegative


@dataclass
class FlooredConfig(BaseConfig):
    """Loss `floored`."""

    floor: NonNegative = 13.8
    """Tokens whose log-prob is below minus this teach nothing."""


@register_policy_loss("floored", settings=FlooredConfig, reads=["eps_clip_low"], corrected=False)
def floored(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None):
    return torch.where(log_probs < -config.floored.floor, 0.0, -advantages * log_probs), {}
'''


@pytest.fixture
def floored(tmp_path, monkeypatch):
    """The name of a module that brings the loss ``floored`` with a setting."""
    (tmp_path / "floored_loss.py").write_text(FLOORED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    yield "floored_loss"
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    sys.modules.pop("floored_loss", None)
    LOSSES.rows.pop("floored", None)
    if "floored" in PolicyLossRegistry.list_available():
        PolicyLossRegistry.unregister("floored")


def parsed(*args):
    return SkyRLTrainConfig.from_cli_overrides([*BASE, *args])


def test_a_loss_with_a_setting_is_one_file(floored):
    """It is parsed, typed, in the saved configuration, and what the loss reads."""
    import torch

    args = [f"trainer.plugins=[{floored}]", f"{A}policy_loss_type=floored"]
    cfg = parsed(*args, f"{A}floored.floor=2")
    assert cfg.trainer.algorithm.floored.floor == 2.0 and isinstance(cfg, SkyRLTrainConfig)
    assert f"{A}floored.floor" in [key for key, _, _ in leaves(type(cfg))]
    assert find_problems(cfg, GPUS) == []
    loss = importlib.import_module(floored).floored
    values, _ = loss(torch.tensor([[-1.0, -3.0]]), None, torch.ones(1, 2), cfg.trainer.algorithm)
    assert values.tolist() == [[1.0, 0.0]]
    assert parsed(*args).trainer.algorithm.floored.floor == 13.8
    again = SkyRLTrainConfig.from_dict_config(yaml.safe_load(get_config_as_yaml_str(cfg)))
    assert again.trainer.algorithm.floored.floor == 2.0
    with pytest.raises(ConfigError, match=r"floored\.floor=-1.*at least 0"):
        parsed(*args, f"{A}floored.floor=-1")
    with pytest.raises(ConfigError, match=r"floored\.flor=1: unknown key; closest: .*floored\.floor"):
        parsed(*args, f"{A}floored.flor=1")


def test_the_row_of_a_registered_loss_is_heeded(floored):
    cfg = parsed(f"trainer.plugins=[{floored}]", f"{A}policy_loss_type=floored", f"{A}eps_clip_high=0.3")
    with pytest.warns(SkyRLMegatronWarning, match="eps_clip_high=0.3: policy_loss_type is not regular"):
        find_problems(cfg, GPUS)
    ahead = ["trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false", "generator.batched=false"]
    ahead.append("generator.sampling_params.logprobs=1")
    cfg = parsed(f"trainer.plugins=[{floored}]", f"{A}policy_loss_type=floored", *ahead)
    (problem,) = find_problems(cfg, GPUS)
    assert problem.key == f"{A}policy_loss_type" and "no off-policy correction" in problem.fix


def test_defaults_of_other_sections_stay_where_a_loss_adds_one(floored):
    from skyrl_megatron.config.schema.sft import SFTTrainConfig

    cfg = SFTTrainConfig.from_cli_overrides([f"trainer.plugins=[{floored}]", f"{A}floored.floor=2"])
    assert cfg.trainer.algorithm.policy_loss_type == "cross_entropy" and not cfg.trainer.placement.colocate_all
    assert not cfg.trainer.is_set("train_batch_size") or cfg.trainer.train_batch_size == 64


def test_a_name_with_settings_can_be_part_of_a_key():
    with pytest.raises(AlgorithmError, match="letters, digits and _"):
        LOSSES.add("reinforce--", LossRow(settings=OptimizerConfig))


def test_rows_name_settings_that_are_there():
    """A row that names a key wrongly would warn of nothing."""
    fields, every = set(field_types(AlgorithmConfig)), {key for key, _, _ in leaves(SkyRLTrainConfig)}
    for table in (LOSSES, ESTIMATORS):
        assert set(table.shared()) <= fields
        for name in table.built_in:
            row = table[name]
            assert row.settings is None or sections_of(AlgorithmConfig)[name] is row.settings
            assert row.meaning and all(any(key.startswith(refused) for key in every) for refused in row.refuses)
    assert {key for row in OPTIMIZERS.values() for key in row.reads} <= set(field_types(OptimizerConfig))
    for role in ROLES.values():
        assert all(any(key.startswith(named) for key in every) for named in role.keys)
    assert all(LOSSES[name].anchor.split(".")[0] in fields for name in LOSSES.readers("ratio_anchor"))


def test_texts_name_every_row():
    """The explanations of the two keys, and CONFIG.md."""
    texts = field_docstrings(AlgorithmConfig)
    assert all(f"`{name}`" in texts["policy_loss_type"] for name in LOSSES.built_in)
    assert all(f"`{name}`" in texts["advantage_estimator"] for name in ESTIMATORS.built_in)
    text = document.document()
    assert all(f"| `{name}` | {LOSSES[name].meaning} |" in text for name in LOSSES.built_in)
    assert all(f"| `{name}` | {ESTIMATORS[name].meaning} |" in text for name in ESTIMATORS.built_in)
