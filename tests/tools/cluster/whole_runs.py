"""Four small steps of the embedded recipe, on one host or two, and the numbers that they must have in common."""

import json
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BATCH, RUN = ROOT / "launch" / "slurm" / "run_moe.sbatch", ROOT / "launch" / "run_moe.sh"
WAIT_S = 900  # a deadline, not a measure: cores may be shared
OVER_BOTH = ["trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=1"]
SMALL = [
    "--recipe=embedded",
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=16",
    "trainer.update_epochs_per_batch=1",
    "trainer.algorithm.zero_variance_filter=false",  # an untrained model solves nothing
    f"trainer.phase_timeout_s={WAIT_S}",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=1",
    "trainer.hf_save_interval=0",
    "trainer.run_name=run",
]
NOT_COMPARED = re.compile(r"^(timing|memory)/|trajectory_time|_per_second|peak_memory_bytes|_slowest_rank|_stragglers")


def arguments(model, folder, steps, *more):
    paths = [f"trainer.{name}_path={folder}/{name}" for name in ("ckpt", "export", "log")]
    return [*SMALL, f"model={model}", f"trainer.max_training_steps={steps}", *paths, *more]


def logged(folder):
    """What a run logged, by step."""
    (file,) = Path(folder, "log").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["step"]: line for line in lines}


def metrics(folder):
    """What a run logged, by step, without times and memory."""
    return {
        step: {name: value for name, value in line.items() if not NOT_COMPARED.search(name)}
        for step, line in logged(folder).items()
    }


def saved(folder):
    return int(Path(folder, "ckpt", "latest_ckpt_global_step.txt").read_text())


def on_one_host(model, folder):
    """The metrics of four steps on one host, without SLURM."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    command = [RUN, *arguments(model, folder, 4)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return metrics(folder)
