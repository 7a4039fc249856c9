"""Prefixes that rows share are computed once (``trainer.share_prefixes``), and all is what separate rows give."""

import contextlib
import copy
import dataclasses
import functools

import numpy as np
import pytest

from tests.algorithms.test_reduction import LOSSES
from tests.bridges.tiny_models import LATENT_FAMILIES, TINY
from tests.training import bodies, draft_reference, reference
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

SHARED = {"trainer.share_prefixes": "always", "trainer.max_tokens_per_microbatch": 160}
LAYOUTS = {
    "single": dict(world=1),
    "tp2": dict(world=2, tp=2),
    "pp2": dict(world=2, pp=2),
    "ep2": dict(world=2, ep=2),
    "cp2": dict(world=2, cp=2),
    "dp2": dict(world=2),
}
MORE = {
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "tp2·etp2": dict(world=2, tp=2, etp=2),
    "tp2·cp2·ep4": dict(world=4, tp=2, cp=2, ep=4),
    "pp2·cp2·ep2": dict(world=4, pp=2, cp=2, ep=2),
}
NOT_EVERY_TIME = ("pp2", "ep2", "dp2")


def branching_batch(vocab_size, seed=0):
    """Rows of a prompt, with branches inside answers, a row that begins another, a copy of a row, and one alone."""
    import torch

    from skyrl_megatron.types import RowSpans, TrainingBatch

    rng = np.random.default_rng(seed)

    def text(length):
        return rng.integers(0, vocab_size, length).tolist()

    prompt, first = text(11), text(9)
    rows = [
        (prompt, first),
        (prompt, first[:4] + text(5)),
        (prompt, first[:4] + text(3)),
        (prompt, first[:6]),  # begins the first row's answer
        (prompt, text(6)),
        (prompt, first),  # a copy
        (prompt + first[:5], text(4)),  # its context is what another row answered
        (text(5), text(8)),
    ]
    responses = RowSpans(np.array([len(answer) for _, answer in rows]))
    tokens = [token for question, answer in rows for token in question + answer]
    mask = torch.ones(responses.size, dtype=torch.bool)
    trained = mask.clone()
    trained[responses.of(0)][3:5] = False
    lengths = np.array([len(question) + len(answer) for question, answer in rows])
    batch = TrainingBatch(torch.tensor(tokens, dtype=torch.int32), lengths, responses.lengths, mask, trained)
    batch.uids = [f"prompt-{row // 2}" for row in range(len(rows))]
    batch.advantages = torch.from_numpy(rng.standard_normal(responses.size)).float()
    return batch


@contextlib.contextmanager
def sharing(short=1):
    """Share also short prefixes; the list of the trees that a pack was made of, which must not stay empty."""
    from unittest import mock

    from skyrl_megatron.data import prefixes

    made, of = [], prefixes.PrefixTree.of

    def seen(*arguments):
        made.append(of(*arguments))
        return made[-1]

    with mock.patch.object(prefixes, "SHORT", short), mock.patch.object(prefixes.PrefixTree, "of", seen):
        yield made
    assert any(not tree.is_flat for tree in made), "no prefix was shared"


def three_steps(*arguments):
    with sharing():
        return bodies.three_steps(*arguments)


@pytest.fixture(scope="module")
def branching(folder):
    batch = branching_batch(1003)
    return reference.with_logprobs(batch, reference.all_logprobs(folder, batch))


@pytest.fixture(scope="module")
def expected(folder, branching, tmp_path_factory):
    return reference.policy_gradient_step(folder, branching, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full_matrix] if name in MORE or name in NOT_EVERY_TIME else [])
        for name in LAYOUTS | MORE
    ],
)
def test_every_layout(ranks, folder, branching, expected, name):
    """Three steps are those of transformers, where each row runs alone."""
    layout = (LAYOUTS | MORE)[name]
    outcomes = ranks(layout["world"], three_steps, folder, branching, expected, layout, NO_DISTRIBUTED | SHARED)
    bodies.check(outcomes, expected)


FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
"""Grouped queries, multi-latent attention, sinks with a window of 17 tokens, gated delta nets."""
FP64_ROUTERS = {f"{MEGATRON}transformer_config_kwargs.moe_router_dtype": "fp64"}
DENSE = ("llama", "qwen2", "qwen3")
EXACT = 1e-6
"""Relative L2 error of a gradient. Weights, routers and log-probs are fp64 there."""
EXACT_OF = {"qwen3_next": 5e-6, "qwen3_5_moe_text": 5e-6}  # the states of delta nets are fp32


