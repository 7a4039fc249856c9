"""What the batch script asks of ``srun``: a task on each host, the folder and ports of the job, a container if wanted.

``srun`` is a stand-in that writes its words down: neither pyxis nor apptainer can run here. ``test_slurm.py`` runs the
script with the real one.
"""

import os
import stat
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[3]
BATCH = ROOT / "launch" / "slurm" / "run_moe.sbatch"


@pytest.fixture
def asked(tmp_path):
    """A function that runs the script in a job of two hosts; srun's words."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words\necho "$SKYRL_STARTED" >{tmp_path}/started\nexit 7\n'
    )
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)

    def run(*words, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SKYRL_", "SLURM_"))}
        environment |= {
            "PATH": f"{srun.parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "12",
            "SLURM_JOB_NUM_NODES": "2",
        }
        environment |= {"SKYRL_STARTED": "begin@1.5"} | variables
        done = subprocess.run(
            [BATCH, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 7, done.stderr
        return (tmp_path / "words").read_text().splitlines()

    return run


STEP = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]


def command(root, folder, *options):
    member = [f"{root}/launch/ray_cluster.sh", "member", f"--dir={folder}/runs/slurm-12.0", *options, "--"]
    return [*member, f"{root}/launch/run_moe.sh", "model=/m x"]


def test_a_task_on_each_host(asked, tmp_path):
    own = {"SKYRL_INTERFACE": "ib0", "SKYRL_RAILS": "mlx5_0,mlx5_1", "SKYRL_PORT": "20000", "SKYRL_WITHIN": "60"}
    options = ["--interface=ib0", "--rails=mlx5_0,mlx5_1", "--within=60", "--port=20000"]
    assert asked("model=/m x", **own) == [*STEP, *command(ROOT, tmp_path, *options)]
    assert (tmp_path / "runs" / "slurm-12.0").is_dir()
    assert (tmp_path / "started").read_text() == "begin@1.5\n", "time to the first step counts from there"


def test_pyxis(asked, tmp_path):
    words = asked("model=/m x", SKYRL_CONTAINER="ghcr.io/o/skyrl-megatron:1", SKYRL_CONTAINER_MOUNTS="/data:/data")
    container = [
        "--container-image=ghcr.io/o/skyrl-megatron:1",
        f"--container-mounts={tmp_path}:{tmp_path},/data:/data",
    ]
    container.append(f"--container-workdir={tmp_path}")
    assert words == [*STEP, *container, *command("/opt/skyrl-megatron", tmp_path)]


def test_apptainer_with_a_checkout_from_outside(asked, tmp_path):
    words = asked("model=/m x", SKYRL_CONTAINER="/i/skyrl.sif", SKYRL_CONTAINER_CHECKOUT="/src")
    mounts = f"{tmp_path}:{tmp_path},/src:/src"
    inside = ["apptainer", "exec", "--nv", "--bind", mounts, "--pwd", str(tmp_path), "/i/skyrl.sif"]
    assert words == [*STEP, *inside, *command("/src", tmp_path)]


def test_outside_of_a_job_it_says_how_it_is_meant():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run([BATCH, "model=m"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "give it to sbatch, or type launch/run_moe.sh inside salloc" in done.stderr
    shown = subprocess.run([BATCH, "--help"], env=environment, capture_output=True, text=True, timeout=60).stdout
    assert all(f"SKYRL_{name}=" in shown for name in ("REQUEUE", "RAILS", "WITHIN", "CONTAINER_CHECKOUT"))
