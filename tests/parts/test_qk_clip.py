"""QK-clip: the logits of transformers' attention, and the closed form of what shrinks, in several layouts; what
masters hold afterwards."""

import json
import math
import sys

import pytest

from tests.support.rank_pool import end_layout
from tests.training import bodies, muon_reference, reference
from tests.training.bodies import MEGATRON

OPTIMIZER = "trainer.policy.optimizer_config."
FIELDS = f"{MEGATRON}transformer_config_kwargs."
ALPHA = 0.3
KEYS = {
    f"{OPTIMIZER}optimizer": "muon",
    f"{OPTIMIZER}lr": 0.0,
    f"{FIELDS}qk_clip": True,
    f"{FIELDS}qk_clip_alpha": ALPHA,
}
LAYOUTS = {
    "tp2": dict(world=2, tp=2),
    "dp2": dict(world=2),
}
MORE = {
    "single": dict(world=1),
    "cp2": dict(world=2, cp=2),
    "tp2·cp2": dict(world=4, tp=2, cp=2),
    "pp2": dict(world=2, pp=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "tp2·pp2": dict(world=4, tp=2, pp=2),
}
FAMILIES = {
    "qwen2": dict(num_hidden_layers=4, num_key_value_heads=2),
    "deepseek_v3": dict(num_hidden_layers=4),
    "gpt_oss": dict(num_hidden_layers=4, num_key_value_heads=2),
    "deepseek_v32": dict(num_hidden_layers=4),
}
"""Grouped queries with biases, multi-latent attention, a sliding window with sinks, keys that an indexer selects."""
CASES = [("qwen2", "tp2"), ("deepseek_v3", "tp2"), ("deepseek_v3", "dp2")]
FURTHER = [(family, layout) for family in FAMILIES for layout in LAYOUTS | MORE if (family, layout) not in CASES]


def largest_logits(folder, batch):
    """[layers, heads]: the largest logit of transformers' eager attention, each row alone."""
    from unittest import mock

    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import repeat_kv

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    file = sys.modules[type(model).__module__]
    attention, found = file.eager_attention_forward, {}  # the family's own: gpt-oss has sinks

    def recording(module, query, key, value, attention_mask, scaling, **options):
        with torch.no_grad():
            repeated = repeat_kv(key, query.shape[1] // key.shape[1])
            logits = query @ repeated.transpose(-1, -2) * scaling + attention_mask[..., : key.shape[-2]]
            largest = logits.amax((0, 2, 3))
            before = found.get(module.layer_idx)
            found[module.layer_idx] = largest if before is None else largest.maximum(before)
        module.num_key_value_groups = query.shape[1] // key.shape[1]
        return attention(module, query, key, value, attention_mask, scaling)

    with torch.no_grad(), mock.patch.object(file, "eager_attention_forward", recording):
        for row in range(len(batch)):
            model(reference.tokens_of(batch, row), use_cache=False)
    return torch.stack([found[layer] for layer in sorted(found)])


def shrunk(name, weight, logits, threshold, hf):
    """A HF tensor after the clip: rows of queries and keys times powers of η = threshold / logit."""
    import torch

    if ".self_attn." not in name or not name.endswith(("weight", "bias")):
        return weight
    ratio = (threshold / logits[int(name.split(".")[2])]).clamp_max(1.0)
    kind = name.split(".")[-2]
    if "kv_lora_rank" in hf:
        nope = hf["qk_nope_head_dim"]
        sizes = {"q_b_proj": (nope, hf["qk_rope_head_dim"]), "kv_b_proj": (nope, hf["v_head_dim"])}
        if kind not in sizes:
            return weight
        powers = (ALPHA, 1.0) if kind == "q_b_proj" else (1 - ALPHA, 0.0)
        rows = [torch.cat([each**power for power, n in zip(powers, sizes[kind], strict=True) for _ in range(n)])
                for each in ratio[:, None]]  # fmt: skip
        return weight.double() * torch.cat(rows)[:, None]
    if kind not in ("q_proj", "k_proj"):
        return weight
    groups = hf["num_key_value_heads"]
    ratio = ratio.view(groups, -1).amin(1) ** (ALPHA if kind == "q_proj" else 1 - ALPHA)
    rows = ratio.repeat_interleave(weight.shape[0] // groups)
    return weight.double() * (rows if weight.dim() == 1 else rows[:, None])


def clip_body(folder, batch, threshold, layout, overrides=None):
    """Weights before and after a step whose rate is 0, the largest logit that the step reports, and the logits of the
    first layer's heads afterwards, by their number."""
    from skyrl_megatron.algorithms import exact_ops
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine
    from tests.parts.test_muon import weights_of

    keys = KEYS | {f"{FIELDS}qk_clip_threshold": threshold} | (overrides or {})
    engine = MegatronEngine(bodies.config(folder, **layout, overrides=keys))
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
    engine.compute_logprobs(part)  # is no training: does not count
    before = weights_of(engine)
    engine.forward_backward(part)
    result = engine.optim_step()
    after = weights_of(engine)
    engine.forward_backward(part)
    again = {}
    if engine.groups.is_first_stage:
        found = engine.chunks[0].module.decoder.layers[0].self_attention.core_attention.current_max_attn_logits
        first = engine.groups.tp.rank() * len(found)
        again = {first + head: value for head, value in enumerate(found.tolist())}
    engine.optim_step()
    exact_ops.use(False)
    return before, after, result.metrics["attention_logit_max"], again


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Family → (HF folder, batch, the largest logits, a threshold between them)."""
    made = {}

    def get(family):
        if family not in made:
            from tests.bridges.tiny_models import save_tiny

            folder = save_tiny(family, tmp_path_factory.mktemp(family), **FAMILIES[family], initializer_range=0.2)
            batch = reference.make_batch(vocab_size=1003)
            batch.old_logprobs = batch.rollout_logprobs = batch.ref_logprobs = batch.response_mask * -6.0
            logits = largest_logits(folder, batch)
            made[family] = folder, batch, logits, float(logits.median())
        return made[family]

    return get


def check_weights(outcomes, logits, threshold, hf):
    """Assert that the weights and the reported logit are right; return the names of the weights that changed."""
    changed = set()
    for before, after, largest, _ in outcomes:
        for key, weight in before.items():
            expected = shrunk(key[0], weight, logits, threshold, hf)
            error = float((after[key].double() - expected).norm() / expected.double().norm())
            assert error <= (1e-5 if expected is not weight else 0.0), (key, error)
            changed |= set() if after[key].equal(weight) else {key[0]}
        assert largest == pytest.approx(float(logits.max()), rel=1e-4)
    return changed


@pytest.mark.parametrize(
    "family, layout", [*CASES, *(pytest.param(*case, marks=pytest.mark.full_matrix) for case in FURTHER)]
)
def test_heads_above_the_threshold_shrink_to_it(ranks, model, family, layout):
    folder, batch, logits, threshold = model(family)
    hf = json.loads((folder / "config.json").read_text())
    outcomes = ranks((LAYOUTS | MORE)[layout]["world"], clip_body, folder, batch, threshold, (LAYOUTS | MORE)[layout])
    assert (logits > threshold).any() and (logits < threshold).any()
    assert len(check_weights(outcomes, logits, threshold, hf)) >= 4 * 2
    again = {head: value for outcome in outcomes for head, value in outcome[3].items()}
    if layout != "dp2" and "cp2" not in layout:  # elsewhere a rank has part of the queries
        groups = 1 if "kv_lora_rank" in hf else hf["num_attention_heads"] // hf["num_key_value_heads"]
        for head, value in again.items():
            group = logits[0, head // groups * groups : (head // groups + 1) * groups]
            ratio = min(1.0, threshold / float(group.max()))
            assert value == pytest.approx(ratio * float(logits[0, head]), rel=1e-4)
            assert math.isfinite(value)


@pytest.mark.parametrize(
    "overrides",
    [
        {"trainer.exact_rollouts": True},
        {"trainer.gradient_checkpointing": True},
        {"trainer.gradient_checkpointing": True, f"{FIELDS}recompute_granularity": "selective"},
    ],
    ids=["exact", "recompute full", "recompute selective"],
)
def test_other_passes_are_measured_too(ranks, model, overrides):
    folder, batch, logits, threshold = model("qwen2")
    hf = json.loads((folder / "config.json").read_text())
    outcomes = ranks(1, clip_body, folder, batch, threshold, MORE["single"], overrides)
    assert len(check_weights(outcomes, logits, threshold, hf)) >= 4 * 2


def test_logits_are_measured_without_the_clip(ranks, model):
    """``log_max_attention_logit`` reports the same and changes no weight, with any optimizer."""
    folder, batch, logits, threshold = model("qwen2")
    keys = {f"{FIELDS}qk_clip": False, f"{OPTIMIZER}optimizer": "adam", f"{FIELDS}log_max_attention_logit": True}
    ((before, after, largest, _),) = ranks(1, clip_body, folder, batch, threshold, MORE["single"], keys)
    assert largest == pytest.approx(float(logits.max()), rel=1e-4)
    assert all(after[key].equal(weight) for key, weight in before.items())


def test_a_single_head(ranks, model):
    """Only one tp rank clips. Both share the experts, whose weights they gather together or not at all."""
    folder, batch, logits, _ = model("deepseek_v3")
    hf = json.loads((folder / "config.json").read_text())
    threshold = float(logits.flatten().topk(2).values.mean())
    outcomes = ranks(2, clip_body, folder, batch, threshold, LAYOUTS["tp2"])
    changed = check_weights(outcomes, logits, threshold, hf)
    layer = int(logits.amax(1).argmax())
    assert changed == {f"model.layers.{layer}.self_attn.{name}.weight" for name in ("q_b_proj", "kv_b_proj")}


def test_a_draft_head(ranks, model, tmp_path):
    """It is a layer like the others, in an optimizer with gradient buffers of its own."""
    from tests.training import draft_reference

    folder, batch = draft_reference.save_with_draft("deepseek_v3", tmp_path / "model"), model("deepseek_v3")[1]
    keys = {f"{MEGATRON}mtp.train": True}
    ((before, after, *_), _) = ranks(2, clip_body, folder, batch, 1e-4, LAYOUTS["dp2"], keys)
    changed = {name for (name, index), weight in before.items() if not after[name, index].equal(weight)}
    assert changed == {name for name, _ in before if name.endswith(("q_b_proj.weight", "kv_b_proj.weight"))}
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert len(changed) == 2 * (layers + 1)


def masters_of(engine):
    """(HF name, expert) → whole fp32 master, on the ranks that gather it; whether all weights are their rounding."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges
    from skyrl_megatron.runtime.hf_weights import stream_hf

    parameters = [each for chunk in engine.chunks for each in chunk.parameters()]
    whole = {id(each): torch.zeros_like(each, dtype=torch.float32) for each in parameters}
    for each in owned_ranges(engine.optimizer):
        whole[id(each.parameter)].view(-1)[each.start : each.stop] = each.tensors["param"]
    if engine.optimizer.config.use_distributed_optimizer:
        for each in parameters:
            group = engine.groups.dp_cp if getattr(each, "allreduce", True) else engine.groups.edp
            dist.all_reduce(whole[id(each)], group=group)
    rounded = all(each.equal(whole[id(each)].to(each.dtype)) for each in parameters)
    streamed = stream_hf(engine.model, engine.groups, of=lambda parameter: whole.get(id(parameter), parameter))
    return {(each.name, each.index): each.tensor.clone() for each in streamed}, rounded


def two_steps_body(folder, degrees, distributed, logits, threshold):
    """Masters before and after two steps, of which the first clips, with a rate of 0 and with one; whether weights are
    their rounding after each step.

    The logits are set here: on CPU no engine computes in bfloat16.
    """
    import types

    from skyrl_megatron.runtime.optimizer import step_if_finite
    from skyrl_megatron_parts.qk_clip import clip_qk, take_max_logits
    from tests.checkpoint.test_variants import bf16_model
    from tests.parts.test_muon import set_gradients

    fields = {"qk_clip": True, "qk_clip_alpha": ALPHA, "qk_clip_threshold": threshold}
    options = {"adam_eps": muon_reference.ADAM_EPS, "muon_momentum": muon_reference.MOMENTUM}
    found = []
    for rate in (0.0, 1.0):
        model, state = bf16_model(
            folder, degrees, 1, options, optimizer="muon", distributed=distributed, fields=fields,
            lr=muon_reference.LR * rate, adam_lr=muon_reference.ADAM_LR * rate, weight_decay=muon_reference.DECAY,
            max_grad_norm=0.0,
        )  # fmt: skip
        engine = types.SimpleNamespace(
            model=model, chunks=state.model_chunks, groups=state.groups, optimizer=state.optimizer
        )
        (before, _), rounded = masters_of(engine), []
        for step in range(muon_reference.STEPS):
            set_gradients(engine, step)
            for layer in (each for chunk in model.chunks for each in chunk.decoder.layers):
                own = logits[layer.layer_number - 1].float().chunk(engine.groups.tp.size())[engine.groups.tp.rank()]
                layer.self_attention.core_attention.current_max_attn_logits = own.clone() if step == 0 else own * 0.0
            largest = take_max_logits(model.chunks)
            assert not step_if_finite(engine.optimizer, state.lr_schedule, engine.chunks).skipped
            clip_qk(largest, engine.optimizer)
            engine.optimizer.zero_grad()
            rounded.append(masters_of(engine)[1])
        found.append((rate, before, masters_of(engine)[0], rounded))
        end_layout()
    return found


@pytest.mark.parametrize(
    ("family", "degrees", "distributed"),
    [
        ("qwen2", {}, True),
        pytest.param("qwen2", {}, False, marks=pytest.mark.full_matrix),
        pytest.param("deepseek_v3", dict(tp=2), True, marks=pytest.mark.full_matrix),
        pytest.param("deepseek_v3", dict(ep=2), True, marks=pytest.mark.full_matrix),
        pytest.param("deepseek_v3", dict(ep=2), False, marks=pytest.mark.full_matrix),
        pytest.param("gpt_oss", dict(tp=2), False, marks=pytest.mark.full_matrix),
    ],
    ids=str,
)
def test_masters_hold_what_was_clipped(ranks, model, family, degrees, distributed):
    """The next step begins with the clipped masters: with a rate of 0 it changes nothing. Where only weights shrink,
    it undoes the clip."""
    folder, _, logits, threshold = model(family)
    hf = json.loads((folder / "config.json").read_text())
    for outcomes in zip(*ranks(2, two_steps_body, folder, degrees, distributed, logits, threshold), strict=True):
        rate = outcomes[0][0]
        before = {key: master for outcome in outcomes for key, master in outcome[1].items()}
        after = {key: master for outcome in outcomes for key, master in outcome[2].items()}
        for key, master in before.items():
            if key[0].endswith(("e_score_correction_bias", ".expert_bias")):
                continue  # is not trained
            expected = muon_reference.steps(
                *key, master, hf, rate=rate, between=lambda now, key=key: shrunk(key[0], now, logits, threshold, hf)
            )
            error = float((after[key].double() - expected).norm() / expected.norm())
            assert error <= 1e-5, (rate, key, error)
        assert all(all(outcome[3]) for outcome in outcomes)


@pytest.mark.parametrize(
    ("family", "tp", "use_te", "reason"),
    [
        ("qwen3_moe", 1, False, "norms of q and k"),
        ("olmoe", 1, False, "norms of q and k"),
        ("qwen2", 4, False, "exceeds 2 groups"),
        ("deepseek_v3", 2, True, "transformer_impl=local"),
        ("deepseek_v3", 4, False, None),
        ("llama", 2, False, None),
    ],
)
def test_attention_that_cannot_be_clipped_is_refused(family, tp, use_te, reason):
    from skyrl_megatron.runtime.model.description import read_hf_model, without_qk_clip
    from tests.bridges.tiny_models import LATENT_FAMILIES, tiny_config

    groups = {} if family in LATENT_FAMILIES else {"num_key_value_heads": 2}
    why = without_qk_clip(read_hf_model(tiny_config(family, **groups)), tp, use_te)
    assert why == reason if reason is None else reason in why


def test_a_model_that_cannot_be_clipped_is_a_problem_of_the_build(ranks, folder):
    from tests.support.rank_pool import RankFailure

    with pytest.raises(RankFailure, match=r"qk_clip=True: the norms of q and k bound the logits"):
        ranks(1, clip_body, folder, None, 1.0, dict(world=1))
