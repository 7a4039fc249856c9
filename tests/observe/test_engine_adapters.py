"""Adapters that travel alone and that engines cannot hold: refused with what to do, before anything starts."""

import json

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from tests.bridges.tiny_models import tiny_config

LORA = "trainer.policy.model.lora."


def problems_of(tmp_path, model_type, *args, rank=8):
    from bridges.plan import Plan
    from skyrl_megatron_lora.targets import configured_selection
    from skyrl_megatron_observe.preflight.adapter_checks import engine_adapters

    (tmp_path / "config.json").write_text(json.dumps(tiny_config(model_type)))
    cfg = SkyRLTrainConfig.from_cli_overrides(
        [f"trainer.policy.model.path={tmp_path}", f"{LORA}rank={rank}", f"{LORA}sync_mode=memory", *args]
    )
    plan = Plan.of(tiny_config(model_type))
    return list(engine_adapters(cfg, plan, configured_selection(cfg, plan), cfg.trainer.policy.model.lora.rank))


@pytest.mark.parametrize(
    "model_type, args, rank, key, fix",
    [
        ("qwen3_moe", [], 1024, f"{LORA}rank", "up to 512"),
        ("qwen3_moe", [f"{LORA}train_unembed=true"], 8, f"{LORA}target_modules", "exclude lm_head"),
        (
            "qwen3_moe",
            [f"{LORA}target_modules=embed_tokens,linear_qkv"],
            8,
            f"{LORA}target_modules",
            "exclude embed_tokens",
        ),
        ("qwen3_moe", [f"{LORA}exclude_modules=experts.1"], 8, f"{LORA}exclude_modules", "experts have adapters"),
        ("qwen3_moe", [f"{LORA}target_modules=experts.1"], 8, f"{LORA}target_modules", "experts have adapters"),
        ("deepseek_v3", [], 8, f"{LORA}target_modules", "exclude kv_b_proj"),
        (
            "qwen3_moe",
            [
                "generator.inference_engine.fully_sharded_loras=true",
                "generator.inference_engine.tensor_parallel_size=2",
            ],
            7,
            "generator.inference_engine.fully_sharded_loras",
            "set it to false",
        ),
    ],
)
def test_what_engines_cannot_hold_is_refused(tmp_path, model_type, args, rank, key, fix):
    (problem,) = problems_of(tmp_path, model_type, *args, rank=rank)
    assert problem.key == key and fix in problem.fix
    assert "sync_mode=merged" in problem.fix or "set it to false" in problem.fix


def test_what_engines_can_hold_is_not(tmp_path):
    assert problems_of(tmp_path, "qwen3_moe") == []
    assert problems_of(tmp_path, "deepseek_v3", f"{LORA}exclude_modules=kv_b_proj") == []


def test_engines_are_started_for_the_adapter(tmp_path):
    from bridges.plan import Plan
    from skyrl_megatron_lora.tensors import adapter_slots, configured_pairs

    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3_moe")))
    arguments = [f"trainer.policy.model.path={tmp_path}", f"{LORA}rank=24"]
    assert configured_pairs(SkyRLTrainConfig.from_cli_overrides(arguments)) is None, "weights travel, merged"
    pairs = configured_pairs(SkyRLTrainConfig.from_cli_overrides([*arguments, f"{LORA}sync_mode=memory"]))
    slots = adapter_slots(pairs)
    assert slots.rank == 32 and slots.slots == 2 and slots.names == ("",)
    assert slots.targets == ("experts", "k_proj", "o_proj", "q_proj", "v_proj")
    experts = {entry.expert for entry in Plan.of(tiny_config("qwen3_moe")).entries} - {None}
    assert pairs[""]["model.layers.0.mlp.experts.up_proj"].experts == len(experts)


def test_ranks_are_those_that_vllm_declares():
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    from skyrl_megatron_lora.tensors import RANKS

    text = (Path(find_spec("vllm").origin).parent / "config/lora.py").read_text()
    [declared] = [line for line in text.splitlines() if line.startswith("MaxLoRARanks = ")]
    assert tuple(ast.literal_eval(declared.partition("Literal")[2])) == RANKS


def test_names_are_read_as_they_are_written():
    from skyrl_megatron_lora.tensors import FactorName

    name = FactorName(("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"), "A")
    assert str(name) == "model.layers.0.self_attn.q_proj+k_proj.lora_A"
    assert FactorName.parse(str(name)) == name


@pytest.mark.parametrize(
    "sent, message",
    [
        ({"m.q.lora_A": (4, 8)}, "1 factors are missing: m.q.lora_B"),
        ({"m.q.lora_A": (4, 8), "m.q.lora_B": (6, 3)}, r"m.q.lora_B is \[6, 3\], m.q needs \[6, 4\]"),
        ({"m.q.lora_A": (4, 8), "m.q.lora_B": (6, 4), "m.k.lora_A": (4, 8)}, "m.k, which this run does not adapt"),
        ({"m.q.lora_A": (4, 8), "m.q.lora_B": (6, 4), "m.q.weight": (6, 8)}, "m.q.weight is not a tensor of an"),
    ],
)
def test_an_adapter_that_is_not_whole_is_never_sent(sent, message):
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.buckets import TensorMeta
    from skyrl_megatron_lora.tensors import PairShape, check_adapters

    expected = {"m.q": PairShape(4, rows=6, columns=8)}
    with pytest.raises(WeightSyncError, match=message):
        check_adapters([[TensorMeta(name, "float32", shape) for name, shape in sent.items()]], {"": expected})


