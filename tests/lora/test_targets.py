"""Which layers get adapters, by what names; mistakes are found before a model is built."""

import re
import warnings

import pytest

KEY = "trainer.policy.model.lora."


def plan_of(model_type):
    from bridges.plan import Plan
    from tests.bridges.tiny_models import tiny_config

    return Plan.of(tiny_config(model_type))


def chosen(plan, names="all-linear", exclude=None, **switches):
    """Megatron's names of the selected modules below a layer, experts' numbers left out."""
    from skyrl_megatron_lora.targets import select

    modules = select(plan, names, exclude, **switches).modules
    return {re.sub(r"decoder\.layers\.\d+\.|\.experts\.\d+", "", name) for name in modules}


@pytest.mark.parametrize(
    "model_type, expected",
    [
        ("qwen3_moe", {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}),
        (
            "qwen2_moe",
            {
                "self_attention.linear_qkv",
                "self_attention.linear_proj",
                "mlp.linear_fc1",
                "mlp.linear_fc2",
                "mlp.shared_experts.linear_fc1",
                "mlp.shared_experts.linear_fc2",
            },
        ),
        (
            "deepseek_v3",
            {
                "self_attention.linear_q_down_proj",
                "self_attention.linear_q_up_proj",
                "self_attention.linear_kv_down_proj",
                "self_attention.linear_kv_up_proj",
                "self_attention.linear_proj",
                "mlp.linear_fc1",
                "mlp.linear_fc2",
                "mlp.shared_experts.linear_fc1",
                "mlp.shared_experts.linear_fc2",
            },
        ),
    ],
)
def test_all_linear_is_every_map_but_routers_and_ends(model_type, expected):
    assert chosen(plan_of(model_type)) == expected


def test_names_of_both_worlds():
    plan = plan_of("qwen3_moe")
    attention = {"self_attention.linear_qkv", "self_attention.linear_proj"}
    assert chosen(plan, "q_proj,k_proj,v_proj,o_proj") == chosen(plan, "linear_qkv, linear_proj") == attention
    assert chosen(plan, "self_attn") == chosen(plan, "all-linear", mlp=False) == attention
    assert (
        chosen(plan, "mlp.experts") == chosen(plan, exclude="self_attention") == {"mlp.linear_fc1", "mlp.linear_fc2"}
    )
    from skyrl_megatron_lora.targets import select

    assert all(".layers.1." in name for name in select(plan, "layers.1").modules)
    assert set(select(plan, "q_proj,v_proj", separate=True).modules.values()) == {("q_proj", "v_proj")}


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
def test_maps_whose_rows_lie_between_one_another_have_one_adapter(model_type):
    """Gated attention's q, and what goes into a delta net: together they have one, each alone has none."""
    from skyrl_megatron.errors import ConfigError

    assert {"self_attention.linear_qkv", "self_attention.linear_in"} <= chosen(plan_of(model_type))
    with pytest.raises(ConfigError, match=r"q_proj, k_proj, v_proj are interleaved .*lora_type=lora"):
        chosen(plan_of(model_type), separate=True)


@pytest.mark.parametrize(
    "names, exclude, says",
    [
        ("q_prj", None, "nearest: q_proj"),
        ("all-linear", "linear_fc3", "nearest: linear_fc"),
        ("q_proj,v_proj", None, "without k_proj"),
        ("linear_proj", "o_proj", "selects no linear layer"),
        ("mlp.router", None, "no linear layer of this model has this name"),
    ],
)
def test_names_that_do_not_fit(names, exclude, says):
    from skyrl_megatron.errors import ConfigError

    with pytest.raises(ConfigError, match=says):
        chosen(plan_of("qwen3_moe"), names, exclude)


def test_a_kind_of_layer_that_is_off_is_named():
    from skyrl_megatron.errors import ConfigError

    with pytest.raises(ConfigError, match=r"selects no linear layer with train_attn=false: .* or set it to true"):
        chosen(plan_of("qwen3_moe"), "self_attn", attention=False)


@pytest.mark.around
@pytest.mark.parametrize(
    "settings, says",
    [
        ({"rank": 4, "target_modules": "q_prj"}, f"{KEY}target_modules=q_prj: no linear layer"),
        ({"rank": 64}, f"{KEY}rank=64: .* set a rank of at most 24"),
        ({"rank": 16, "etp": 2}, f"{KEY}rank=16: .*linear_fc2.weight is \\[48, 12\\] on a rank: set .* at most 12"),
        ({"rank": 5, "normalised": True}, f"{KEY}rank=5: normalize_moe_lora divides it .*set a multiple of 2"),
        ({"rank": 32, "normalised": True, "train_attn": False}, None),
        ({"rank": 12, "etp": 2}, None),
        ({"rank": 4}, None),
    ],
)
def test_the_check_finds_them(tmp_path, settings, says):
    import re

    from skyrl_megatron.checks import PlannedRun, run_checks
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from tests.bridges.tiny_models import save_tiny

    folder = save_tiny("qwen3_moe", tmp_path / "model")
    ranks = settings.get("etp", 1)
    own = {name: value for name, value in settings.items() if name not in ("etp", "normalised")}
    keys = {"trainer.policy.model.path": str(folder)} | {f"{KEY}{name}": value for name, value in own.items()}
    normalised = settings.get("normalised", False)
    keys["trainer.policy.megatron_config.lora_config.normalize_moe_lora"] = normalised
    for degree in ("tensor_model_parallel_size", "expert_tensor_parallel_size"):
        keys[f"trainer.policy.megatron_config.{degree}"] = ranks
    keys["trainer.placement.policy_num_gpus_per_node"] = ranks
    cfg = SkyRLTrainConfig.from_cli_overrides(keys)
    with warnings.catch_warnings(action="ignore"):
        problems = run_checks(PlannedRun(cfg, Hardware(0, 1))).problems
    found = [str(each) for each in problems if "lora" in str(each)]
    if says is None:
        assert not found
    else:
        assert len(found) == 1 and re.search(says, found[0]), found
