"""``skyrl-megatron dpo`` as users start it."""

import math

import pytest

from tests.job import row_runs
from tests.job.row_runs import exported, metrics_of, run, steps_of

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return row_runs.prepare(tmp_path_factory.mktemp("dpo"))


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """(folder, output) of a run that nothing interrupts."""
    place = tmp_path_factory.mktemp("whole")
    return place, run("dpo", folder, place)


@pytest.fixture(scope="module")
def cached(folder, tmp_path_factory):
    """The same of a run that keeps the log-probs of the reference."""
    place = tmp_path_factory.mktemp("cached")
    return place, run("dpo", folder, place, **{"dpo.reference_cache": place / "cache"})


def test_the_better_answers_are_preferred(whole):
    """The reference is the policy at first, so the loss begins at log 2."""
    place, out = whole
    lines = metrics_of(place)
    steps = steps_of(place)
    assert steps[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5) and len(steps) == 4
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    held_out = [line for line in lines if "eval/all/loss" in line]
    assert held_out[0]["eval/all/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert held_out[-1]["eval/all/loss"] < 0.6 and held_out[-1]["eval/all/rewards/accuracies"] > 0.8
    assert held_out[-1]["eval/pairs.jsonl/rewards/margins"] > 0.2
    assert "ended after step 4 of 4" in out and "model.safetensors" in "".join(exported(place))


@pytest.mark.full_matrix
@pytest.mark.parametrize("moment", ["the reference", "a checkpoint", "a step"])
def test_a_killed_run_is_resumed_bit_for_bit(folder, tmp_path, cached, moment):
    keys = {"dpo.reference_cache": tmp_path / "cache"}
    row_runs.kill_during(moment, row_runs.start("dpo", folder, tmp_path, **keys), tmp_path)
    out = run("dpo", folder, tmp_path, **keys)
    assert ("resumed from" in out) == (moment == "a step") and ("ref on 2" in out) == (moment == "the reference")
    assert exported(tmp_path) == exported(cached[0])


ADAPTERS = {"dpo.beta": 2.0, "trainer.policy.model.lora.rank": 8, "trainer.policy.model.lora.alpha": 16}


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    "loss, data, keys",
    [("sigmoid", "pairs", ADAPTERS), ("ipo", "pairs", {}), ("kto", "labelled", {})],
    ids=["lora", "ipo", "kto"],
)
def test_other_losses_and_a_reference_without_adapters(folder, tmp_path, loss, data, keys):
    """With adapters there is one model. Its loss begins at log 2, whatever β is; ``ipo`` begins at 1/(2β)², ``kto``
    at 1/2."""
    out = run("dpo", folder, tmp_path, data=data, **{"dpo.loss": loss, "trainer.hf_save_interval": -1}, **keys)
    losses = [line["dpo/loss"] for line in steps_of(tmp_path)]
    assert losses[0] == pytest.approx({"sigmoid": math.log(2), "ipo": 1.0, "kto": 0.5}[loss], abs=1e-4)
    held_out = [line["eval/all/loss"] for line in metrics_of(tmp_path) if "eval/all/loss" in line]
    assert held_out[-1] < held_out[0]
    assert ("ref on" in out) == (not keys)


@pytest.mark.full_matrix
def test_log_probs_of_the_reference_are_kept(folder, tmp_path, whole, cached):
    """The second run starts no reference and takes the same steps. A cache of other data is not used."""
    cache = {"dpo.reference_cache": cached[0] / "cache"}
    assert "ref on 2" in cached[1] and "log-probs of 64 rows are in" in cached[1]
    second = run("dpo", folder, tmp_path / "second", **cache)
    assert "ref on" not in second and "its log-probs are in" in second
    assert exported(cached[0]) == exported(tmp_path / "second")
    losses = [[line["dpo/loss"] for line in steps_of(place)] for place in (tmp_path / "second", whole[0])]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    (folder / "fewer.jsonl").write_text("".join((folder / "pairs.jsonl").read_text().splitlines(keepends=True)[:32]))
    keys = {"trainer.max_training_steps": 1, "trainer.hf_save_interval": -1}
    third = run("dpo", folder, tmp_path / "third", data="fewer", **cache, **keys)
    assert "train.safetensors is of another data: the log-probs of the reference are computed again" in third
    assert "ref on 2" in third and "log-probs of 32 rows are in" in third
