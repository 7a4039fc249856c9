"""The queue of an asynchronous run on paper: against arithmetic, and its line in the report of a check."""

import pytest


def on_paper(group_s, train_s, sync_s=0.25, *, bound=1, workers=16, batch=8, ahead=None):
    from skyrl_megatron.sources.rollout_stream import StreamLimits
    from skyrl_megatron_observe.estimate.staleness import run_ahead

    limits = StreamLimits(batch=batch, steps=0, bound=bound, workers=workers, ahead=ahead)
    return run_ahead(limits, group_s if callable(group_s) else lambda number: group_s, train_s, sync_s)


@pytest.mark.parametrize(
    ("group_s", "train_s", "changes", "step_s", "mean"),
    [
        (1.0, 1.0, {}, 1.25, 1.0),
        (1.0, 3.0, {}, 3.25, 1.0),  # training hides sampling
        (1.0, 3.0, {"bound": 4, "workers": 80}, 3.25, 4.0),  # engines run as far ahead as they may
        (5.0, 1.0, {"workers": 8}, 5.25, 1.0),  # sampling hides training, but waits during the sync
        (5.0, 0.1, {"bound": 2, "workers": 24}, (5 + 0.1 + 3 * 0.25) / 3, 2.0),  # three batches at the same time
        (1.0, 1.0, {"bound": 0}, 2.25, 0.0),  # the synchronous run
    ],
)
def test_the_longer_half_decides(group_s, train_s, changes, step_s, mean):
    queue = on_paper(group_s, train_s, **changes)
    assert queue.step_s == pytest.approx(step_s)
    assert queue.mean == pytest.approx(mean) and queue.most <= changes.get("bound", 1)


def test_a_straggler_delays_its_group_alone():
    """One group of each batch takes eight times as long: it trains later, and the others do not wait for it."""

    def group_s(number):
        return 8.0 if number % 8 == 0 else 1.0

    waits, runs_ahead = on_paper(group_s, 1.0, bound=0), on_paper(group_s, 1.0, bound=8, workers=72)
    assert waits.step_s == pytest.approx(9.25)
    assert runs_ahead.step_s == pytest.approx(1.25) and runs_ahead.most == 8


def test_fewer_batches_ahead_are_less_stale():
    far, near = (on_paper(1.0, 3.0, bound=4, workers=80, ahead=ahead) for ahead in (None, 1.0))
    assert near.step_s == far.step_s and near.mean < far.mean