def both_ways(folder, batch, overrides, layout, fault=None, changes=None):
    """(relative L2 error of each gradient, largest error of log-probs, metrics of both) of shared prefixes
    against separate rows, in fp64, on this rank's rows. ``changes``: of the objective."""
    from unittest import mock

    import torch

    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime import trained_model
    from skyrl_megatron.runtime.engine import MegatronEngine

    with mock.patch.object(trained_model, "parameter_dtype", lambda _: torch.float64):
        engine = MegatronEngine(
            bodies.config(folder, **layout, overrides=NO_DISTRIBUTED | SHARED | FP64_ROUTERS | overrides)
        )
    batch = batch.select(split_for_dp(batch.lengths.astype(float), engine.dp_size)[engine.dp_rank])
    gradients, logprobs, metrics = {}, {}, {}
    for shared in (False, True):
        engine.shares_prefixes = shared
        with contextlib.ExitStack() as stack:
            if shared:
                stack.enter_context(sharing())
                stack.enter_context(FAULTS[fault]() if fault else contextlib.nullcontext())
            logprobs[shared] = engine.compute_logprobs(batch)
            metrics[shared] = engine.forward_backward(batch, objective=engine.objective(changes))
        engine.reduce_gradients()
        gradients[shared] = {
            f"{adapter}{name}": parameter.main_grad.clone()
            for adapter, trained in engine.trained.items()
            for chunk in trained.chunks
            for name, parameter in chunk.named_parameters()
            if getattr(parameter, "main_grad", None) is not None
        }
        engine.clear_gradients()
    assert gradients[True].keys() == gradients[False].keys() and gradients[True]
    errors = {
        name: float((gradients[True][name] - of_rows).norm() / of_rows.norm()) if of_rows.norm() else 0.0
        for name, of_rows in gradients[False].items()
    }
    return errors, float((logprobs[True] - logprobs[False]).abs().max()), metrics


TIMES = ("second", "flops", "memory", "mfu")


def check_both(outcomes, exact=EXACT):
    for errors, of_logprobs, metrics in outcomes:
        assert of_logprobs <= 2e-6  # fp32 numbers of 7 nats
        worst = max(errors, key=errors.get, default=None)
        print(f"log-probs {of_logprobs:.1e}, gradients {errors[worst]:.1e} ({worst})" if errors else of_logprobs)
        assert not errors or errors[worst] <= exact, f"the gradient of {worst} is off by {errors[worst]:.1e}"
        for name, value in metrics[False].items():
            if not any(part in name for part in (*TIMES, "microbatches", "shared_prefix")):
                assert metrics[True][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    from tests.bridges.tiny_models import save_tiny

    @functools.cache
    def of(name, even=False):
        """``even``: layers and heads of keys can be split in two; by itself a family has odd numbers of both."""
        sizes = {"num_hidden_layers": 4} | ({} if name in LATENT_FAMILIES else {"num_key_value_heads": 2})
        return save_tiny(name, tmp_path_factory.mktemp(name), initializer_range=0.1, **(sizes if even else {}))

    return of


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAMILIES else pytest.mark.full_matrix) for name in TINY],
)
def test_families(ranks, family, branching, name):
    check_both(ranks(1, both_ways, family(name), branching, {}, dict(world=1)), EXACT_OF.get(name, EXACT))


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    "name, layout",
    [
        (name, layout)
        for name in TINY
        for layout in LAYOUTS
        if layout != "single" and not (layout == "ep2" and name in DENSE)
    ],
)
def test_families_in_layouts(ranks, family, branching, name, layout):
    layout = LAYOUTS[layout]
    outcomes = ranks(layout["world"], both_ways, family(name, even=True), branching, {}, layout)
    check_both(outcomes, EXACT_OF.get(name, EXACT))


def random_batch(seed, rows=12):
    """Rows that continue a part of an earlier row, up to six times; some add nothing to it, or are answers of
    nothing."""
    import torch

    from skyrl_megatron.types import RowSpans, TrainingBatch

    rng = np.random.default_rng(seed)
    made = [(rng.integers(0, 1003, 6), 0)]
    while len(made) < rows:
        source, depth = made[rng.integers(len(made))]
        if depth < 6:
            kept = source if rng.random() < 0.3 else source[: rng.integers(1, len(source) + 1)]
            added = rng.integers(0, 1003, rng.integers(0, 7))
            made.append((np.concatenate([kept, added]), depth + 1))
    tokens = [row for row, _ in made]
    lengths = np.array([len(row) for row in tokens])
    responses = RowSpans(np.array([rng.integers(0, length) for length in lengths]))
    mask = torch.ones(responses.size, dtype=torch.bool)
    batch = TrainingBatch(
        torch.from_numpy(np.concatenate(tokens)).int(), lengths, responses.lengths, mask, mask.clone()
    )
    batch.uids = [f"prompt-{row}" for row in range(rows)]
    batch.advantages = torch.from_numpy(rng.standard_normal(responses.size)).float()
    return reference.with_logprobs(batch, torch.full((responses.size,), -7.0), seed)


