"""Keys of the dictionaries for Megatron and vLLM: every one has a place, and a wrong one gets one error."""

import importlib.util
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.fields import declared_fields
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.rules import passthrough_keys as keys
from skyrl_megatron.config.validate import find_problems
from tests.support import shown_keys

M, E, S = "trainer.policy.megatron_config.", "generator.inference_engine.", "generator.sampling_params."
K, O, W = f"{M}transformer_config_kwargs.", f"{M}optimizer_config_kwargs.", f"{E}engine_init_kwargs."  # noqa: E741
MORE, EVAL = f"{S}additional_kwargs", "generator.eval_sampling_params."
TABLES = {
    "transformer": keys.TRANSFORMER,
    "optimizer": keys.OPTIMIZER,
    "engine": keys.ENGINE,
    "sampling": keys.SAMPLING,
}
GPUS, CPU = Hardware(8), Hardware(0)


def problems(*args, hardware=GPUS):
    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.logger=console", *args])
    return find_problems(cfg, hardware)


@pytest.mark.parametrize("name", TABLES)
def test_every_field_of_the_installed_types_has_one_place(name):
    """A new version's new field fails here until somebody has read what it does."""
    table = TABLES[name]
    assert declared_fields(table.module, table.type_name) == table.names
    places = Counter([*table.passed_on, *table.read_here, *table.own_keys, *table.refused])
    assert not [field for field, count in places.items() if count > 1]


@pytest.mark.around
@pytest.mark.parametrize("name", TABLES)
def test_every_key_that_is_passed_on_is_shown_by_one_test(name):
    """A new key fails here until a test shows what it does."""
    shown = {**shown_keys.IN_A_STEP, "engine": shown_keys.IN_AN_ENGINES_CONFIGURATION, "sampling": shown_keys.OUTPUT}
    elsewhere, table = shown_keys.ELSEWHERE[name], TABLES[name]
    assert {*shown[name], *elsewhere} == table.passed_on | table.read_here and not {*shown[name]} & {*elsewhere}
    assert [test for test in elsewhere.values() if not shown_keys.exists(test)] == []


RUN_HERE = (
    "transformer models/gpt models/common pipeline_parallel tensor_parallel extensions optimizer distributed fusions "
    "recompute.py ssm/mamba_layer.py"
).split()
"""Where Megatron's code is that this trainer runs, in ``megatron/core``."""
NOT_RUN = (
    *("transformer_config.py", "optimizer_config.py", "heterogeneous_config.py"),  # declare the fields
    *("dot_product_attention.py", "experimental_attention_variant", "distributed/fsdp/src"),  # this trainer has others
)


@pytest.fixture(scope="module")
def attributes_read():
    """Names of attributes that Megatron's code for training reads."""
    core = Path(importlib.util.find_spec("megatron").submodule_search_locations[0], "core")
    found = set()
    for part in RUN_HERE:
        for file in [core / part] if part.endswith(".py") else (core / part).rglob("*.py"):
            if not any(name in str(file) for name in NOT_RUN):
                found |= set(re.findall(r"""(?:\.|getattr\(\w+, ['"])(\w+)""", file.read_text()))
    return found


def test_what_is_passed_on_to_megatron_is_read_there(attributes_read):
    assert len(attributes_read) > 1000
    for table in (keys.TRANSFORMER, keys.OPTIMIZER):
        assert not table.passed_on - attributes_read


def routed_fields():
    """Fields that Megatron's configuration itself reads when it is made: old names of others, for example. Those of
    its own sparse attention, which this trainer replaces, are validated only."""
    core = Path(importlib.util.find_spec("megatron").submodule_search_locations[0], "core")
    for file in ("transformer/transformer_config.py", "model_parallel_config.py"):
        made = (core / file).read_text().partition("def __post_init__")[2]
        yield from re.findall(r"self\.(\w+)", made)
        yield from re.findall(r"""['"](\w+)['"]""", made)


def test_what_is_said_to_be_read_by_nobody_is_not(attributes_read):
    unread = {name for name, reason in keys.TRANSFORMER.refused.items() if reason.startswith("no code that")}
    assert len(unread) > 20
    assert not unread & attributes_read
    assert unread & set(routed_fields()) == {
        "dsa_indexer_skip_topk_offset",
        "dsa_indexer_topk_freq",
        "dsa_kernel_backend",
    }


