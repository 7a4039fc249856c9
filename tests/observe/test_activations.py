"""Activations of the memory budget: what autograd really keeps, and what training and scoring really allocate."""

import pytest

from tests.bridges.tiny_models import LATENT_FAMILIES, OF_KNOWN_PARTS, TINY, save_tiny, tiny_config
from tests.support.rank_pool import end_layout

M = "trainer.policy.megatron_config."
TOKENS = 256
# Wide enough that tensors of a few bytes a token, which the budget leaves out, do not count.
WIDE = dict(
    hidden_size=256,
    intermediate_size=384,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=192,
    num_attention_heads=8,
    num_hidden_layers=2,
)
GROUPED = dict(head_dim=64, num_key_value_heads=4)
LATENT = dict(
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_rope_head_dim=32,
    qk_nope_head_dim=32,
    v_head_dim=48,
    num_key_value_heads=8,
)
FAMILIES = [family for family in TINY if family not in OF_KNOWN_PARTS | {"gpt_oss"}]  # whose scores all exist
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTED = {
    "each layer": FULL,
    "two layers": FULL | {"recompute_num_layers": 2},
    "first layer": FULL | {"recompute_method": "block"},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "shared_experts": {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
}


def wide_config(family):
    return tiny_config(family, **WIDE, **(LATENT if family in LATENT_FAMILIES else GROUPED))


def kept_and_predicted(config, dtype, recompute, layout, lora=None):
    """Bytes of the storages that autograd keeps of a forward pass, parameters left out; and predicted ones.

    ``lora``: settings of adapters, which hang on the model then.
    """
    import torch
    import torch.distributed as dist

    from bridges.plan import Plan
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.adapters import attach_adapters
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron.runtime.packed_inputs import pack
    from skyrl_megatron.types import PaddedBatch
    from skyrl_megatron_observe.estimate.memory_activations import (
        Kernels,
        LayerActivations,
        Recompute,
        activations_in_flight,
    )
    from skyrl_megatron_observe.estimate.memory_parameters import AdapterTable, ParameterTable

    parallel = ParallelConfig(dist.get_world_size(), **layout)
    groups = parallel_state.initialize(parallel)
    model = build_model(config, groups, dtype=getattr(torch, dtype), transformer_config_kwargs=recompute)
    table, adapters = ParameterTable(Plan.of(config)), None
    if lora:
        cfg = SkyRLTrainConfig.from_cli_overrides(lora)
        attach_adapters(cfg, model, groups, None)
        adapters = AdapterTable.of(cfg, table.plan, table.top_k)
    chunk, generator = model.chunks[0], torch.Generator().manual_seed(0)
    for parameter in chunk.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    ours = {tensor.untyped_storage().data_ptr() for tensor in [*chunk.parameters(), *chunk.buffers()]}
    tokens = torch.randint(config["vocab_size"], (1, TOKENS), generator=generator)
    ones = torch.ones(1, 1)
    batch = PaddedBatch(tokens, torch.ones(1, TOKENS, dtype=torch.bool), ones, ones)
    packed = pack(batch, groups, torch.device("cpu"))
    kept = {}

    def keep(tensor):
        if tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() not in ours:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no other takes its place
        return tensor

    chunk.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = chunk(**packed.model_arguments())
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert output.requires_grad
    kernels = Kernels(4 if dtype == "float32" else 2, fused=False, on_cpu=True)
    layers = LayerActivations(table, parallel, kernels, longest=TOKENS, adapters=adapters)
    predicted = activations_in_flight(layers, TOKENS // parallel.cp, groups.pp.rank(), Recompute.of(recompute), 1)
    end_layout()
    return measured, predicted


def many(cases):
    return {name: kept_and_predicted(*case) for name, case in cases.items()}


def assert_close(found, low=0.97, high=1.03):
    wrong = {name: f"{p / m:.3f}" for name, (m, p) in found.items() if not low <= p / m <= high}
    assert not wrong, f"predicted over measured: {wrong}"


def test_layers_keep_what_the_budget_says(ranks):
    cases = {(f, dtype): (wide_config(f), dtype, {}, {}) for f in FAMILIES for dtype in ("float32", "bfloat16")}
    assert_close(ranks(1, many, cases)[0])


def test_recomputed_layers_keep_what_the_budget_says(ranks):
    cases = {
        (name, family): (wide_config(family), "float32", recompute, {})
        for name, recompute in RECOMPUTED.items()
        for family in ("qwen3_moe", "deepseek_v3")
    }
    assert_close(ranks(1, many, cases)[0], high=1.05)


@pytest.mark.parametrize("layout", [dict(tp=2), dict(cp=2)], ids=str)
def test_split_layers_keep_what_the_budget_says(ranks, layout):
    families = ["qwen3", "qwen3_moe"] + ["deepseek_v3"] * ("tp" in layout)
    cases = {family: (wide_config(family), "float32", {}, layout) for family in families}
    for found in ranks(2, many, cases):
        assert_close(found)


def test_adapters_keep_what_the_budget_says(ranks):
    """Of wide adapters; ``all-linear`` with and without dropout."""
    rank = {"trainer.policy.model.lora.rank": 64}
    found = {}
    for name, more in {"": {}, " dropout": {"trainer.policy.model.lora.dropout": 0.1}}.items():
        for family in ("qwen3", "qwen3_moe", "deepseek_v3"):
            found[family + name] = (wide_config(family), "float32", {}, {}, rank | more)
    found["canonical"] = (
        wide_config("qwen3_moe"), "float32", {}, {},
        rank | {f"{M}lora_config.lora_type": "canonical_lora"},
    )  # fmt: skip
    assert_close(ranks(1, many, found)[0], high=1.05)  # nothing before the first layer is trained, which keeps less


def peaks(folder, settings):
    """(name, bytes really allocated at the fullest moment, predicted ones) of a training and of a scoring pass."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config import SkyRLTrainConfig, resolve
    from skyrl_megatron.config.hardware import local_hardware
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.types import PaddedBatch
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.memory_phases import RoleModel

    rows, half = 2, 512
    cfg = SkyRLTrainConfig.from_cli_overrides(
        {
            "trainer.policy.model.path": str(folder),
            "trainer.algorithm.use_kl_loss": False,
            "trainer.max_prompt_length": half,
            "generator.sampling_params.max_generate_length": half,
            "trainer.train_batch_size": rows,
            "trainer.policy_mini_batch_size": rows,
            "generator.n_samples_per_prompt": 1,
            "trainer.placement.policy_num_gpus_per_node": dist.get_world_size(),
        }
        | settings
    )
    assert resolve.fit_to_hardware(cfg, local_hardware()) == []
    engine = MegatronEngine(cfg)
    ones = torch.ones(rows, half)
    tokens = torch.randint(1000, (rows, 2 * half), generator=torch.Generator().manual_seed(0))
    whole = torch.ones(rows, 2 * half, dtype=torch.bool)
    padded = PaddedBatch(tokens, whole, ones, ones, uids=["a", "b"], advantages=ones, old_logprobs=-5 * ones)
    batch = padded.flat()
    engine.forward_backward(batch)  # what is made once is there afterwards
    engine.clear_gradients()
    training = peak_of(lambda: engine.forward_backward(batch))
    engine.clear_gradients()
    scoring = peak_of(lambda: engine.compute_logprobs(batch))
    model, stage = RoleModel.of(cfg, "policy", parameter_tables(cfg)["policy"], on_cpu=True), engine.groups.pp.rank()
    return {"training": (training, model.training(stage)), "scoring": (scoring, model.forward(stage))}


def peak_of(work):
    """Most bytes that torch's allocator holds while ``work`` runs, beyond those from before and those of its result.

    A block whose release shows in no event is left out: gloo's thread may be the last holder of a
    collective's buffer, and the profiler sees the releases of this thread and autograd's alone.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    changes, alive = [], {}
    for start, address, size in sorted(allocations(seen.profiler.kineto_results.experimental_event_tree())):
        if size > 0:
            alive[address] = start, size
        elif address in alive:
            changes += [alive.pop(address), (start, size)]
    held = peak = 0
    for _, size in sorted(changes):
        held += size
        peak = max(peak, held)
    return peak


def allocations(events):
    """(ns, address, bytes, negative where released) of the allocator's events in a profile's tree."""
    for event in events:
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from allocations(event.children)


K = f"{M}transformer_config_kwargs."
MORE = (
    {"trainer.logprobs_chunk_size": 128, "trainer.fused_lm_head_logprob": True},
    {"trainer.gradient_checkpointing": False},
    {f"{K}recompute_num_layers": 2, "trainer.logprobs_chunk_size": 128},
    {f"{M}tensor_model_parallel_size": 2, "trainer.gradient_checkpointing": False},
)


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer.logprobs_chunk_size": 128},
        {"trainer.algorithm.use_entropy_loss": True},  # the head's is the fullest moment
        {f"{M}pipeline_model_parallel_size": 2, "trainer.gradient_checkpointing": False},
        *(pytest.param(settings, marks=pytest.mark.full_matrix) for settings in MORE),
    ],
    ids=lambda settings: " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items()),
)
def test_passes_take_what_the_budget_says(ranks, tmp_path, settings):
    folder = save_tiny(
        "qwen3_moe", tmp_path, **WIDE | {"num_hidden_layers": 4, "max_position_embeddings": 1024}, **GROUPED
    )
    world = 2 if any("parallel" in key for key in settings) else 1
    for found in ranks(world, peaks, folder, {"trainer.bf16": False} | settings):
        assert_close({"training": found["training"]}, 0.9, 1.15)
        assert_close({"scoring": found["scoring"]}, 0.9, 1.6)  # kernels on CPU reuse more


def test_scores_that_all_exist_are_counted(ranks, tmp_path):
    """gpt-oss's sinks take part in a softmax over whole rows of scores: the largest part of a pass."""
    wide = WIDE | {"num_hidden_layers": 2, "max_position_embeddings": 1024}
    folder = save_tiny("gpt_oss", tmp_path, **wide, **GROUPED)
    (found,) = ranks(1, peaks, folder, {"trainer.bf16": False, "trainer.logprobs_chunk_size": 128})
    assert_close({"training": found["training"]}, 0.9, 1.3)
    assert_close({"scoring": found["scoring"]}, 0.9, 1.6)
