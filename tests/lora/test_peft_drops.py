"""What PEFT leaves out of exported adapters, family by family as it is today: the export says so, and the merged model
beside it has everything. A failure here after an update of PEFT or transformers may be good news: the tables of
``bridges/peft.py`` then shrink."""

import re

import pytest

from tests.bridges.tiny_models import TINY
from tests.lora import reference
from tests.lora.test_families import OWN_SIZES
from tests.runtime import parity

pytestmark = pytest.mark.slow
FAMILIES = {  # containers of the projections that are lost, in transformers' names
    "deepseek_v3": {"mlp", "mlp.shared_experts"},
    "deepseek_v32": {"mlp", "mlp.shared_experts"},
    "dots1": {"mlp", "mlp.shared_experts"},
    "ernie4_5_moe": {"mlp", "mlp.shared_experts"},
    "glm4_moe": {"mlp", "mlp.shared_experts"},
    "glm4_moe_lite": {"mlp", "mlp.shared_experts"},
    "glm_moe_dsa": {"mlp", "mlp.shared_experts"},
    "hy_v3": {"mlp.experts"},
    "mimo_v2_flash": {"mlp.experts"},
    "olmoe": set(),
    "qwen2_moe": {"mlp.experts"},
    "qwen3_5_moe_text": {"mlp.experts"},
    "qwen3_moe": {"mlp"},
    "qwen3_next": {"mlp.shared_expert"},
    "solar_open": {"mlp.shared_experts"},
}
SIZES = {"qwen3_moe": dict(mlp_only_layers=[0])}
ALWAYS = {"glm4_moe", "qwen2_moe"}
"""One family of each table; the others are in the full matrix."""


def export_body(base, factors, root, **settings):
    """Export on one rank: (largest error of our logits against the merged folder's, warnings). ``settings`` are those
    of the adapter, without dropout for the logits."""
    import warnings

    import torch

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.hf_weights import load_hf, save_hf
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron_lora.attach import attach
    from skyrl_megatron_lora.folder import fill_factors, save_adapter
    from skyrl_megatron_lora.layers import AdapterSettings
    from skyrl_megatron_lora.targets import select

    groups = parallel_state.initialize(ParallelConfig(1), timeout_s=120)
    model = build_model(base, groups, dtype=torch.float32)
    load_hf(model, base, groups)
    settings = AdapterSettings(
        **dict(rank=reference.RANK, alpha=reference.ALPHA, dropout=0.0, init="kaiming") | settings
    )
    adapters = attach(model, groups, select(model.hf.plan, "all-linear"), settings)
    fill_factors(adapters, groups, reference.finder(factors))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_adapter(adapters, groups, root / "adapter")
    save_hf(model, groups, root / "merged", of=adapters.merged)
    if settings.dropout:
        return None, [str(each.message) for each in caught]
    with torch.no_grad():
        logits = parity.logits_of(transformers_model(root / "merged", "float64"), parity.data()).float()
    return parity.forward_backward(model, groups, logits, False, None), [str(each.message) for each in caught]


def transformers_model(folder, dtype="float32"):
    import torch
    from transformers import AutoModelForCausalLM

    eager = dict(attn_implementation="eager", experts_implementation="eager")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **eager).eval()


def container(name):
    """``mlp.experts`` of ``model.layers.3.mlp.experts.*.gate_proj`` and of ``….mlp.experts.gate_up_proj``."""
    parent = re.sub(r"\.\*$", "", name.removesuffix(".weight").rpartition(".")[0])
    return re.sub(r"^.*\.layers\.(\d+|\*)\.", "", parent)


