"""What a configuration must not say of Muon, and what is questionable."""

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.errors import SkyRLMegatronWarning
from tests.config.test_validate import EP2, MOVES, K

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
    "AdamW's rate without Muon's": (
        [*MUON, "trainer.policy.optimizer_config.lr=0", "trainer.policy.optimizer_config.adam_lr=1e-5"],
        "trainer.policy.optimizer_config.adam_lr",
        "set lr too",
    ),
    "fp16 masters of Muon": (
        [*MUON, f"{O}main_params_dtype=fp16"],
        f"{O}main_params_dtype",
        "fp32 with optimizer=muon",
    ),
    "moves and muon": (
        [*EP2, MOVES, *MUON],
        MOVES[:-5],
        "optimizer_config.optimizer=adam",
    ),
    "clipped queries of adapters": (
        [*MUON, f"{K}qk_clip=true", "trainer.policy.model.lora.rank=8"],
        f"{K}qk_clip",
        "this role does not have",
    ),
    "clipped queries of padded rows": (
        [*MUON, f"{K}qk_clip=true", "trainer.use_sample_packing=false"],
        f"{K}qk_clip",
        "needs packed sequences",
    ),
    "clipping in one place": (
        [*MUON, f"{K}qk_clip=true", f"{K}qk_clip_alpha=1"],
        f"{K}qk_clip_alpha",
        "must be above 0 and below 1",
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
