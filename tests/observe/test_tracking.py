"""Numbers of a run: every sink gets them, a resumed run drops those that came to nothing, a page shows them."""

import json
import math
import os
import subprocess
import sys

import pytest


def config(tmp_path, **overrides):
    from skyrl_megatron.config import SkyRLTrainConfig

    return SkyRLTrainConfig.from_cli_overrides(
        {"trainer.log_path": str(tmp_path), "trainer.run_name": "run", "trainer.logger": "tensorboard", **overrides}
    )


def lines_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "skyrl/run/metrics.jsonl").read_text().splitlines()]


def step(number, reward):
    return {"timing/step": 0.5, "reward/avg_raw_reward": reward, "policy/policy_kl": 0.01, "policy/x": math.nan}


def tracked(tmp_path, steps, *, resumed_from=None, total=10, logged_before=False):
    from skyrl_megatron.trainer.tracking import Tracking

    tracking = Tracking(config(tmp_path))
    assert tracking.open(total_steps=total, resumed_from=resumed_from) == logged_before
    for number in steps:
        tracking.log(step(number, number / 10), number)
    tracking.finish()
    tracking.finish()
    return tracking


def tensorboard_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "skyrl/run/tensorboard"))
    events.Reload()
    return [each.step for each in events.Scalars("timing/step")]


