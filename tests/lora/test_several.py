"""Several adapters on one base: each is bit for bit what it would be if it had been trained alone."""

import pytest

from tests.lora import several
from tests.training.conftest import batch, folder  # noqa: F401

LAYOUTS = {"single": dict(world=1), "tp2·dp2·ep2": dict(world=4, tp=2, ep=2)}
MORE = {
    "tp2": dict(world=2, tp=2),
    "ep2": dict(world=2, ep=2),
    "dp2": dict(world=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "tp2·etp2": dict(world=2, tp=2, etp=2),
}
LABELS = ["mcmcmmc", "mcmmcmc", "cmmcmcc"]
DROPOUT = {"trainer.policy.model.lora.dropout": 0.2}


def compare(ranks, folder, batch, layout, overrides, labels=LABELS, fault=None):  # noqa: F811
    found = ranks(layout["world"], several.together, folder, batch, labels, layout, overrides, fault)
    for name in several.NAMES:
        expected = ranks(layout["world"], several.alone, folder, batch, labels, layout, overrides, name)
        for rank, (own, alone) in enumerate(zip(found, expected, strict=True)):
            state, seen, scores = own[name]
            assert alone[0]["steps"] == len(seen) > 0 and len(state) > 30
            assert seen == alone[1], f"{name} measures otherwise on rank {rank}"
            wrong = [key for key, value in alone[0].items() if state[key] != value]
            assert not wrong, f"{name} on rank {rank} differs in {len(wrong)} of {len(state)}: {wrong[:3]}"
            assert scores == alone[2], f"log-probs of {name}'s rows differ on rank {rank}"


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full_matrix) for name in MORE)])
def test_each_is_as_if_alone(ranks, folder, batch, name):  # noqa: F811
    compare(ranks, folder, batch, (LAYOUTS | MORE)[name], DROPOUT)


def test_an_adapter_without_rows_takes_no_step(ranks, folder, batch):  # noqa: F811
    labels = ["mmmmmmm", "mcmcmcm", "mmmmmmm"]
    compare(ranks, folder, batch, dict(world=1), {}, labels)
    (found,) = ranks(1, several.together, folder, batch, labels[:1], dict(world=1), {})
    (start,) = ranks(1, several.together, folder, batch, [], dict(world=1), {})
    assert found["code"][0] == start["code"][0] and found["math"][0] != start["math"][0]


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    "fault", ["clipped by the joint norm", "loss over the rows of all", "one stream of random numbers"]
)
def test_planted_faults_are_seen(ranks, folder, batch, fault):  # noqa: F811
    with pytest.raises(AssertionError):
        compare(ranks, folder, batch, dict(world=1), DROPOUT, fault=fault)


@pytest.mark.parametrize("name", ["single", pytest.param("tp2·dp2·ep2", marks=pytest.mark.full_matrix)])
def test_resumed_from_a_checkpoint(ranks, folder, batch, tmp_path, name):  # noqa: F811
    layout, root = LAYOUTS[name], str(tmp_path)
    expected = ranks(layout["world"], several.saved, folder, batch, LABELS, layout, DROPOUT, root)
    assert {path.name for path in (tmp_path / "global_step_1" / "policy").iterdir()} == set(several.NAMES)
    found = ranks(layout["world"], several.resumed, folder, batch, LABELS, layout, DROPOUT, root)
    assert found == expected
    (only,) = several.NAMES[1:]
    some = ranks(layout["world"], several.resumed, folder, batch, LABELS, layout, DROPOUT, root, (only,))
    assert [each[only] for each in some] == [each[only] for each in expected]
    loaded = [
        ranks(layout["world"], several.loaded, folder, layout, DROPOUT, root, only, names)
        for names in (only, several.NAMES)
    ]
    if layout["world"] == 1:
        (error,) = ranks(1, several.misnamed, folder, root)
        assert "holds policy/code, policy/math, not policy; check the names in trainer.policy" in error
    assert loaded[0] == loaded[1] and len(loaded[0][0]) > 30


def test_adapter_folders(ranks, folder, batch, tmp_path):  # noqa: F811
    (found,) = ranks(1, several.exported, folder, batch, LABELS[:1], str(tmp_path))
    assert found["math"] != found["code"] and (tmp_path / "code" / "adapter_config.json").is_file()
    for name in several.NAMES:
        assert ranks(1, several.imported, folder, name, str(tmp_path)) == [found[name]]


def test_memory_leaves_and_comes_back(ranks, folder, batch):  # noqa: F811
    stayed, left = (ranks(1, several.away_and_back, folder, batch, LABELS, leaves) for leaves in (False, True))
    assert left == stayed


def test_unknown_adapters_are_refused(ranks, folder, batch):  # noqa: F811
    ((messages, stepped),) = ranks(1, several.refused, folder, batch, several.NAMES)
    assert messages == ["row 3 of the batch belongs to adapter 'poetry'; known: math, code"] * 2
    assert stepped == ["math"]
    ((messages, stepped),) = ranks(1, several.refused, folder, batch, "math")
    assert "trainer.policy.model.lora.adapters is empty" in messages[0] and stepped == []
