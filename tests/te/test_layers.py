"""Every family in every layout, made of a real Transformer Engine's layers on the meta device: names and shapes are
those that loading, syncs, checkpoints and adapters expect."""

import pytest

from tests.bridges.tiny_models import OF_KNOWN_PARTS, TINY, save_tiny
from tests.runtime.test_gpu_settings import OUR_LAYERS

DENSE = {"llama", "qwen2", "qwen3"}
FAMILIES = sorted(set(TINY) - OUR_LAYERS - OF_KNOWN_PARTS)
LAYOUTS = {"single": {}, "tp2": {"tp": 2}, "ep2": {"ep": 2}, "pp2": {"pp": 2}}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """HF folders by family, with sizes that two ranks share."""
    sizes = {"num_hidden_layers": 4}
    groups = {"num_key_value_heads": 2}
    return {
        family: str(
            save_tiny(family, tmp_path_factory.mktemp(family), **sizes, **(groups if family != "deepseek_v3" else {}))
        )
        for family in FAMILIES
    }


@pytest.fixture(scope="session")
def differences(ranks, folders):
    """Layout → family → differences of any rank. Ranks are started once for each layout."""
    from tests.te.comparison import compare

    known = {}

    def of(layout):
        if layout not in known:
            taken = {family: folder for family, folder in folders.items() if layout != "ep2" or family not in DENSE}
            results = ranks(2 if LAYOUTS[layout] else 1, compare, taken, LAYOUTS[layout])
            known[layout] = {family: [line for rank in results for line in rank[family]] for family in taken}
        return known[layout]

    return of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_our_layers(differences, layout, family):
    if layout == "ep2" and family in DENSE:
        pytest.skip("no experts")
    assert not differences(layout)[family]


@pytest.mark.parametrize("family", sorted(OUR_LAYERS & set(TINY)))
def test_families_that_need_our_layers_say_so(family):
    from skyrl_megatron.runtime.model.description import describe, read_hf_model, use_transformer_engine
    from tests.bridges.tiny_models import tiny_config
    from tests.te.meta import hopper

    model = read_hf_model(tiny_config(family))
    with hopper():
        assert not use_transformer_engine(model)
    assert describe(model, False).startswith("skyrl_megatron's own (Transformer Engine does not support ")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_run_takes_transformer_engine(family, monkeypatch):
    from skyrl_megatron import device
    from skyrl_megatron.runtime.model.description import read_hf_model, use_transformer_engine
    from tests.bridges.tiny_models import tiny_config

    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert use_transformer_engine(read_hf_model(tiny_config(family)))


@pytest.mark.parametrize("tp", [1, 2])
def test_shared_prefixes_take_our_attention_and_keep_the_rest(ranks, folders, tp):
    """Of every family: names and shapes are the same, no attention of Transformer Engine is left, and tokens are
    rotated by their depth in the tree."""
    taken = {family: folder for family, folder in folders.items() if tp == 1 or family not in DENSE}
    for wrong in ranks(tp, with_our_attention, taken, tp):
        assert not wrong


def with_our_attention(folders, tp):
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from tests.te.comparison import attention_problems
    from tests.te.meta import build_te

    groups = parallel_state.initialize(ParallelConfig(tp, tp=tp), seed=0, timeout_s=400)
    wrong = []
    for family, folder in folders.items():
        theirs, ours = build_te(folder, groups), build_te(folder, groups, own_attention=True)
        assert attention_problems(theirs), "the comparison sees Transformer Engine's attention"
        wrong += [f"{family}: {line}" for line in attention_problems(ours, theirs, groups)]
    return wrong


def test_a_planted_fault_is_found(ranks, folders):
    """The down projections of latent attention taken as split at tp=2, as they are in our layers."""
    for found in ranks(2, with_split_projections, folders["deepseek_v3"]):
        assert any("load: decoder.layers.0.self_attention.linear_kv_down_proj.weight" in line for line in found), found


def with_split_projections(folder):
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.model import local_weights
    from tests.te.comparison import load_problems
    from tests.te.meta import build_te

    groups = parallel_state.initialize(ParallelConfig(2, tp=2), seed=0, timeout_s=400)
    model, usual = build_te(folder, groups), local_weights._entries
    assert not load_problems(model, folder, groups)
    local_weights._entries = lambda model: model.hf.plan.by_name
    try:
        return load_problems(model, folder, groups)
    finally:
        local_weights._entries = usual