def test_versions_serve_until_nobody_uses_them():
    from skyrl_megatron.inference.vllm.adapter_versions import AdapterVersions

    held = AdapterVersions(slots=2)

    def update(version):
        aborted = held.free_slots()
        held.add(version)
        held.commit()
        return aborted

    with held.use("before all") as nothing:
        assert nothing is None
    update("1")
    with held.use("long") as one:
        assert update("2") == [] and one.version == "1" and held.numbers() == [1, 2]
        held.free_slots()
        held.add("bad")
        assert held.serving[""].version == "2", "a candidate does not serve"
        assert one.evicted
        held.leave()
        assert held.serving[""].version == "2" and held.numbers() == [2]
    assert update("3") == [] and held.numbers() == [2, 4]


def test_requests_of_a_version_that_leaves_are_named():
    from skyrl_megatron.inference.vllm.adapter_versions import AdapterVersions

    held = AdapterVersions(slots=2)
    for version in "12":
        held.free_slots()
        held.add(version)
        held.commit()
        if version == "1":
            using = held.use("request 7")
            using.__enter__()
    assert held.free_slots() == ["request 7"]


def test_several_adapters_switch_together():
    from skyrl_megatron.errors import RequestError
    from skyrl_megatron.inference.vllm.adapter_versions import AdapterVersions

    held = AdapterVersions(slots=4, names=("math", "code"))
    with held.use("before all", "code") as nothing:
        assert nothing is None
    for number, names in enumerate((("math", "code"), ("code",))):
        held.free_slots(2)
        for name in names:
            held.add(str(number), name)
        with held.use("asks", "code") as serving:
            assert (serving and serving.name) == (None if number == 0 else "code@0"), "a candidate does not serve"
        held.commit()
    with held.use("a", "math") as math, held.use("b", "code") as code:
        assert (math.name, code.name) == ("math@0", "code@1")
    unknown = "'poetry' is unknown: use math, code"
    for adapter, message in (("", "names no adapter: use math, code"), ("poetry", unknown)):
        with pytest.raises(RequestError, match=message), held.use("c", adapter):
            pass


def test_room_is_made_for_all_of_an_update():
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.inference.vllm.adapter_versions import AdapterVersions

    held = AdapterVersions(slots=4, names=("math", "code"))

    def update(version):
        aborted = held.free_slots(2)
        for name in ("math", "code"):
            held.add(version, name)
        held.commit()
        return aborted

    update("1")
    with held.use("long", "math") as one, held.use("longer", "code"):
        assert update("2") == [] and update("3") == ["long", "longer"] and one.evicted
    with held.use("", "code"):
        update("4")
        with pytest.raises(WeightSyncError, match=r"too few of 4 adapter slots .* for 2 more; .*code@3 by 1 requests"):
            update("5")


def test_engines_are_started_for_all_adapters(tmp_path):
    from skyrl_megatron_lora.tensors import adapter_slots, configured_pairs

    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3_moe")))
    own = "{math: {train_mlp: false}, code: {rank: 40, train_attn: false}}"
    arguments = [f"trainer.policy.model.path={tmp_path}", f"{LORA}rank=8", f"{LORA}sync_mode=memory"]
    slots = adapter_slots(configured_pairs(SkyRLTrainConfig.from_cli_overrides([*arguments, f"{LORA}adapters={own}"])))
    assert (slots.rank, slots.slots, slots.names) == (64, 4, ("math", "code"))
    assert slots.targets == ("experts", "k_proj", "o_proj", "q_proj", "v_proj")


@pytest.mark.parametrize("names, refused", [("{math,code}", True), ("{math}", False)])
def test_a_generator_that_knows_of_no_adapters_is_refused(names, refused):
    from skyrl_megatron.checks import PlannedRun
    from skyrl_megatron.config.hardware import local_hardware
    from skyrl_megatron.plugins import GENERATORS
    from skyrl_megatron_observe.preflight.option_checks import features

    class Older:
        def __init__(self, generator_cfg, skyrl_gym_cfg, inference_engine_client, tokenizer, *, seed, nonfinite):
            """As :class:`SkyRLGymGenerator` without adapters."""

    GENERATORS.register("older")(Older)
    try:
        arguments = ["generator.name=older", f"{LORA}rank=4", f"{LORA}sync_mode=memory", f"{LORA}adapters={names}"]
        found = list(features(PlannedRun(SkyRLTrainConfig.from_cli_overrides(arguments), local_hardware())))
        assert [problem.key for problem in found] == ["generator.name"] * refused
    finally:
        del GENERATORS._classes["older"]
