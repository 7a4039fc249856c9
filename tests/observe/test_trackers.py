"""wandb, mlflow and swanlab, their own clients offline: what they hold of a run that was resumed, and begun anew."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-trackers" / "bin" / "python"


@pytest.mark.process
@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_what_a_tracker_holds(tmp_path, name):
    if not (ROOT / ".venv-trackers" / "installed.txt").is_file():
        pytest.skip("the clients are not installed: launch/requirements/trackers.sh")
    offline = {
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "HOME": str(tmp_path),
    }
    script = str(Path(__file__).with_name("tracker_run.py"))
    for what in ("write", "read"):
        done = subprocess.run(
            [PYTHON, "-W", "error::skyrl_megatron.errors.SkyRLMegatronWarning", script, what, name, str(tmp_path)],
            env={**os.environ, **offline},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        assert "SkyRLMegatronWarning" not in done.stderr, done.stderr
    runs = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("READ "))[5:])["runs"]
    resumed, anew = sorted(runs.values(), key=lambda run: -len(run["reward"]))
    assert resumed["reward"] == [[1, 0.1], [2, 0.2], [3, 0.3], [3, 0.3], [4, 0.4]]
    assert anew["reward"] == [[1, 0.1]]
    assert resumed["samples"] >= 4 and anew["samples"] == 1
    assert resumed["seed"] == anew["seed"] == 7
    assert json.loads((tmp_path / "seen/run/tracker.json").read_text()) == {
        "tracker": name,
        "id": next(key for key, run in runs.items() if run is anew),
    }
