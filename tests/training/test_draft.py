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
]


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
    """Largest errors of this rank: (log-probs in nats, relative L2 of gradients by HF name, the metric)."""
    from skyrl_megatron.runtime.draft_loss import DraftLoss
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf.export import stream_hf

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
    return max(errors), gradients, metrics["mtp_loss"], metrics["mtp_acceptance"]


@pytest.mark.parametrize("family, layout", CASES)
def test_foretold_log_probs_and_gradients_are_those_of_the_formula(ranks, drafted, family, layout):
    folder, batch, expected = drafted(family)
    found = ranks(LAYOUTS[layout]["world"], foretold, folder, batch, expected, LAYOUTS[layout], {})
    gradients = {name: error for _, own, _, _ in found for name, error in own.items()}
    wanted = {n for n in expected.grads if "correction_bias" not in n and "embed" not in n and "head.head" not in n}
    assert set(gradients) == wanted
    worst = max(gradients, key=gradients.get)
    print(f"log-probs {max(each[0] for each in found):.1e}, gradients {gradients[worst]:.1e} ({worst})")
    for error, _, loss, acceptance in found:
        assert error <= 1e-4
        assert loss == pytest.approx(expected.loss, rel=1e-5)
        assert 0 < acceptance < 1
    assert gradients[worst] <= 1e-4, worst
