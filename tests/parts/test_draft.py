"""The draft head (multi-token prediction): it learns what a plain formula says, and nothing else changes by a bit."""

import pytest

from tests.training import draft_reference, reference
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED, config

TRAINED = {f"{MEGATRON}mtp.train": True, f"{MEGATRON}mtp.loss_scale": draft_reference.SCALE}
LAYOUTS = {
    "single": dict(world=1),
    "tp2": dict(world=2, tp=2),
    "ep2": dict(world=2, ep=2),
    "pp2": dict(world=2, pp=2),
    "cp2": dict(world=2, cp=2),
    "tp2·ep2": dict(world=2, tp=2, ep=2),
    "tp2·pp2": dict(world=4, tp=2, pp=2),
    "tp2·cp2·ep4": dict(world=4, tp=2, cp=2, ep=4),
}
PLAIN = {("deepseek_v3", "single"), ("deepseek_v3", "tp2"), ("glm4_moe", "pp2")}
CASES = [
    pytest.param(family, layout, marks=[] if (family, layout) in PLAIN else pytest.mark.full_matrix)
    for family in ("deepseek_v3", "glm4_moe")
    for layout in LAYOUTS
] + [pytest.param("glm4_moe_lite", "tp2", marks=pytest.mark.full_matrix)]


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """Family → (HF folder, batch, what the reference says of it)."""
    made = {}

    def get(family):
        if family not in made:
            folder = draft_reference.save_with_draft(family, tmp_path_factory.mktemp(family))
            batch = reference.make_batch(vocab_size=1003)
            batch.old_logprobs = batch.rollout_logprobs = batch.ref_logprobs = batch.response_mask * -6.0
            made[family] = folder, batch, draft_reference.foretell(folder, batch, tmp_path_factory.mktemp("grads"))
        return made[family]

    return get


def part_of(engine, batch):
    from skyrl_megatron.data.splitting import split_for_dp

    rows = split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank]
    return rows, batch.select(rows)


def foretold(folder, batch, expected, layout, overrides):
    """Of this rank: largest error of log-probs in nats, relative L2 errors of gradients by HF name, loss, acceptance,
    the head's gradient norm."""
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import stream_hf
    from skyrl_megatron_parts.draft import DraftLoss

    engine = MegatronEngine(config(folder, **layout, overrides=NO_DISTRIBUTED | TRAINED | overrides))
    rows, part = part_of(engine, batch)
    errors, plain = [0.0], DraftLoss.logprobs

    def seen(self, micro_batch):
        found, valid = plain(self, micro_batch)
        for values, there, row in zip(found, valid, rows[micro_batch.rows], strict=False):
            want = expected.logprobs[int(row)]
            mine = values[-len(want) :]
            assert (there[-len(want) :] == ~want.isnan()).all()
            errors.append(float((mine - want).abs().nan_to_num().max()))
        return found, valid

    DraftLoss.logprobs = seen
    try:
        metrics = engine.forward_backward(part)
    finally:
        DraftLoss.logprobs = plain
    engine.reduce_gradients()
    gradients = {
        piece.name: float((piece.tensor - expected.grads[piece.name]).norm() / expected.grads[piece.name].norm())
        for piece in stream_hf(engine.model, engine.groups, of=lambda parameter: parameter.main_grad)
        if piece.name.startswith(draft_reference.PREFIX) and not piece.name.endswith("correction_bias")
    }
    return max(errors), gradients, metrics["mtp_loss"], metrics["mtp_acceptance"], own_norm(engine)


def own_norm(engine):
    """The gradient norm by which the step clips the draft head, after gradients are reduced."""
    from skyrl_megatron.runtime.optimizer import _group_norm

    engine.optimizer.prepare_grads()
    return _group_norm(engine.optimizer, "mtp")