@pytest.mark.parametrize("seed", range(6))
def test_random_tries(ranks, folder, seed):
    check_both(ranks(1, both_ways, folder, random_batch(seed), {}, dict(world=1)))


LORA = "trainer.policy.model.lora."
ONE_MICRO_BATCH = {"trainer.max_tokens_per_microbatch": 1000}
WAYS = {
    "hidden states": (dict(world=2, tp=2), {"trainer.fused_lm_head_logprob": True, "trainer.logprobs_chunk_size": 7}),
    "logits in chunks": (dict(world=2, cp=2), {"trainer.logprobs_chunk_size": 7}),
    "recomputed": (dict(world=1), {"trainer.gradient_checkpointing": True} | ONE_MICRO_BATCH),
    "router losses": (
        dict(world=2, tp=2),
        # a load-balancing loss is that of a micro-batch: the same rows in both
        ONE_MICRO_BATCH
        | {
            "trainer.gradient_checkpointing": True,
            f"{MEGATRON}moe_router_load_balancing_type": "aux_loss",
            f"{MEGATRON}moe_aux_loss_coeff": 0.1,
            f"{MEGATRON}moe_z_loss_coeff": 0.05,
        },
    ),
    **{
        # of the row's own tokens: in any micro-batches
        f"balance of each row in {layout}": (
            LAYOUTS[layout],
            {f"{MEGATRON}moe_router_load_balancing_type": "seq_aux_loss", f"{MEGATRON}moe_aux_loss_coeff": 0.1},
        )
        for layout in ("tp2", "cp2")
    },
    "adapters": (
        dict(world=2, tp=2),
        {f"{LORA}rank": 4, f"{LORA}alpha": 8, f"{LORA}adapters": {"math": {}, "code": {}}},
    ),
    "rows of a micro-batch": (
        dict(world=1),
        {"trainer.max_tokens_per_microbatch": -1, "trainer.micro_train_batch_size_per_gpu": 3},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways(ranks, folder, branching, way):
    layout, overrides = WAYS[way]
    if way == "adapters":  # rows 1 and 4 are of another one
        branching = dataclasses.replace(branching, adapters=[("math", "code")[row in (1, 4)] for row in range(8)])
    check_both(ranks(layout["world"], both_ways, folder, branching, overrides, layout))


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_tokens_sampled_from_a_part_of_the_vocabulary(ranks, folder, branching, layout):
    """Rows that share a token were sampled from other entries there: each has its own softmax."""
    supported = reference.with_support(branching, 1003)
    supported = reference.with_logprobs(supported, reference.all_logprobs(folder, supported))
    check_both(ranks(2, both_ways, folder, supported, {}, LAYOUTS[layout]))


REPLAY = {f"{MEGATRON}moe_enable_routing_replay": True}


def with_routes(folder, batch):
    """The batch with natural routes, but in row 1 other ones from the fourth token of its prompt on, in row 4 other
    ones of the last layer; of row 2 only the first ten are known, of row 5 none."""
    routed = reference.natural_routes(folder, batch)
    for row, layers in ((1, slice(None)), (4, slice(3, 4))):
        routed.rollout_routes[row][3:, layers] = (routed.rollout_routes[row][3:, layers] + 1) % 4
    routed.rollout_routes[2] = routed.rollout_routes[2][:10]
    routed.rollout_routes[5] = None
    return reference.with_logprobs(routed, reference.all_logprobs(folder, routed))


@pytest.mark.parametrize("layout", ["single", pytest.param("pp2", marks=pytest.mark.full_matrix)])
def test_tokens_with_other_routes_are_not_shared(ranks, folder, branching, layout):
    layout = LAYOUTS[layout]
    overrides = REPLAY | {"trainer.gradient_checkpointing": True}
    check_both(ranks(layout["world"], both_ways, folder, with_routes(folder, branching), overrides, layout))


@pytest.mark.parametrize(
    "family, layout",
    [("deepseek_v3", "tp2"), *(pytest.param("glm4_moe", x, marks=pytest.mark.full_matrix) for x in ("cp2", "pp2"))],
)
def test_a_draft_head_reads_whole_rows(ranks, tmp_path, branching, family, layout):
    """Its layer differs from the first token on that rows do not share: each row is one sequence for it."""
    folder = draft_reference.save_with_draft(family, tmp_path)
    trained = {f"{MEGATRON}mtp.train": True, f"{MEGATRON}mtp.loss_scale": draft_reference.SCALE}
    outcomes = ranks(2, both_ways, folder, branching, trained, LAYOUTS[layout])
    assert all(metrics[True]["mtp_loss"] > 1.0 for _, _, metrics in outcomes)
    check_both(outcomes)


def test_trees_are_dealt_by_their_experts(ranks, folder, branching):
    """With moe_balance_experts micro-batches get whole trees; the plans differ, the step does not."""
    balanced = {f"{MEGATRON}moe_balance_experts": True, "trainer.max_tokens_per_microbatch": 48}
    batch = reference.natural_routes(folder, branching)
    outcomes = ranks(2, both_ways, folder, batch, REPLAY | balanced, LAYOUTS["ep2"])
    for _, _, metrics in outcomes:
        for of_pass in metrics.values():
            planned = [of_pass.pop(name) for name in list(of_pass) if "moe_microbatch" in name or "balance_s" in name]
            assert len(planned) == 4
    check_both(outcomes)


@pytest.mark.full_matrix
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(ranks, folder, branching, name):
    changes = {"policy_loss_type": name, "loss_reduction": "sequence_mean"}
    check_both(ranks(1, both_ways, folder, branching, {}, dict(world=1), None, changes))


DISTILLED = {"trainer.algorithm.distillation.loss_coef": 0.5, "trainer.algorithm.distillation.top_k": 5}


def teacher_scores(folder, batch):
    """Scores [R, 1 + 2k] of a teacher without and with shared prefixes."""
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.scoring import score_responses

    engine, scores = MegatronEngine(bodies.config(folder, overrides=SHARED)), []
    for shared in (False, True):
        engine.shares_prefixes = shared
        with sharing() if shared else contextlib.nullcontext():
            scores.append(score_responses(engine, batch, 5))
    return scores


def test_a_teachers_most_likely_tokens(ranks, folder, branching):
    """Scores are those of rows; a student learns from top-k of its own at each edge."""
    [(of_rows, shared)] = ranks(1, teacher_scores, folder, branching)
    assert (of_rows - shared).abs().max() <= 1e-5 and (of_rows[:, 6:] == shared[:, 6:]).all()
    taught = copy.copy(branching)
    taught.teacher_logprobs = of_rows[:, 0]
    taught.teacher_top_logprobs, taught.teacher_top_ids = of_rows[:, 1:6], of_rows[:, 6:].int()
    # rows that share tokens were taught by different teachers
    taught.teacher_top_ids[taught.responses.of(5)] = (taught.teacher_top_ids[taught.responses.of(5)] + 1) % 1003
    check_both(ranks(1, both_ways, folder, taught, DISTILLED, dict(world=1)))


def values(folder, batch):
    """Values [R] of a critic without and with shared prefixes."""
    from skyrl_megatron.runtime.critic import CriticEngine

    cfg = bodies.config(folder, overrides=SHARED | {"trainer.critic.model.path": str(folder)})
    engine, made = CriticEngine(cfg), []
    for shared in (False, True):
        engine.shares_prefixes = shared
        with sharing() if shared else contextlib.nullcontext():
            made.append(engine.compute_values(batch))
    return made


def test_a_critics_values(ranks, folder, branching):
    [(of_rows, shared)] = ranks(1, values, folder, branching)
    assert of_rows.std() > 0.05 and (of_rows - shared).abs().max() <= 1e-5


def siblings_see_each_other():
    """A segment's queries also see the keys of the segment packed before it, if both follow the same one."""
    from unittest import mock

    import torch

    from skyrl_megatron.runtime.model import attention
    from skyrl_megatron.runtime.model.joined_attention import BatchedPiece

    def pieces(lengths, segments, *where):
        starts, wrong = [0, *np.cumsum(lengths).tolist()], []
        for number in range(1, len(segments)):
            if segments[number][0] == segments[number - 1][0] >= 0:
                queries, keys = (torch.arange(starts[n], starts[n + 1]) for n in (number, number - 1))
                wrong.append(BatchedPiece(queries, keys, (1, len(queries), len(keys)), causal=False))
        return (*right(lengths, segments, *where), *wrong)

    right = attention.path_pieces
    return mock.patch.object(attention, "path_pieces", pieces)


def position_after_a_branch_is_one_more():
    from unittest import mock

    import torch

    from skyrl_megatron.runtime import packed_inputs

    right = packed_inputs._sequence_params

    def params(lengths, tree, rows, positions, *rest):
        follows = torch.from_numpy(tree.parents >= 0).long().repeat_interleave(torch.tensor(lengths))
        return right(lengths, tree, rows, positions + follows, *rest)

    return mock.patch.object(packed_inputs, "_sequence_params", params)


def shared_tokens_count_for_one_row():
    """A shared token's scores enter the balance of the first row alone."""
    from unittest import mock

    from skyrl_megatron.runtime import packed_inputs

    right = packed_inputs._sequences

    def sequences(tree, *where):
        made = right(tree, *where)
        first = made.of_rows.cumsum(0).eq(1.0).float() * made.of_rows
        return made._replace(of_rows=first)

    return mock.patch.object(packed_inputs, "_sequences", sequences)


def shared_keys_learn_from_one_segment():
    """The gradient of keys and values reaches them through the queries of their own segment only."""
    from unittest import mock

    from skyrl_megatron.runtime.model import attention

    class OfOwnSegment(attention.JoinedAttention):
        @staticmethod
        def backward(ctx, *gradients):
            d_query, d_key, d_value, *rest = right(ctx, *gradients)
            ctx.pieces = [piece for piece in ctx.pieces if not piece.causal]
            _, of_others, values_of_others, *_ = right(ctx, *gradients)
            return d_query, d_key - of_others, d_value - values_of_others, *rest

    right = attention.JoinedAttention.backward
    return mock.patch.object(attention, "JoinedAttention", OfOwnSegment)


def routes_of_the_wrong_row():
    """Tokens are shared although their rows have other routes."""
    from unittest import mock

    from skyrl_megatron.data import prefixes

    right = prefixes.SharedPrefixes.of
    return mock.patch.object(
        prefixes.SharedPrefixes, "of", lambda tokens, lengths, _: right(tokens, lengths, lambda *pair: pair[2])
    )


@contextlib.contextmanager
def as_from_transformer_engine():
    """Build a model as if of Transformer Engine's layers, which need a GPU: ours take their place, but for the core
    attention, which is Megatron's and has no packs. What is placed into their spec is what is tested."""
    from unittest import mock

    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from skyrl_megatron.runtime.model import build

    def spec(config, use_transformer_engine, vp_stage, pp_rank):
        model, layers = arguments[1], range(config.num_layers)
        made = build.block_spec(config, model, layers, arguments[2])
        for layer in made.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = DotProductAttention
        return made

    def remembered(*given):
        arguments[:] = given
        return right(*given)

    arguments, right = [], build._te_block_spec
    with (
        mock.patch.object(build, "use_transformer_engine", lambda *_, **__: True),
        mock.patch.object(build, "_has_fused_rotary", lambda _: False),  # Megatron would ask for the kernel
        mock.patch.object(build, "get_gpt_decoder_block_spec", spec),
        mock.patch.object(build, "_te_block_spec", remembered),
    ):
        yield


UNFUSED = {
    f"{MEGATRON}transformer_config_kwargs.{name}": False
    for name in ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm",
                 "moe_permute_fusion")
}  # fmt: skip


def both_ways_in_their_layers(*arguments):
    with as_from_transformer_engine():
        return both_ways(*arguments)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("cp2", marks=pytest.mark.full_matrix)])
def test_transformer_engines_layers_get_our_attention(ranks, folder, branching, layout):
    check_both(ranks(2, both_ways_in_their_layers, folder, branching, UNFUSED, LAYOUTS[layout]))


FAULTS = {
    fault.__name__: fault
    for fault in (
        siblings_see_each_other,
        position_after_a_branch_is_one_more,
        shared_keys_learn_from_one_segment,
        shared_tokens_count_for_one_row,
        routes_of_the_wrong_row,
    )
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(ranks, folder, branching, fault):
    batch = with_routes(folder, branching) if fault == "routes_of_the_wrong_row" else branching
    _, balance = WAYS["balance of each row in tp2"]
    overrides = {"routes_of_the_wrong_row": REPLAY, "shared_tokens_count_for_one_row": balance}.get(fault, {})
    outcomes = ranks(1, both_ways, folder, batch, overrides, dict(world=1), fault)
    with pytest.raises(AssertionError):
        check_both(outcomes)