NO_GRAMMAR = "structured_outputs: {regex: a+}"
WRONG = {
    "named field inside": ([f"{MORE}={{top_k: 5}}"], f"{MORE}.top_k", f"set {S}top_k"),
    "length inside": ([f"{MORE}={{max_tokens: 5}}"], f"{MORE}.max_tokens", f"set {S}max_generate_length"),
    "named field inside, in evaluation": (
        [f"{EVAL}additional_kwargs={{temperature: 0.5}}"],
        f"{EVAL}additional_kwargs.temperature",
        f"set {EVAL}temperature",
    ),
    "one seed for all": ([f"{MORE}={{seed: 3}}"], f"{MORE}.seed", "would be the same"),
    "scores of other tokens": ([f"{MORE}={{logprob_token_ids: [3]}}"], f"{MORE}.logprob_token_ids", "remove this key"),
    "forced tokens": ([f"{MORE}={{trace_decode_token_ids: [3]}}"], f"{MORE}.trace_decode_token_ids", "did not sample"),
    "grammar without its support": (
        [f"{MORE}={{{NO_GRAMMAR}}}", f"{S}repetition_penalty=1.2"],
        f"{MORE}.structured_outputs",
        "repetition_penalty=1.2",
    ),
    "defaults of the engine": (
        [f"{W}override_generation_config={{top_k: 5}}"],
        f"{W}override_generation_config",
        "set generator.sampling_params",
    ),
    "the model's own defaults": ([f"{W}generation_config=auto"], f"{W}generation_config", "every request samples"),
    "logits": ([f"{W}logprobs_mode=raw_logits"], f"{W}logprobs_mode", "sampling distribution"),
    "a trace": ([f"{W}enable_trace_replay=true"], f"{W}enable_trace_replay", "by a trace"),
    "blocks outside the GPU": ([f"{W}kv_offloading_size=4"], f"{W}kv_offloading_size", "earlier weights"),
    "a connector of blocks": ([f"{W}kv_transfer_config={{a: b}}"], f"{W}kv_transfer_config", "earlier weights"),
    "a size of the engine": ([f"{W}tensor_parallel_size=2"], f"{W}tensor_parallel_size", f"set {E}tensor_par"),
    "more sequences than tokens": (
        [f"{E}max_num_seqs=4096", f"{E}max_num_batched_tokens=2048"],
        f"{E}max_num_seqs",
        "2048",
    ),
    "another rate": ([f"{O}lr=0.1"], f"{O}lr", "set trainer.policy.optimizer_config.lr"),
    "another limit": ([f"{O}clip_grad=0.1"], f"{O}clip_grad", "set trainer.policy.optimizer_config.max_grad_norm"),
    "another optimizer": ([f"{O}optimizer=sgd"], f"{O}optimizer", "set trainer.policy.optimizer_config.optimizer"),
    "no number": ([f"{O}grad_norm_skip_threshold=high"], f"{O}grad_norm_skip_threshold", "must be a number"),
    "first stage": (
        [f"{K}num_layers_in_first_pipeline_stage=2"],
        f"{K}num_layers_in_first_pipeline_stage",
        f"set {M}num_layers_in_first_pipeline_stage",
    ),
    "gradients in another type": ([f"{O}main_grads_dtype=bf16"], f"{O}main_grads_dtype", "grad_reduce_in_fp32"),
    "a floor without its rate": ([f"{O}decoupled_min_lr=1e-6"], f"{O}decoupled_min_lr", "decoupled_lr"),
    "a negative rate": ([f"{O}decoupled_lr=-1"], f"{O}decoupled_lr", "at least 0"),
    "more than all": ([f"{O}optimizer_offload_fraction=2"], f"{O}optimizer_offload_fraction", "at most 1"),
    "dropout of five": ([f"{K}attention_dropout=5"], f"{K}attention_dropout", "at most 1"),
    "no module": ([f"{K}recompute_modules=[banana]"], f"{K}recompute_modules", "core_attn, moe_act"),
    "no method": (
        [f"{K}recompute_granularity=full", f"{K}recompute_method=banana", f"{K}recompute_num_layers=1"],
        f"{K}recompute_method",
        "uniform, block",
    ),
    "no layers": (
        [f"{K}recompute_granularity=full", f"{K}recompute_method=block", f"{K}recompute_num_layers=0"],
        f"{K}recompute_num_layers",
        "at least 1",
    ),
    "no KV cache": ([f"{W}kv_cache_memory_bytes=-1"], f"{W}kv_cache_memory_bytes", "at least 1"),
    "no such KV cache": ([f"{W}kv_cache_dtype=banana"], f"{W}kv_cache_dtype", "auto, float16"),
    "too hot for vLLM": ([f"{EVAL}temperature=2.5"], f"{EVAL}temperature", "0 to 2"),
    "several samples": ([f"{MORE}={{n: 4}}"], f"{MORE}.n", "set generator.n_samples_per_prompt"),
    "fixed lengths": ([f"{K}variable_seq_lengths=false"], f"{K}variable_seq_lengths", "the trainer sets it"),
    "whole vocabularies": ([f"{K}cross_entropy_loss_fusion=true"], f"{K}cross_entropy_loss_fusion", "log-probs and"),
    "another exchange": ([f"{K}cp_comm_type=a2a"], f"{K}cp_comm_type", "remove this key"),
    "random experts": (
        [f"{K}moe_router_force_load_balancing=true"],
        f"{K}moe_router_force_load_balancing",
        "does not choose",
    ),
    "dropped tokens": ([f"{K}moe_expert_capacity_factor=1.0"], f"{K}moe_expert_capacity_factor", "drops or pads"),
    "unread": ([f"{K}use_te_rng_tracker=true"], f"{K}use_te_rng_tracker", "no code that this trainer runs"),
    "an old name": ([f"{K}moe_enable_deepep=true"], f"{K}moe_enable_deepep", "moe_token_dispatcher_type=flex"),
    "logits of padded rows": (
        [f"{K}log_max_attention_logit=true", "trainer.use_sample_packing=false"],
        f"{K}log_max_attention_logit",
        "use_sample_packing=true",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_is_refused_with_its_key_and_the_fix(case):
    args, key, words = WRONG[case]
    found = problems(*args)
    assert [problem.key for problem in found] == [key], found
    assert words in found[0].fix


def test_drafts_that_the_engine_refuses():
    draft = f"{W}speculative_config={{method: ngram, num_speculative_tokens: 2, prompt_lookup_max: 2}}"
    (found,) = problems(draft, hardware=CPU)
    assert found.key == f"{W}speculative_config" and "numba" in found.fix
    assert problems(draft) == []
    for args, key in (
        ([f"{EVAL}min_p=0.1"], f"{EVAL}min_p"),
        ([f"{EVAL}additional_kwargs={{logit_bias: {{5: 1.0}}}}"], f"{EVAL}additional_kwargs.logit_bias"),
    ):
        (found,) = problems(draft, *args)
        assert found.key == key and "speculative_config" in found.fix
    (found,) = problems(f"{W}speculative_config=mtp")
    assert "a mapping" in found.fix


ACCEPTED = [
    f"{K}attention_dropout=0.1",
    f"{K}sequence_parallel=false",
    f"{O}grad_norm_skip_threshold=5",
    f"{O}decoupled_lr=1e-5",
    f"{W}max_logprobs=5",
    f"{MORE}={{stop_token_ids: [3], ignore_eos: true}}",
    f"{EVAL}additional_kwargs={{presence_penalty: 1.0, logit_bias: {{5: 10.0}}, bad_words: [a]}}",
]


AS_IT_IS = [
    f"{K}batch_p2p_comm=true",
    f"{K}calculate_per_token_loss=true",
    f"{K}cp_comm_type=p2p",
    f"{K}cross_entropy_loss_fusion=false",
    f"{K}fp16=false",
    f"{K}masked_softmax_fusion=false",
    f"{K}masked_softmax_fusion=true",
    f"{K}persist_layer_norm=true",
    f"{K}sequence_parallel=false",
    f"{K}variable_seq_lengths=true",
    f"{O}adam_beta1=0.9",
    f"{O}clip_grad=1.0",
    f"{O}optimizer=adam",
    f"{W}dtype=bfloat16",
    f"{W}enable_expert_parallel=false",
    f"{W}generation_config=vllm",
    f"{W}scheduling_policy=fcfs",
    f"{W}tokenizer_mode=auto",
    f"{W}trust_remote_code=false",
    f"{MORE}={{n: 1, seed: null, detokenize: true}}",
]


@pytest.mark.parametrize("argument", AS_IT_IS)
def test_a_value_that_runs_have_anyway_is_no_error(argument):
    assert problems(argument) == []


OTHERWISE_HERE = {
    "engine": "logprobs_mode max_cpu_loras additional_config enable_mixed_moe_lora_format generation_config "
    "language_model_only sleep_preserve_parameter_names weight_transfer_config worker_extension_cls",
    "transformer": "calculate_per_token_loss deallocate_pipeline_outputs disable_parameter_transpose_cache "
    "moe_hybridep_pad_uneven_dispatch_inputs perform_initialization variable_seq_lengths",
    "sampling": "include_stop_str_in_output",
}
"""Refused keys that runs set to other values than the other package's defaults."""


@pytest.mark.process
@pytest.mark.parametrize("name", TABLES)
def test_the_defaults_of_refused_keys_are_accepted(name):
    """Those of the real types. What a file cannot hold is left out."""
    import importlib

    table, prefixes = TABLES[name], {"transformer": K, "optimizer": O, "engine": W}
    real = getattr(importlib.import_module(table.module), table.type_name)
    cfg, errors = SkyRLTrainConfig(), {}
    cfg.trainer.logger = "console"
    for field in sorted(set(table.refused) - set(OTHERWISE_HERE.get(name, "").split())):
        value = getattr(real, field, ...) if name != "sampling" else getattr(real(), field)
        if value is not ... and isinstance(value, str | bool | int | float | None) and not hasattr(value, "value"):
            megatron, generator = cfg.trainer.policy.megatron_config, cfg.generator
            places = (megatron.transformer_config_kwargs, megatron.optimizer_config_kwargs)
            place = dict(zip(prefixes, (*places, generator.inference_engine.engine_init_kwargs), strict=True)).get(
                name
            )
            if place is None:
                place = generator.sampling_params.additional_kwargs = {}
            place[field] = value
            errors |= {each.key: each.fix for each in find_problems(cfg, GPUS)}
            del place[field]
    assert {key: fix for key, fix in errors.items() if "kwargs" in key} == {}


def test_what_is_passed_on_is_accepted():
    """Also values that are the other package's default, and any distribution in evaluation."""
    for argument in ACCEPTED:
        assert problems(argument) == [], argument
    both = [f"{K}moe_z_loss_coeff=0.01", f"{M}moe_z_loss_coeff=0.01"]
    assert problems(*both) == []


def test_rates_of_adam_that_are_no_pair_are_one_problem():
    (found,) = problems(f"{O}adam_beta2=0.95", "trainer.policy.optimizer_config.adam_betas=[0.9]", hardware=GPUS)[:1]
    assert found.key == "trainer.policy.optimizer_config.adam_betas"
    teacher = [
        "trainer.teacher.model.path=/teacher",
        "trainer.teacher.megatron_config.optimizer_config_kwargs.adam_beta2=0.5",
    ]
    assert not [each for each in problems(*teacher) if "adam" in each.key]


WHOLE = f"{E}return_sampling_support=false"


@pytest.mark.parametrize(
    "settings",
    [
        [f"{S}repetition_penalty=1.2"],
        [f"{MORE}={{presence_penalty: 1.0}}"],
        [f"{MORE}={{logit_bias: {{5: 10.0}}}}"],
        [f"{S}top_p=0.9", WHOLE],
        [f"{MORE}={{min_tokens: 3}}", WHOLE],
    ],
    ids=str,
)
def test_training_samples_of_another_distribution_are_named(settings):
    """An error, and a warning where that is asked for."""
    (found,) = problems(*settings)
    assert found.key.startswith(S) and "tokens are not sampled from the trainer's softmax" in found.fix
    with pytest.warns(UserWarning, match="tokens are not sampled from the trainer's softmax") as caught:
        assert problems(*settings, "generator.unaccounted_sampling=warn") == []
    assert len(caught) == 1


@pytest.mark.parametrize("mask", ["allowed_token_ids: [3, 5]", "bad_words: [a]", "min_tokens: 3", NO_GRAMMAR])
def test_whatever_excludes_tokens_comes_with_its_support(mask):
    from skyrl_megatron.config.rules.rollout_rules import returns_sampling_support

    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.logger=console", f"{MORE}={{{mask}}}"])
    assert find_problems(cfg, GPUS) == [] and returns_sampling_support(cfg.generator)


VALUES = [
    None,
    True,
    False,
    0,
    1,
    -3,
    7.5,
    1e30,
    float("nan"),
    "",
    "auto",
    "full",
    "x" * 50,
    [],
    [1, 2],
    ["a"],
    {},
    {"a": 1},
]


@pytest.mark.around
def test_any_key_and_value_gets_one_clear_error_or_none():
    """300 random ones: no traceback, and at most one problem, which names the key."""
    from skyrl_megatron.checks import PlannedRun
    from skyrl_megatron_observe.preflight.option_checks import foreign_options

    rng, outcomes = random.Random(46), Counter()
    for number in range(300):
        kind = rng.choice([*TABLES])
        name = rng.choice(sorted(TABLES[kind].names))
        if number % 10 == 0:
            name = name[: len(name) // 2] + rng.choice("xyz") + name[len(name) // 2 :]
        value = rng.choice(VALUES)
        cfg = SkyRLTrainConfig()
        cfg.trainer.logger = "console"
        megatron, generator = cfg.trainer.policy.megatron_config, cfg.generator
        if kind == "sampling":
            generator.sampling_params.additional_kwargs = {name: value}
        else:
            dictionaries = {
                "transformer": megatron.transformer_config_kwargs,
                "optimizer": megatron.optimizer_config_kwargs,
                "engine": generator.inference_engine.engine_init_kwargs,
            }
            dictionaries[kind][name] = value
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *args, **options: None)
            found = find_problems(cfg, rng.choice([GPUS, CPU]))
            found += [each for each in foreign_options(PlannedRun(cfg, GPUS)) if hasattr(each, "key")]
        about = [each for each in found if name in each.key or name in each.fix]
        assert about == found and len({each.key for each in found}) <= 1, (kind, name, value, found)
        assert all(len(str(each)) < 600 and each.fix for each in found)
        outcomes[bool(found)] += 1
    assert outcomes[True] > 150 and outcomes[False] > 20