def norm_only(folder, batch, layout):
    """:func:`own_norm` with the distributed optimizer, which has no whole gradients to look at."""
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine = MegatronEngine(config(folder, **layout, overrides=TRAINED))
    engine.forward_backward(part_of(engine, batch)[1])
    engine.reduce_gradients()
    return own_norm(engine)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "cp2" else pytest.mark.full_matrix) for name in LAYOUTS]
)
def test_the_norm_with_the_distributed_optimizer(ranks, drafted, layout):
    folder, batch, expected = drafted("deepseek_v3")
    check_norms(ranks(LAYOUTS[layout]["world"], norm_only, folder, batch, LAYOUTS[layout]), expected)


def check_norms(norms, expected):
    want = sum(float(expected.grads[name].double().square().sum()) for name in trained(expected)) ** 0.5
    print(f"norm {max(abs(norm / want - 1) for norm in norms):.1e}")
    assert norms == pytest.approx([want] * len(norms), rel=1e-6)  # at most 2e-7 was seen


def trained(expected):
    """HF names of what only the draft head has, and trains."""
    return {
        name for name in expected.grads if not any(part in name for part in ("correction_bias", "embed", "head.head"))
    }


@pytest.mark.full_matrix
@pytest.mark.parametrize("layout", ["single", "pp2"])
def test_it_is_the_same_beside_recomputed_layers(ranks, drafted, layout):
    check_formula(ranks, drafted, "deepseek_v3", layout, {"trainer.gradient_checkpointing": True})


@pytest.mark.parametrize("family, layout", CASES)
def test_foretold_log_probs_and_gradients_are_those_of_the_formula(ranks, drafted, family, layout):
    check_formula(ranks, drafted, family, layout, {})


def check_formula(ranks, drafted, family, layout, overrides):
    folder, batch, expected = drafted(family)
    found = ranks(LAYOUTS[layout]["world"], foretold, folder, batch, expected, LAYOUTS[layout], overrides)
    gradients = {name: error for each in found for name, error in each[1].items()}
    assert set(gradients) == trained(expected)
    worst = max(gradients, key=gradients.get)
    print(f"log-probs {max(each[0] for each in found):.1e}, gradients {gradients[worst]:.1e} ({worst})")
    check_norms([each[-1] for each in found], expected)
    for error, _, loss, acceptance, _ in found:
        assert error <= 1e-4
        assert loss == pytest.approx(expected.loss, rel=1e-5)
        assert 0 < acceptance < 1
    assert gradients[worst] <= 1e-4, worst


def digests(engine, of=None):
    """HF name → digest of the tensor, of those that this rank puts together."""
    import hashlib

    from skyrl_megatron.runtime.hf_weights import stream_hf

    pieces = stream_hf(engine.model, engine.groups, **({} if of is None else {"of": of}))
    return {
        f"{piece.name} {piece.index}": hashlib.sha256(piece.tensor.contiguous().numpy().tobytes()).hexdigest()
        for piece in pieces
    }


def two_steps(folder, batch, layout, overrides):
    """What two steps make: digests of gradients, where they are whole, norms, metrics, digests of weights."""
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine = MegatronEngine(config(folder, **layout, overrides=overrides))
    _, part = part_of(engine, batch)
    gradients, norms, metrics = [], [], []
    for _ in range(2):
        metrics.append(engine.forward_backward(part))
        engine.reduce_gradients()
        if not engine.optimizer.config.use_distributed_optimizer:
            gradients.append(digests(engine, lambda parameter: parameter.main_grad))
        norms.append(engine.optim_step().grad_norm)
    return gradients, norms, metrics, digests(engine)


