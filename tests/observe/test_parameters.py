"""Parameters and bytes per rank: the arithmetic of ``--check`` against transformers and against built models."""

import pytest

from tests.bridges.tiny_models import LATENT_FAMILIES, OF_KNOWN_PARTS, TINY, tiny_config
from tests.support.rank_pool import end_layout

QWEN3_30B_A3B = dict(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    intermediate_size=6144,
    vocab_size=151936,
    tie_word_embeddings=False,
)
PUBLISHED = 30_532_122_624

# Four ranks each; dp follows. Two KV groups, so that tp2 fits every family.
LAYOUTS = {
    "ep2": dict(ep=2),
    "tp2·etp2": dict(tp=2, etp=2),
    "tp2·cp2·ep4": dict(tp=2, cp=2, ep=4),
    "pp2·vpp2": dict(pp=2, vpp=2),
}
MORE = {
    "dp4": {},
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "pp4": dict(pp=4),
    "cp2": dict(cp=2),
    "tp2·ep2": dict(tp=2, ep=2),
    "tp2·pp2": dict(tp=2, pp=2),
    "tp2·etp2·ep2": dict(tp=2, etp=2, ep=2),
    "pp2·cp2·ep2": dict(pp=2, cp=2, ep=2),
    "pp2 uneven": dict(pp=2, num_layers_in_first_pipeline_stage=1),
    "pp2·vpp2·ep2": dict(pp=2, vpp=2, ep=2),
}


def config_of(family):
    heads = {} if family in LATENT_FAMILIES else {"num_key_value_heads": 2}
    return tiny_config(family, num_hidden_layers=4, **heads)


def on_meta(config):
    """Parameters of transformers' model that learn, tied ones counted once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("family", TINY)
def test_totals_are_those_of_transformers(family):
    from bridges.plan import Plan
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable

    config = config_of(family)
    assert ParameterTable(Plan.of(config)).total() == on_meta(config)


def test_published_total_of_qwen3_30b_a3b():
    from bridges.plan import Plan
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable

    config = tiny_config("qwen3_moe", **QWEN3_30B_A3B)
    assert on_meta(config) == PUBLISHED
    table = ParameterTable(Plan.of(config))
    assert table.total() == PUBLISHED
    assert round(table.active(8) / 1e9, 1) == 3.4  # "A3B" counts them without the embedding: 3.0


def built_and_predicted(layouts, configs):
    """On each rank: (layout, family, head) → (dense, expert) parameters built on the meta device, and predicted."""
    import torch

    from bridges.plan import Plan
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable

    found = {}
    for name, degrees in layouts.items():
        parallel = ParallelConfig(world_size=4, **degrees)
        groups = parallel_state.initialize(parallel)
        for (family, head), config in configs.items():
            if (parallel.ep > 1 and family in DENSE) or (parallel.etp > 1 and family in (*DENSE, "gpt_oss")):
                continue  # no experts to spread; biased experts cannot be cut
            model = build_model(config, groups, head=head, device=torch.device("meta"))
            sizes = {True: 0, False: 0}
            for chunk in model.chunks:
                for parameter in chunk.parameters():
                    sizes[getattr(parameter, "allreduce", True)] += parameter.numel()
            count = ParameterTable(Plan.of(config)).stage(parallel, groups.pp.rank(), value_head=head == "value")
            found[name, family, head] = ((sizes[True], sizes[False]), (count.dense, count.expert))
        end_layout()
    return found


DENSE = ("llama", "qwen2", "qwen3")


def check_all(ranks, layouts):
    configs = {(family, "lm"): config_of(family) for family in TINY if family not in OF_KNOWN_PARTS}
    configs |= {("qwen2", "value"): config_of("qwen2"), ("qwen3_moe", "value"): config_of("qwen3_moe")}
    for rank, found in enumerate(ranks(4, built_and_predicted, layouts, configs, timeout_s=400)):
        wrong = {key: pair for key, pair in found.items() if pair[0] != pair[1]}
        assert not wrong, f"rank {rank}: (built, predicted) {wrong}"
        assert len(found) >= 7 * len(layouts)


def test_parameters_per_rank_are_those_of_built_models(ranks):
    check_all(ranks, LAYOUTS)


@pytest.mark.full_matrix
@pytest.mark.parametrize("name", MORE)
def test_parameters_per_rank_in_more_layouts(ranks, name):
    check_all(ranks, {name: MORE[name]})


@pytest.mark.process
def test_ranks_stand_where_megatron_puts_them():
    from megatron.core.parallel_state import RankGenerator

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.config.roles import rank_position

    for degrees in (dict(tp=2, cp=2, ep=4), dict(tp=4, pp=2, ep=2, etp=2), dict(pp=4, ep=4), dict(cp=4, tp=2, etp=2)):
        parallel = ParallelConfig(world_size=32, **degrees)
        order = "tp-cp-ep-dp-pp"
        dense = RankGenerator(tp=parallel.tp, ep=1, dp=parallel.dp, pp=parallel.pp, cp=parallel.cp, order=order)
        experts = RankGenerator(tp=parallel.etp, ep=parallel.ep, dp=parallel.edp, pp=parallel.pp, cp=1, order=order)
        for generator, axis, name in (
            *((dense, axis, axis) for axis in ("tp", "cp", "dp", "pp")),
            *((experts, axis, name) for axis, name in (("tp", "etp"), ("ep", "ep"), ("dp", "edp"))),
        ):
            for group in generator.get_ranks(axis):
                for position, rank in enumerate(group):
                    assert getattr(rank_position(parallel, rank), name) == position, (degrees, name, rank)
