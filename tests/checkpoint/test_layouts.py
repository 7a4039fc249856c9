"""Saved at one layout, loaded at any other: every weight and moment bit-equal, and training goes on the same."""

import pytest

from tests.checkpoint import training
from tests.checkpoint.ranks import RankCheckpointer

SAVED_AT = "tp2·dp2·ep2"
PLAIN = ["single", "pp2·vpp2", "dp2·ep2"]
PAIRS = [(a, b) for a in ("tp2·dp2·ep2", "pp2·vpp2·dp2·ep2", "tp2·cp2·ep4") for b in training.LAYOUTS if a != b]


def save_body(folder, root, layout):

    engine = training.engine(folder, layout)
    training.train(engine, [1, 2])
    checkpointer = RankCheckpointer(root, training.state_of(engine))
    assert checkpointer.save(2, data={"epoch": 1}, trainer_state={"kl_coef": 0.25})
    checkpointer.close()
    held = training.global_digests(engine)
    return held, training.train(engine, [3, 4, 5])


def load_body(folder, root, layout):
    import warnings

    engine = training.engine(folder, layout, seed=7)
    training.train(engine, [10])  # away from the weights of the folder; moments are not zero
    checkpointer = RankCheckpointer(root, training.state_of(engine))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = checkpointer.load()
    assert resumed.step == 2 and resumed.data == {"epoch": 1} and resumed.trainer_state == {"kl_coef": 0.25}
    held = training.global_digests(engine)
    return held, training.train(engine, [3, 4, 5]), [str(each.message) for each in caught]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return training.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(ranks, folder, tmp_path_factory):
    """Layout → (checkpoint root, digests of all global tensors, losses of the steps after). Saved once each."""
    made = {}

    def get(layout):
        if layout not in made:
            root = str(tmp_path_factory.mktemp("checkpoints"))
            made[layout] = (root, *ranks(training.LAYOUTS[layout]["world"], save_body, folder, root, layout)[0])
        return made[layout]

    return get


def check(ranks, folder, saved, source, target):
    root, held, following = saved(source)
    results = ranks(training.LAYOUTS[target]["world"], load_body, folder, root, target)
    loaded, losses, messages = results[0]
    assert len(held) == 48  # 12 weights, each with fp32 param and two moments
    assert loaded == held
    for (loss, norm), (expected_loss, expected_norm) in zip(losses, following, strict=True):
        assert loss == pytest.approx(expected_loss, rel=2e-6, abs=2e-6)
        assert norm == pytest.approx(expected_norm, rel=2e-5)
    assert any("new random states are derived from seed 42 and step 2" in message for message in messages)


@pytest.mark.parametrize("target", PLAIN)
def test_loads_elsewhere(ranks, folder, saved, target):
    check(ranks, folder, saved, SAVED_AT, target)


@pytest.mark.full_matrix
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_matrix(ranks, folder, saved, source, target):
    check(ranks, folder, saved, source, target)