@pytest.mark.parametrize(
    "family, layout",
    [
        ("deepseek_v3", "single"),
        *(
            pytest.param(*each, marks=pytest.mark.full_matrix)
            for each in (
                *(("deepseek_v3", layout) for layout in ("ep2", "pp2", "cp2", "tp2·pp2")),
                *(("glm4_moe", layout) for layout in ("single", "tp2")),
            )
        ),
    ],
)
@pytest.mark.parametrize("distributed", [False, True], ids=["whole optimizer", "distributed optimizer"])
def test_nothing_else_changes_by_a_bit(ranks, drafted, family, layout, distributed):
    """Gradients, their norm, metrics and weights of all else, over two steps that clip."""
    folder, batch, _ = drafted(family)
    plain = {} if distributed else NO_DISTRIBUTED
    with_draft, without = (
        ranks(LAYOUTS[layout]["world"], two_steps, folder, batch, LAYOUTS[layout], plain | more)
        for more in (TRAINED, {})
    )
    changed = set()
    for (grads, norms, metrics, weights), (own_grads, own_norms, own_metrics, own_weights) in zip(
        with_draft, without, strict=True
    ):
        assert norms == own_norms and min(norms) > reference.MAX_GRAD_NORM
        for ours, theirs in zip([*grads, weights], [*own_grads, own_weights], strict=True):
            assert {name: each for name, each in ours.items() if name in theirs} == theirs
            assert all(name.startswith(draft_reference.PREFIX) for name in set(ours) - set(theirs))
        for ours, theirs in zip(metrics, own_metrics, strict=True):
            lasting = {n for n in theirs if "_per_" not in n and "memory" not in n}
            assert {name: ours[name] for name in lasting} == {name: theirs[name] for name in lasting}
        changed |= {name for name in weights if name.startswith(draft_reference.PREFIX)}
    assert changed, "no rank trained the draft head"


def saved(folder, batch, root, layout, exported):
    """Train, save and export; digests of the weights, and of those after one step more."""
    from skyrl_megatron.runtime.checkpoint.rank_files import RankState
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import save_hf
    from tests.checkpoint.ranks import RankCheckpointer

    engine = MegatronEngine(config(folder, **layout, overrides=TRAINED))
    save_hf(engine.model, engine.groups, exported)
    _, part = part_of(engine, batch)
    engine.forward_backward(part)
    engine.optim_step()
    state = RankState(engine.chunks, engine.groups, engine.optimizer, engine.lr_schedule)
    checkpointer = RankCheckpointer(root, state)
    assert checkpointer.save(1)
    checkpointer.close()
    return digests(engine)


def loaded(folder, root, layout):
    from skyrl_megatron.runtime.checkpoint.rank_files import RankState
    from skyrl_megatron.runtime.engine import MegatronEngine
    from tests.checkpoint.ranks import RankCheckpointer

    engine = MegatronEngine(config(folder, **layout, overrides=TRAINED))
    state = RankState(engine.chunks, engine.groups, engine.optimizer, engine.lr_schedule)
    assert RankCheckpointer(root, state).load().step == 1
    return digests(engine)


@pytest.mark.parametrize(
    "source, target", [("single", "tp2"), pytest.param("tp2·ep2", "pp2", marks=pytest.mark.full_matrix)]
)
def test_it_is_exported_saved_and_loaded_elsewhere(ranks, drafted, tmp_path, source, target):
    from safetensors.torch import load_file

    folder, batch, _ = drafted("deepseek_v3")
    root, exported = str(tmp_path / "checkpoints"), tmp_path / "exported"
    held = ranks(LAYOUTS[source]["world"], saved, folder, batch, root, LAYOUTS[source], exported)
    found = ranks(LAYOUTS[target]["world"], loaded, folder, root, LAYOUTS[target])
    before, after = ({k: v for each in results for k, v in each.items()} for results in (held, found))
    assert before == after and any(name.startswith(draft_reference.PREFIX) for name in before)
    original = load_file(folder / "model.safetensors")
    written = {name: t for path in exported.glob("*.safetensors") for name, t in load_file(path).items()}
    assert written.keys() == original.keys()
    assert all(written[name].float().equal(original[name].float()) for name in original)


def test_models_without_a_layer_that_is_trained_are_refused():
    from bridges.errors import BridgeError
    from bridges.plan import Plan
    from tests.bridges.tiny_models import tiny_config

    with pytest.raises(BridgeError, match=r"model_type=qwen3_moe: .* remove mtp.train, which supports deepseek_v3"):
        Plan.of(tiny_config("qwen3_moe"), draft=True)
    for layers in (0, 2):
        config = tiny_config("deepseek_v3") | {"num_nextn_predict_layers": layers}
        with pytest.raises(BridgeError, match=rf"num_nextn_predict_layers={layers}: .*remove mtp.train"):
            Plan.of(config, draft=True)
