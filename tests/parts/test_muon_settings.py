"""What a configuration must not say of Muon, and what is questionable."""

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.errors import SkyRLMegatronWarning

MUON = ["trainer.policy.optimizer_config.optimizer=muon"]
O = "trainer.policy.megatron_config.optimizer_config_kwargs."  # noqa: E741
RULES = {
    "unknown field of Muon": (
        [*MUON, f"{O}muon_use_nesterov=true"],
        f"{O}muon_use_nesterov",
        "did you mean muon_nesterov",
    ),
    "Muon's field without Muon": ([f"{O}muon_momentum=0.9"], f"{O}muon_momentum", "optimizer=muon"),
    "momentum of 1": ([*MUON, f"{O}muon_momentum=1"], f"{O}muon_momentum", "below 1"),
    "Muon summed over ranks": ([*MUON, f"{O}muon_tp_mode=distributed"], f"{O}muon_tp_mode", "or blockwise"),
    "Megatron's own Muon": ([f"{O}optimizer=muon"], f"{O}optimizer", "optimizer_config.optimizer=muon"),
    "endless updates": ([*MUON, f"{O}muon_extra_scale_factor=.inf"], f"{O}muon_extra_scale_factor", "positive number"),
    "narrow state of Muon": (
        [*MUON, f"{O}use_precision_aware_optimizer=true"],
        f"{O}use_precision_aware_optimizer",
        "not supported with optimizer=muon",
    ),
    "one optimizer of the rest": (
        [*MUON, f"{O}muon_scalar_optimizer=lion"],
        f"{O}muon_scalar_optimizer",
        "trained by AdamW",
    ),
    "q, k and v together": (
        [*MUON, f"{O}muon_split_qkv=false"],
        f"{O}muon_split_qkv",
        "always separate",
    ),
}


def problems(*args):
    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.logger=console", *args])
    return find_problems(cfg, Hardware(8, 1))


@pytest.mark.filterwarnings("ignore:settings without effect")
@pytest.mark.parametrize("rule", RULES)
def test_rule(rule):
    args, key, words = RULES[rule]
    [problem] = problems(*args)
    assert problem.key == key and words in problem.fix, problem


def test_shards_of_their_own_are_another_algorithm():
    with pytest.warns(SkyRLMegatronWarning, match="muon_tp_mode=blockwise is another algorithm"):
        assert problems(*MUON, f"{O}muon_tp_mode=blockwise") == []
