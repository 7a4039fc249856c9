"""What is read of a run's folder, at any moment of its life, and what is refused."""

import json

import numpy as np
import pytest


def lines(path, *entries):
    with path.open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def reader(folder):
    from skyrl_megatron_observe.run_report import RunReader

    return RunReader(folder)


def test_what_is_added_is_read_once_and_half_a_line_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines(path, {"step": 1, "a": 1.5}, {"step": 2, "a": None, "b": 7})
    run = reader(tmp_path)
    assert run.refresh() and not run.refresh()
    with path.open("a") as file:
        file.write('{"step": 3, "a"')
    assert not run.refresh()
    with path.open("a") as file:
        file.write(": 2.5}\n")
    assert run.refresh()
    assert run.columns.names() == ["a", "b", "step"]
    np.testing.assert_array_equal(run.columns.values()[0], np.float32([1.5, np.nan, 2.5]))
    np.testing.assert_array_equal(run.columns.values(2)[:, 0], np.float32([2.5, np.nan, 3]))


def test_a_run_that_begins_anew_replaces_what_was_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines(path, *({"step": number} for number in range(5)))
    run = reader(tmp_path)
    run.refresh()
    path.write_text('{"step": 1}\n')
    run.refresh()
    assert (run.columns.rows, run.life) == (1, 1)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda folder: None, "no such folder. Pass log_path/project_name/run_name"),
        (lambda folder: folder.mkdir(), "not a run, it has neither metrics.jsonl nor config.yaml"),
        (lambda folder: lines_below(folder / "project/run"), "It contains runs: project/run"),
    ],
)
def test_a_folder_that_is_no_run_is_one_message(tmp_path, capsys, make, error):
    from skyrl_megatron_observe.dashboard import main

    make(tmp_path / "folder")
    assert main([str(tmp_path / "folder"), "--export", str(tmp_path / "page.html")]) == 1
    said = capsys.readouterr().err
    assert error in said and len(said.splitlines()) == 1


def lines_below(folder):
    folder.mkdir(parents=True)
    lines(folder / "metrics.jsonl", {"step": 1})


def test_a_port_in_use_is_one_message(tmp_path, capsys):
    import socket

    from skyrl_megatron_observe.dashboard import main

    lines(tmp_path / "metrics.jsonl", {"step": 1})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([str(tmp_path), "--port", str(port)]) == 1
    assert f"--port={port}: " in capsys.readouterr().err


def test_samples_of_another_version_are_refused(tmp_path):
    from skyrl_megatron.errors import LaunchError

    lines(tmp_path / "metrics.jsonl", {"step": 1})
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_3.json").write_text('{"format": 99}')
    run = reader(tmp_path)
    assert run.sample_steps() == [3]
    with pytest.raises(LaunchError, match="has format 99, this version reads 1"):
        run.sample_text(3)


def test_a_run_that_is_half_written_is_shown_without_what_is_not_there(tmp_path, capsys):
    """Cut off while it wrote, its lanes and loads those of another version: a line for the samples, and a page."""
    from skyrl_megatron_observe.dashboard import main

    lines(tmp_path / "metrics.jsonl", {"step": 1, "timing/step": 1.0}, {"loss": 3}, ["no", "line"])
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 2, "timing/st')
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_1.json").write_text('{"format": 1, "samp')
    lines(tmp_path / "spans.jsonl", {"step": 1, "began": 0.0, "lanes": {"trainer": []}}, {"step": 2, "spans": []})
    lines(tmp_path / "expert_load.jsonl", {"step": 1, "load": 3})
    run = reader(tmp_path)
    run.refresh()
    assert run.columns.rows == 1 and [line["step"] for line in run.spans(1000)] == [1] and run.expert_loads(1000) == []
    assert main([str(tmp_path), "--export", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("warning: samples of step 1: ") and "skipped" in said[0]
    assert (tmp_path / "page.html").stat().st_size > 30_000


def test_a_configuration_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [")
    assert "cannot be read" in reader(tmp_path).config()["config.yaml"]


def test_long_runs_are_thinned_with_their_extremes():
    """Against the largest and smallest of every stretch, one by one."""
    from skyrl_megatron_observe.run_report import thinned

    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 1000)).astype(np.float32)
    values[1, rng.random(1000) < 0.7] = np.nan
    found = thinned(values, 300)
    assert found.shape[0] == 3 and found.size <= 300
    size = 1000 // (found.shape[1] // 2)
    for name in (0, 2):
        for bucket in range(found.shape[1] // 2):
            part = values[name, bucket * size : (bucket + 1) * size]
            assert set(found[name, 2 * bucket : 2 * bucket + 2]) == {part.min(), part.max()}
    assert np.nanmax(found[1]) == np.nanmax(values[1]) and np.nanmin(found[1]) == np.nanmin(values[1])
    assert thinned(values, 3000) is values


def test_lanes_are_read_of_some_steps_the_newest_among_them(tmp_path):
    lines(tmp_path / "metrics.jsonl", {"step": 1})
    lines(tmp_path / "spans.jsonl", *({"step": number, "lanes": {"trainer": [["a", 0, 1]]}} for number in range(1000)))
    steps = [line["step"] for line in reader(tmp_path).spans(5000)]
    assert steps[0] == 0 and steps[-10:] == list(range(990, 1000)) and 50 < len(steps) < 150


def test_metric_names_of_runs_are_in_the_table(data_dir):
    """Of a recorded run, and of what the dashboard draws."""
    from skyrl_megatron.config.metric_table import describe, page

    names = {
        name
        for text in (data_dir / "recorded_run/metrics.jsonl").read_text().splitlines()
        for name in json.loads(text)
    }
    missing = sorted(name for name in names - {"step"} if describe(name) is None)
    assert not missing
    assert describe("policy/grad_norm").unit == "" and describe("timing/anything").unit == "s"
    assert describe("generate/a/b") is None
    committed = (data_dir.parents[1] / "docs/metrics.md").read_text()
    assert committed == page(), "run python -m skyrl_megatron.config.metric_table > docs/metrics.md"
