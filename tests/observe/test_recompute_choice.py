"""``recompute_granularity=auto``: as few layers as GPU memory allows, by the budget that ``--check`` prints."""

import json

import pytest

from tests.support.released_models import QWEN3_30B_A3B

pytestmark = pytest.mark.slow

K = "trainer.policy.megatron_config.transformer_config_kwargs."
SIXTEEN = {
    "trainer.placement.policy_num_nodes": 2,
    "trainer.placement.policy_num_gpus_per_node": 8,
    "trainer.policy.megatron_config.expert_model_parallel_size": 8,
    "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
    "trainer.max_tokens_per_microbatch": 16384,
    "generator.inference_engine.num_engines": 8,
    "generator.inference_engine.tensor_parallel_size": 2,
}
GB = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return folder


def chosen(folder, gpu, **keys):
    """The configuration after the check of memory on two nodes of eight GPUs, and what the policy recomputes."""
    from skyrl_megatron.checks import PlannedRun
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.resolve import fit_to_hardware
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.memory_phases import RoleModel
    from skyrl_megatron_observe.estimate.memory_recompute import recomputation
    from skyrl_megatron_observe.preflight.machine_checks import memory

    cfg = SkyRLTrainConfig.from_cli_overrides({"trainer.policy.model.path": str(folder)} | SIXTEEN | keys)
    hardware = Hardware(8, 2, gpu, 2000 * GB)
    fit_to_hardware(cfg, hardware)
    list(memory(PlannedRun(cfg, hardware)))
    return cfg, recomputation(RoleModel.of(cfg, "policy", parameter_tables(cfg)["policy"]))


def kwargs(cfg, role="policy"):
    megatron = getattr(cfg.trainer, role).megatron_config
    return {name.removeprefix("recompute_"): value for name, value in megatron.transformer_config_kwargs.items()}


def test_no_more_layers_than_memory_needs(folder):
    """Of all layers, as it was, to none; and one layer less would not leave the room."""
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.memory_recompute import _fits, _with

    counts = []
    for gpu in (60 * GB, 90 * GB, 100 * GB, 400 * GB):
        cfg, said = chosen(folder, gpu)
        given, tables = kwargs(cfg), parameter_tables(cfg)
        counts.append(0 if said == "recomputation: none" else int(said.split()[1]))
        if 0 < counts[-1] < 48:
            assert given["granularity"] == "full" and given["method"] == "block"
            assert given["num_layers"] == counts[-1] and f"up to {counts[-1] / 144:.0%} more FLOPs" in said
            assert _fits(cfg, tables, gpu) and not _fits(_with(cfg, "policy", counts[-1] - 1, 48), tables, gpu)
    assert counts == sorted(counts, reverse=True) and counts[0] == 48 and counts[-1] == 0, counts
    assert 0 < counts[2] < counts[1] <= 48, counts
    assert kwargs(cfg)["granularity"] is kwargs(cfg)["method"] is kwargs(cfg)["num_layers"] is None


def test_what_the_user_sets_stays(folder):
    for granularity, said in (("full", "48 of 48 layers, up to 33%"), ("selective", "core_attn of each layer")):
        cfg, found = chosen(folder, 400 * GB, **{f"{K}recompute_granularity": granularity})
        assert kwargs(cfg)["granularity"] == granularity and said in found
    _, found = chosen(folder, 400 * GB, **{"trainer.gradient_checkpointing": False})
    assert found == "recomputation: none"


def test_a_critic_takes_the_policys_choice(folder):
    alone, _ = chosen(folder, 100 * GB)
    gae = {"trainer.algorithm.advantage_estimator": "gae", "trainer.critic.model.path": str(folder)}
    cfg, _ = chosen(folder, 100 * GB, **gae)
    assert kwargs(cfg, "critic") == kwargs(cfg)
    assert kwargs(cfg)["num_layers"] >= kwargs(alone)["num_layers"], "both must fit"


def test_without_a_size_all_layers_are_recomputed(folder):
    """By the ranks, too, of a script that makes no checks."""
    from skyrl_megatron.runtime.engine_settings import transformer_kwargs

    cfg, found = chosen(folder, None)
    assert kwargs(cfg)["granularity"] == "auto" and "48 of 48 layers" in found
    fields = transformer_kwargs(cfg, "policy")
    assert (fields["recompute_granularity"], fields["recompute_method"], fields["recompute_num_layers"]) == (
        "full", "uniform", 1,
    )  # fmt: skip
