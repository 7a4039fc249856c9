"""Recorders that fail, and which of them end a run. tests/plugins/test_plugins.py has a real run with recorders."""

import pytest


@pytest.fixture
def registered(monkeypatch):
    """A registry of its own: what a test registers, no other run gets."""
    from skyrl_megatron.plugins import Additions
    from skyrl_megatron.trainer import recorders

    registry = Additions()
    monkeypatch.setattr(recorders, "RECORDERS", registry)
    return registry


@pytest.fixture
def run():
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.trainer.recorders import RecordedRun

    return RecordedRun(SkyRLTrainConfig(), None, 2, None, None, dict)


def failing(error, **attributes):
    """A recorder that raises at the end of each step, and counts."""
    from skyrl_megatron.trainer.recorders import RunRecorder

    def on_step_end(self, step, roles):
        type(self).calls.append(step)
        raise error

    return type("Failing", (RunRecorder,), {"on_step_end": on_step_end, "calls": [], **attributes})


def counting():
    from skyrl_megatron.trainer.recorders import RunRecorder

    class Counting(RunRecorder):
        def __init__(self, run):
            super().__init__(run)
            self.steps = []

        def on_step_end(self, step, roles):
            self.steps.append(step)

        def step_metrics(self, lengths, metrics, device_type):
            return {"mine/steps": float(len(self.steps))}

        def rank_metrics(self, seconds):
            return {f"mine/{role}_ranks": float(len(of_ranks)) for role, of_ranks in seconds.items()}

        def on_hang(self):
            return f"; {len(self.steps)} steps"

    return Counting


def test_one_that_fails_is_reported_with_its_name_and_left_out(registered, run):
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.trainer.recorders import Recorders

    broken, good = failing(KeyError("column")), counting()
    registered.register(broken)
    registered.register(good)
    recorders = Recorders(run)
    with pytest.warns(SkyRLMegatronWarning, match="Failing failed in on_step_end and records no more") as issued:
        recorders.on_step_end(1, {})
        recorders.on_step_end(2, {})
    assert len(issued) == 1 and "KeyError: 'column'" in str(issued[0].message)
    [left] = recorders
    assert broken.calls == [1] and left.steps == [1, 2]
    assert recorders.step_metrics(None, {}, lambda: None) == {"mine/steps": 2.0} and recorders.on_hang() == "; 2 steps"
    assert recorders.rank_metrics({"policy": {"policy rank 0": 0.5}, "critic": {}}) == {
        "mine/policy_ranks": 1.0,
        "mine/critic_ranks": 0.0,
    }


@pytest.mark.parametrize("attributes", [{}, {"ends_run": True}], ids=["optional", "needed"])
def test_errors_of_the_run_itself_pass(registered, run, attributes):
    """A recorder that asks a lost rank must not hide that it is lost."""
    from skyrl_megatron.errors import RankLostError
    from skyrl_megatron.trainer.recorders import Recorders

    registered.register(failing(RankLostError("policy rank 0: the process died", "policy"), **attributes))
    recorders = Recorders(run)
    for _ in range(2):
        with pytest.raises(RankLostError):
            recorders.on_step_end(1, {})


def test_a_full_disk_ends_a_run_that_needs_its_records(registered, run):
    from skyrl_megatron.trainer.recorders import Recorders

    registered.register(failing(OSError(28, "No space left on device"), ends_run=True))
    with pytest.raises(OSError, match="No space"):
        Recorders(run).on_step_end(1, {})


def test_one_that_cannot_be_made_is_reported(registered, run):
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.trainer.recorders import Recorders, RunRecorder

    class Unmade(RunRecorder):
        def __init__(self, run):
            raise ValueError("no address")

    good = counting()
    registered.register(Unmade)
    registered.register(good)
    with pytest.warns(SkyRLMegatronWarning, match=r"test_recorders\..*Unmade failed in its start .*no address"):
        recorders = Recorders(run)
    assert [type(recorder) for recorder in recorders] == [good]


@pytest.mark.around
def test_what_every_run_has():
    """The recorders of the packages around the core enter by the same door."""
    from skyrl_megatron.plugins import RECORDERS

    names = [recorder.__name__ for recorder in RECORDERS.all()]
    assert {"TrajectoryRecorder", "HangRecorder", "BatchRecorder", "CurvesRecorder", "ReportRecorder"} <= set(names)
    assert names.index("CurvesRecorder") < names.index("ReportRecorder"), "the last page is written after the curves"
