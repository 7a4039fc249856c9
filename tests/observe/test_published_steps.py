"""The estimate of a step against steps that others published. Nothing is timed: the bounds are compared."""

import warnings

import numpy as np
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def estimated():
    """(run, seconds as published) of every run of the file."""
    from benchmarks import step_on_paper

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(run, step_on_paper.step_seconds(run)) for run in step_on_paper.published_runs()]


def test_every_third_run_without_a_split_is_kept_from_the_fit():
    """The rule of the file, by which nobody chose them. Runs of training alone are counted on."""
    from benchmarks.step_on_paper import published_runs

    kept = [run.fit for run in published_runs() if not run.split and run.name != "Qwen3.5-35B"]
    assert kept == [number % 3 != 0 for number in range(1, len(kept) + 1)]


def test_published_steps_are_inside_the_bounds(estimated):
    """Of those in the fit 92 % are inside and 75 % within 35 % of the likely step, and bounds are not just wide."""
    fitted = [(run, step) for run, step in estimated if run.fit]
    assert len(fitted) >= 12 and len({run.source.split()[0] for run, _ in fitted}) >= 3
    inside = [run.name for run, step in fitted if step.low <= run.seconds <= step.high]
    close = [run.name for run, step in fitted if abs(step.likely / run.seconds - 1) <= 0.35]
    assert len(inside) >= 11 / 12 * len(fitted) and len(close) >= 9 / 12 * len(fitted)
    assert np.median([step.high / step.low for _, step in fitted]) <= 2.6


@pytest.mark.parametrize(
    ("name", "source", "gpus", "low", "high"),
    [
        ("30B", "nemo 0.6", 32, 128, 295),
        ("30B, lag 1", "nemo 0.6", 32, 108, 269),
        ("235B", "nemo 0.6", 128, 295, 738),
        ("DeepSeek-V3", "nemo 0.6", 256, 71.1, 197),
        ("DeepSeek-V3, lag 1", "nemo 0.6", 512, 48.5, 130),
        ("Qwen3-32B", "nemo 0.5", 32, 290, 583),
        ("Llama 8B", "nemo 0.4", 16, 72.8, 153),
        ("30B", "pr2964", 32, 66.7, 210),
        ("DeepSeek-V3", "dpsk", 96, 604, 1860),
        ("Qwen3.5-35B", "v1", 32, 291, 703),
        ("30B, training", "bridge", 16, 20, 76.2),
        ("30B, training", "automodel", 8, 17.6, 37.2),
    ],
)
def test_bounds_of_twelve_shapes(estimated, name, source, gpus, low, high):
    """Recorded: a change of a formula or constant shows here, and is recorded anew if it is meant."""
    (step,) = (
        step
        for run, step in estimated
        if (run.name, run.source, run.gpus) == (name, source, gpus) and run.gpu != "GB200"
    )
    assert (step.low, step.high) == pytest.approx((low, high), rel=0.01)


@pytest.mark.parametrize(("name", "tolerance"), [("30B, all-to-all", 1.8), ("30B", 2.6)])
def test_terms_are_those_of_published_splits(estimated, name, tolerance):
    """Generation, log-probs, training, sync and the rest of 30B on 32 B200, with either exchange of tokens."""
    from benchmarks.step_on_paper import estimate
    from skyrl_megatron_observe.estimate.step_report import SHOWN

    (run,) = (run for run, _ in estimated if (run.name, run.source) == (name, "pr2964"))
    found = estimate(run)
    terms = {term.name: term.elsewhere.likely for term in found.terms if term.elsewhere is not None}
    likely = {name: found.phase(phase).likely for phase, name in SHOWN.items()}
    likely |= {"sync": terms["sync"] + found.machine.switch.likely, "rest": terms["data"]}
    apart = {phase: likely[phase] / seconds for phase, seconds in run.split.items()}
    assert set(apart) == set(likely) and abs(apart.pop("generate") - 1) < 0.15
    assert all(1 / tolerance < ratio < tolerance for ratio in apart.values()), apart


def test_what_is_faster_here_says_by_how_much(estimated):
    """Syncs and batches count as theirs for their steps, and their measured ratio is in the line of the term."""
    from benchmarks.step_on_paper import estimate
    from skyrl_megatron_observe.estimate.step_report import term_lines

    run = next(run for run, _ in estimated if run.name == "30B")
    found = estimate(run)
    assert found.published().likely > found.step.likely
    lines = [line for line in term_lines(found) if "x of what published frameworks take" in line]
    assert [line.split()[0] for line in lines] == ["sync", "data"]