def test_a_step_is_a_line_everywhere(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked(tmp_path, [1, 2])
    assert tensorboard_steps(tmp_path) == [1, 2]
    assert lines_of(tmp_path)[1] == {
        "step": 2,
        "timing/step": 0.5,
        "reward/avg_raw_reward": 0.2,
        "policy/policy_kl": 0.01,
        "policy/x": None,
    }
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("step 1/10 · reward 0.100 · kl 0.0100 · 0.50 s · ETA ")
    log = (tmp_path / "skyrl/run/console.log").read_text().splitlines()
    assert len(log) == 2 and out[0].split(" · ETA")[0] in log[0]
    events = EventAccumulator(str(tmp_path / "skyrl/run/tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("reward/avg_raw_reward")] == [(1, 0.1), (2, 0.2)]


def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path):
    """The killed run logged steps 3 and 4 behind its checkpoint of step 2, and half a line of step 5."""
    tracked(tmp_path, [1, 2, 3, 4])
    path = tmp_path / "skyrl/run/metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "rew')
    tracked(tmp_path, [3], resumed_from=2, logged_before=True)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    assert tensorboard_steps(tmp_path) == [1, 2, 3]
    tracked(tmp_path, [], resumed_from=4)
    tracked(tmp_path, [1])
    assert [line["step"] for line in lines_of(tmp_path)] == [1], "a run that starts anew starts a new file"


@pytest.mark.parametrize("byte", range(0, 60, 3))
def test_a_damaged_line_is_left_out_and_costs_no_other(tmp_path, byte):
    """Whichever bit of it is another; a number may then be another number, which no line can tell."""
    from skyrl_megatron.errors import SkyRLMegatronWarning

    tracked(tmp_path, [1, 2, 3])
    path = tmp_path / "skyrl/run/metrics.jsonl"
    first, damaged, last = path.read_bytes().splitlines()
    damaged = bytearray(damaged)
    damaged[byte] ^= 0x80  # no UTF-8 any more
    path.write_bytes(b"\n".join((first, damaged, last, b"")))
    with pytest.warns(SkyRLMegatronWarning, match=r"metrics.jsonl: line 2 is damaged and ignored"):
        tracked(tmp_path, [4], resumed_from=3, logged_before=True)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 3, 4]


def test_a_full_disk_costs_no_line(tmp_path):
    """What a run goes on from is written anew beside what is there."""
    import resource

    tracked(tmp_path, [1, 2, 3])
    path = tmp_path / "skyrl/run/metrics.jsonl"
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            tracked(tmp_path, [4], resumed_from=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before


@pytest.mark.process
def test_the_run_leaves_curves_and_a_page(tmp_path):
    from skyrl_megatron_observe.curves import write_curves
    from skyrl_megatron_observe.report_recorder import PageWriter

    folder = tracked(tmp_path, [1, 2, 3]).folder
    write_curves(folder)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    writer = PageWriter(folder)
    writer.begin()  # the folder is new, and so would the page be
    assert not (folder / "report.html").exists()
    writer.finish()
    text = (folder / "report.html").read_text()
    assert text.startswith("<!doctype html>") and "<title>skyrl/run</title>" in text and "http://" not in text[:400]


def test_a_tracker_of_a_plugin(tmp_path):
    """The one of the guide; a name that nothing registers is an error before the run."""
    from skyrl_megatron.checks import PlannedRun
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.validate import find_problems
    from skyrl_megatron.plugins import TRACKERS
    from skyrl_megatron.trainer.tracking import Tracking
    from skyrl_megatron_observe.preflight.option_checks import packages
    from tests.guides.documents import ROOT, blocks

    (block,) = [
        block for block in blocks(ROOT / "docs/guides/plugins.md", "python") if "register_tracker" in block.text
    ]
    try:
        exec(block.text, {})
        cfg = config(tmp_path, **{"trainer.logger": ["lines", "lanes"]})
        problems = [str(problem) for problem in find_problems(cfg, Hardware(0, 1)) if problem.key == "trainer.logger"]
        known = "console, tensorboard, wandb, mlflow, swanlab, lines"
        assert problems == [f"trainer.logger=lanes: not registered; known: {known}"]
        cfg = config(tmp_path, **{"trainer.logger": "lines"})
        assert not list(packages(PlannedRun(cfg, Hardware(0, 1)))), "it needs no package of its name"
        tracking = Tracking(cfg)
        tracking.open(total_steps=2)
        tracking.log(step(1, 0.25), 1)
        tracking.finish()
    finally:
        TRACKERS._classes.pop("lines", None)
    assert (tmp_path / "lines.txt").read_text() == "1 0.25\n"


def test_a_tracker_without_its_package_is_one_message(tmp_path):
    from skyrl_megatron.errors import LaunchError
    from skyrl_megatron.trainer.tracking import Tracking

    with pytest.raises(
        LaunchError, match=r"trainer.logger=swanlab: its package is not installed .*uv pip install .* swanlab"
    ):
        Tracking(config(tmp_path, **{"trainer.logger": "swanlab"}))


def test_several_trackers_get_the_same(tmp_path, monkeypatch):
    """As SkyRL's users write it. The clients are lists: those of the services come with packages of their own
    (tests/observe/test_trackers.py)."""
    from skyrl_megatron.trainer.tracking import Tracking
    from skyrl_megatron_observe import trackers

    monkeypatch.setenv("WANDB_MODE", "offline")
    got, known = {"wandb": [], "swanlab": []}, []

    def client_of(name):
        def start(cfg, run_id):
            known.append(run_id)
            log = lambda metrics, step: got[name].append((step, metrics["reward/avg_raw_reward"]))  # noqa: E731
            return trackers.TrackerClient(f"id-of-{name}", log, lambda rows, step: None, lambda: None)

        return start

    for name in got:
        monkeypatch.setattr(trackers, f"start_{name}", client_of(name))
    cfg = config(tmp_path, **{"trainer.logger": "[wandb,tensorboard,swanlab,wandb]"})
    tracking = Tracking(cfg)
    tracking.open(total_steps=1)
    tracking.log({"reward/avg_raw_reward": 0.5}, 1)
    tracking.finish()
    assert got == {"wandb": [(1, 0.5)], "swanlab": [(1, 0.5)]} and known == [None, None]
    again = trackers.named_trackers(cfg, resumed=True)
    assert known[2:] == ["id-of-wandb", "id-of-swanlab"]
    for each in again:
        each.finish()


def test_a_tracker_that_fails_costs_no_run(tmp_path):
    """A real wandb client package is not needed: any client object may raise."""
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.trainer.tracking import Tracking
    from skyrl_megatron_observe.trackers import ExternalTracker, TrackerClient

    calls = []

    def fail(metrics, number):
        calls.append(number)
        raise ConnectionError("the server is away")

    tracking = Tracking(config(tmp_path))
    client = TrackerClient("id", fail, lambda rows, number: calls.append(rows), lambda: calls.append("finish"))
    tracking._registered.append(ExternalTracker("wandb", client))
    tracking.open(total_steps=2)
    with pytest.warns(SkyRLMegatronWarning, match="trainer.logger=wandb failed .*the server is away") as said:
        tracking.log(step(1, 0.1), 1)
        tracking.samples([("uid", 1.0, "stop", "a", "b")], 2)
        tracking.log(step(2, 0.2), 2)
        tracking.finish()
    assert len(said) == 1 and calls == [1]
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


def test_a_tracker_that_hangs_holds_up_no_step(tmp_path, monkeypatch):
    import threading

    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron_observe import trackers

    monkeypatch.setattr(trackers, "FINISH_S", 0.2)
    free = threading.Event()
    client = trackers.TrackerClient("id", lambda metrics, number: free.wait(), lambda rows, number: None, lambda: None)
    hangs = trackers.ExternalTracker("mlflow", client)
    try:
        hangs.log(step(1, 0.1), 1)
        with pytest.warns(SkyRLMegatronWarning, match="trainer.logger=mlflow failed .* did not finish"):
            hangs.finish()
        monkeypatch.setattr(trackers, "WAITING", 2)
        full = trackers.ExternalTracker("mlflow", client)
        with pytest.warns(SkyRLMegatronWarning, match="trainer.logger=mlflow failed .* 2 calls wait") as said:
            for number in range(8):
                full.log(step(number, 0.1), number)
        assert len(said) == 1
    finally:
        free.set()


@pytest.mark.process
def test_a_terminal_gets_a_progress_bar(tmp_path):
    """Through a real pseudo-terminal."""
    pty = pytest.importorskip("pty")
    code = (
        "import sys; from pathlib import Path; from skyrl_megatron.trainer.console import ConsoleSink\n"
        f"sink = ConsoleSink(Path({str(tmp_path)!r}) / 'console.log')\n"
        "sink.start(3, 0)\n"
        "for n in (1, 2): sink.log({'timing/step': 1.0, 'reward/avg_raw_reward': 0.25}, n)\n"
        "sink.say('a word [in brackets]'); sink.finish()\n"
    )
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=follower, stderr=subprocess.PIPE, env=environment, close_fds=True
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 4096):
            shown += chunk
    except OSError:
        pass
    assert process.wait(60) == 0, process.stderr.read()
    text = shown.decode()
    assert "2/3" in text and "reward 0.250" in text and "a word [in brackets]" in text and "\x1b[" in text


@pytest.mark.parametrize(("seconds", "text"), [(12.4, "12s"), (200, "3m20s"), (3900, "1h05m"), (59.7, "1m00s")])
def test_durations(seconds, text):
    from skyrl_megatron.trainer.console import duration

    assert duration(seconds) == text