def changed(model, base):
    """The parameters of ``model`` that are not those of ``base``."""
    return {name for name, tensor in base.items() if (model[name] - tensor).abs().max() > 1e-5}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full_matrix) for name in FAMILIES]
)
def test_an_export_says_what_peft_drops(ranks, tmp_path, family):
    import torch
    from peft import PeftModel

    from bridges.peft import dropped_by_peft
    from skyrl_megatron.runtime.model.description import read_hf_model
    from tests.bridges.tiny_models import save_tiny

    groups = {} if "kv_lora_rank" in TINY[family] else dict(num_key_value_heads=2)
    sizes = dict(num_hidden_layers=4, initializer_range=0.2) | groups | SIZES.get(family, {})
    base = save_tiny(family, tmp_path / "base", **sizes | OWN_SIZES.get(family, {}))
    factors = reference.start_factors(read_hf_model(base).plan, separate=False)
    [(error, warned)] = ranks(1, export_body, base, factors, tmp_path)
    assert error <= parity.LOGITS_TOLERANCE, "the merged export computes what our model does"

    before = transformers_model(base).state_dict()
    merged = transformers_model(tmp_path / "merged")
    peft = PeftModel.from_pretrained(transformers_model(base), str(tmp_path / "adapter"))
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        gap = float((peft(ids).logits.log_softmax(-1) - merged(ids).logits.log_softmax(-1)).abs().max())
    lost = changed(merged.state_dict(), before) - changed(peft.merge_and_unload().state_dict(), before)
    assert {container(name) for name in lost} == FAMILIES[family]

    dropped = dropped_by_peft(family, {name[:-2] for name in factors})
    assert {container(name) for name in dropped} == FAMILIES[family]
    if FAMILIES[family]:
        assert gap > 0.1 and len(warned) == 1 and all(name in warned[0] for name in dropped), (gap, warned)
        assert "python -m bridges merge" in warned[0]
    else:
        assert gap < 1e-3 and not warned


@pytest.mark.parametrize("family", ["olmoe", pytest.param("mixtral", marks=pytest.mark.full_matrix)])
def test_peft_scales_experts_as_the_run_did(ranks, tmp_path, family):
    """PEFT joins gate and up of an expert into one pair of twice the rank, and opens no adapter of experts with
    dropout: an export of a run with both settings has the scale as a plain alpha, and no dropout."""
    from peft import PeftModel

    from skyrl_megatron.runtime.model.description import read_hf_model
    from tests.bridges.tiny_models import save_tiny

    base = save_tiny(family, tmp_path / "base", num_hidden_layers=2, num_key_value_heads=2, initializer_range=0.2)
    factors = reference.start_factors(read_hf_model(base).plan, separate=False)
    ranks(1, export_body, base, factors, tmp_path, rank_stabilised=True, dropout=0.25)
    before, merged = (transformers_model(tmp_path / name).state_dict() for name in ("base", "merged"))
    peft = PeftModel.from_pretrained(transformers_model(base), str(tmp_path / "adapter")).merge_and_unload()
    assert any("experts" in name for name in changed(merged, before))
    for name, tensor in peft.state_dict().items():
        assert (merged[name] - tensor).abs().max() < 1e-6, name


def test_the_tables_are_those_of_peft():
    """Of every family with gate, up and down projections of experts; what is in no table, PEFT opens whole."""
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING

    from bridges.families import SUPPORTED
    from bridges.peft import NOT_TAKEN_FOR_EXPERTS, TAKEN_FOR_EXPERTS

    mapped = {name: _MOE_TARGET_MODULE_MAPPING.get(_MODEL_TO_CONVERSION_PATTERN.get(name), {}) for name in SUPPORTED}
    assert {name for name, names in mapped.items() if "gate_proj" in names} == TAKEN_FOR_EXPERTS
    assert {name for name, names in mapped.items() if "w1" in names} == {"mixtral", "minimax_m2"}
    unmapped = {name for name, names in mapped.items() if not names}
    assert unmapped - NOT_TAKEN_FOR_EXPERTS == {"llama", "qwen2", "qwen3", "gpt_oss"}, "dense, or of stacked experts"
    assert FAMILIES.keys() == TAKEN_FOR_EXPERTS | NOT_TAKEN_FOR_EXPERTS
