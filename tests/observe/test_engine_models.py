"""Values of ``config.json`` that vLLM does not honour: the table against the sources, and what ``--check`` says."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from tests.support import released_models
from tests.support.tiny_models import TINY

RELEASED = {
    name: config for name in ("DEEPSEEK_V3", "GLM_4_5_AIR", "GPT_OSS_120B", "KIMI_K2", "QWEN3_30B_A3B")
    if (config := getattr(released_models, name))
} | released_models.RELEASED_LATER  # fmt: skip


def tiny(family, **changes):
    """``config.json`` of the tiny model as transformers writes it."""
    from transformers import AutoConfig

    from tests.support.tiny_models import _SIZES

    return json.loads(AutoConfig.for_model(family, **{**_SIZES, **TINY[family], **changes}).to_json_string())


def faults(written, changed=None):
    from bridges.families import get_family
    from skyrl_megatron_observe.preflight.engine_models import engine_model_faults

    family = get_family(written["model_type"])
    return list(engine_model_faults(family.model_type, family.config(written), written | (changed or {})))


def test_released_models_have_the_values_of_the_engine():
    for name, config in RELEASED.items():
        assert faults(config) == [], name
    for family in TINY:
        assert faults(tiny(family)) == [], family


WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
IGNORED = {
    "clamp of gpt-oss": ("gpt_oss", {"swiglu_limit": 2.0}, "swiglu_limit=2.0"),
    "windows of gpt-oss": ("gpt_oss", {"layer_types": WINDOWS}, "layer_types"),
    "epsilon of gpt-oss": ("gpt_oss", {"rms_norm_eps": 1e-2}, "rms_norm_eps=0.01"),
    "normalised weights of OLMoE": ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    "epsilon of OLMoE": ("olmoe", {"rms_norm_eps": 1e-2}, "rms_norm_eps=0.01"),
    "tied head": ("glm4_moe", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    "scaling of MiniMax": ("minimax_m2", {"routed_scaling_factor": 2.0}, "routed_scaling_factor=2.0"),
    "windows of some layers": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": WINDOWS, "max_window_layers": 0},
        "layers without a window",
    ),
    "dense layers": (
        "glm4_moe",
        {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "first_k_dense_replace": 1},
        "first_k_dense_replace=1",
    ),
    "order of rotary rows": ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
    "head size": ("qwen2", {"head_dim": 64}, "head_dim=64"),
    "size of experts": ("hy_v3", {"expert_hidden_dim": 32}, "expert_hidden_dim=32"),
    "another score": ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
}


@pytest.mark.parametrize("case", IGNORED)
def test_a_value_that_the_engine_ignores_is_named(case):
    family, changes, words = IGNORED[case]
    (fault,) = faults(tiny(family, **changes))
    assert words in fault


MIMO = {  # as released, but
    "rotary base of windows": ({"swa_rope_theta": 5e6}, "swa_rope_theta=5000000.0, but the trainer computes"),
    "rotary base": ({"rope_theta": 1e6}, "trainer computes rope_theta=5000000.0"),
    "windows by layer": ({"hybrid_layer_pattern": [0] * 48}, "hybrid_layer_pattern=[0, 1, 1, 1, 1, 0"),
    "groups of windows": ({"swa_num_key_value_heads": 4}, "trainer computes swa_num_key_value_heads=8"),
    "no sinks": ({"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias=True"),
    "epsilon": ({"layernorm_epsilon": 1e-6}, "trainer computes layernorm_epsilon=1e-05"),
}


@pytest.mark.parametrize("case", MIMO)
def test_a_value_of_mimo_that_the_trainer_does_not_read_is_named(case):
    """transformers computes with its own defaults or ``rope_parameters`` where vLLM reads a key of the publisher."""
    changes, words = MIMO[case]
    (fault,) = faults(RELEASED["MiMo-V2-Flash"] | changes)
    assert words in fault


def test_mimo_without_a_share_of_rotary_columns_has_the_usual_one():
    rotary = {"rope_type": "default", "rope_theta": 5e6}
    parameters = {"full_attention": rotary, "sliding_attention": rotary | {"rope_theta": 1e4}}
    assert faults(RELEASED["MiMo-V2-Flash"] | {"rope_parameters": parameters}) == []


def test_another_window_of_engines_alone_is_named():
    (fault,) = faults(RELEASED["MiMo-V2-Flash"], {"sliding_window_size": 64})
    assert "sliding_window_size=64, but the trainer computes sliding_window_size=128" in fault


def test_what_mimo_lacks_when_saved_again_is_written_out():
    released = RELEASED["MiMo-V2-Flash"]
    lost = ("add_swa_attention_sink_bias", "rope_theta", "swa_rope_theta", "sliding_window_size")
    (fault,) = faults({key: value for key, value in released.items() if key not in lost})
    assert "add 'rope_theta': 5000000.0, 'add_swa_attention_sink_bias': True, 'swa_rope_theta': 10000.0 to it" in fault
    assert fault.endswith("take sliding_window_size from the released folder")


MISSING = {
    "deepseek_v3": (["topk_method", "scoring_func"], "'topk_method': 'noaux_tc', 'scoring_func': 'sigmoid'"),
    "hy_v3": (["expert_hidden_dim", "route_norm"], "'expert_hidden_dim': 64"),
    "minimax_m2": (["rotary_dim", "use_routing_bias"], "'use_routing_bias': True"),
    "glm4_moe_lite": (["first_k_dense_replace"], "'first_k_dense_replace': 1"),
}


@pytest.mark.parametrize("family", MISSING)
def test_keys_that_transformers_does_not_write_are_asked_for(family):
    names, words = MISSING[family]
    written = tiny(family)
    (fault,) = faults({key: value for key, value in written.items() if key not in names})
    assert all(name in fault for name in names) and words in fault
    assert faults({key: value for key, value in written.items() if key not in names}, written) == []  # hf_overrides


ONE_VALUE = frozenset(
    """
    attention_bias attention_dropout clip_qkv hidden_act mlp_bias moe_norm_min n_group norm_topk_prob
    num_experts_per_tok num_key_value_heads router_jitter_noise scoring_func shared_intermediate_size swiglu_alpha
    topk_group topk_method use_qk_norm use_sliding_window
    """.split()
)
"""The family allows the value that vLLM has, or vLLM reads it in another file."""
OF_LAYERS = frozenset({"layer_types", "mlp_layer_types", "moe_layer_freq", "sliding_window", "head_dim"})
"""Checked by a function, for the families that have them."""
OTHER_NAMES = {
    "glm4_moe_lite": {"moe_intermediate_size", "rope_parameters"},  # in the files of other families
    "hy_v3": {"moe_intermediate_size"},
    "mimo_v2_flash": {"rms_norm_eps", "rope_parameters", "routed_scaling_factor"},
}


class Recorded:
    """A configuration that notes which keys are read."""

    def __init__(self, config):
        self.__dict__.update(config=config, names=set())

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.config, name)


def read_by_vllm(module, seen):
    """Names that a model file of vLLM, and those that it builds on, read from a configuration."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0], "model_executor", "models")
    file = folder / f"{module}.py"
    if file in seen or not file.is_file():
        return set()
    seen.add(file)
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            named = getattr(owner, "id", None) or getattr(owner, "attr", "")
            names |= {node.attr} if named.endswith("config") else set()
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            names |= {each.value for each in node.args[1:2] if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and node.module not in (None, "interfaces", "utils"):
            names |= read_by_vllm(node.module, seen)
    return names


def architectures():
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0], "model_executor", "models")
    tables = [node for node in ast.walk(ast.parse((folder / "registry.py").read_text())) if isinstance(node, ast.Dict)]
    return {
        key.value: value.elts[0].value
        for table in tables
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and isinstance(value.elts[0], ast.Constant)
    }


def test_every_key_that_the_trainer_follows_is_read_by_the_engine_or_in_the_table():
    """A new version of vLLM, or a new key of a family, needs a look: does the engine compute with it?"""
    from bridges.families import SUPPORTED, get_family
    from skyrl_megatron_observe.preflight.engine_models import FIXED
    from tests.bridges.tiny_models import tiny_config

    modules, unknown = architectures(), {}
    for name in SUPPORTED:
        family = get_family(name)
        module = modules.get(family.architecture)
        if module is None or "." in module:  # no engine, or engines on GPUs only with a folder of their own
            continue
        config = Recorded(family.config(tiny_config(name)))
        family.read_shape(config), family.read_megatron(config)
        handled = ONE_VALUE | OF_LAYERS | set(FIXED.get(name, ())) | OTHER_NAMES.get(name, set()) | {"model_type"}
        if left := config.names - read_by_vllm(module, set()) - handled:
            unknown[name] = sorted(left)
    assert unknown == {}
