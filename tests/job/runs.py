"""Whole runs on real parts, as users start them: a command in a process of its own, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.shared_ray import ray_head

TIMEOUT_S = 900
GAP = "policy/rollout_train_logprobs_abs_diff_max"
AGREE = 1e-4
"""Largest difference of trainer and engine on the same token and weights, nats, fp32."""
COLOCATE = "trainer.placement.colocate_all"
SMALL = {
    "trainer.logger": "tensorboard",
    "trainer.run_name": "run",
    "trainer.placement.policy_num_gpus_per_node": 2,
    COLOCATE: "false",
    "trainer.policy.megatron_config.expert_model_parallel_size": 2,
    "trainer.policy.optimizer_config.lr": 1e-2,
    "trainer.policy.optimizer_config.weight_decay": 0.0,
    "trainer.algorithm.use_kl_loss": "false",
    "trainer.gradient_checkpointing": "false",
    "trainer.max_tokens_per_microbatch": 512,
    "trainer.train_batch_size": 4,
    "trainer.policy_mini_batch_size": 4,
    "trainer.epochs": 10,
    "trainer.max_training_steps": 2,
    "trainer.max_prompt_length": 32,
    "trainer.eval_before_train": "false",
    "trainer.eval_interval": 0,
    "trainer.ckpt_interval": 0,
    "trainer.phase_timeout_s": 300,
    "generator.n_samples_per_prompt": 4,
    "generator.sampling_params.max_generate_length": 6,
    "generator.inference_engine.weight_sync_probe_interval": 1,
    "generator.inference_engine.max_num_seqs": 64,
    "generator.inference_engine.max_num_batched_tokens": 2048,
    "generator.inference_engine.engine_init_kwargs": "{max_model_len: 128, kv_cache_memory_bytes: 33554432}",
    "environment.env_class": "digits",
}
"""Two steps of sixteen short samples on the embedded model, experts over two ranks, beside an engine."""

DIGITS = '''\
from skyrl_megatron.envs import BaseTextEnv


class Digits(BaseTextEnv):
    """The share of digits in a response: every random model gets some reward, and not always the same."""

    def step(self, action):
        self.turns += 1
        reward = sum(character.isdigit() for character in action) / 6
        done = self.turns >= self.max_turns
        again = [] if done else [{"role": "user", "content": "more"}]
        return {"observations": again, "reward": reward, "done": done, "metadata": {}}
'''
EXPERIMENT = """\
from skyrl_megatron.workers.runtime_env import start_server
if __name__ == "__main__":
    start_server()  # what ranks and engines import is imported while this script does
from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment
from skyrl_megatron.envs import register
from skyrl_megatron.trainer import RayPPOTrainer
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.checks import load_config
from skyrl_megatron.command import run_command
import sys

register("digits", "digits:Digits")


class Trainer(RayPPOTrainer):
    pass


class Exp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return Trainer(*args, **kwargs)

{body}

if __name__ == "__main__":
    def work():
        run_experiment(load_config(SkyRLTrainConfig, sys.argv[1:])[0], Exp)
        return 0

    sys.exit(run_command(work))
"""


@dataclass(frozen=True)
class Run:
    """A run that ended."""

    returncode: int
    out: str
    err: str
    folder: Path

    @property
    def lines(self):
        """The lines of metrics.jsonl."""
        path = self.folder / "logs/skyrl/run/metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    @property
    def told(self):
        """Lines of its output, but for those that a machine which is busy with other work adds: what it waits for."""
        return [line for line in self.out.splitlines() if not line.startswith("… ")]

    def check(self):
        """The run itself, when it ended well."""
        assert self.returncode == 0, f"{self.out[-4000:]}\n{self.err[-8000:]}"
        return self


def prepare(folder):
    """Model, data and environment of small runs in ``folder``."""
    from skyrl_megatron.tiny_model import write_embedded_model

    write_embedded_model(folder / "model", 1)
    (folder / "digits.py").write_text(DIGITS)
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(40):
            prompt = [{"role": "user", "content": f"{11 + number}+{23 + 2 * number}=?"}]
            truth = {"method": "rule", "ground_truth": str(34 + 3 * number)}
            file.write(json.dumps({"data_source": "sums", "prompt": prompt, "reward_spec": truth}) + "\n")
    return folder


def arguments(folder, **overrides):
    """The command line of a small run; ``overrides`` spell dots as double underscores. A reference that is a model of
    its own takes its own processes."""
    keys = SMALL | {
        "trainer.policy.model.path": folder / "model",
        "data.train_data": f"['{folder}/prompts.jsonl']",
        "data.val_data": f"['{folder}/prompts.jsonl']",
        "trainer.ckpt_path": folder / "ckpts",
        "trainer.export_path": folder / "exports",
        "trainer.log_path": folder / "logs",
    }
    keys |= {name.replace("__", "."): value for name, value in overrides.items()}
    reference = "true" in (keys.get(f"trainer.algorithm.{name}") for name in ("use_kl_loss", "use_kl_in_reward"))
    if reference and "trainer.policy.model.lora.rank" not in keys and keys[COLOCATE] != "true":
        keys.setdefault("trainer.placement.colocate_policy_ref", "false")
    return [f"{key}={value}" for key, value in keys.items()]


def environment(folder):
    """Variables of a run's processes, which import the package and what is in ``folder``."""
    path = ":".join(filter(None, [str(Path(__file__).parents[2]), str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}


def start(folder, body="", *, variables=None, prefix=(), **overrides):
    """The process of a small run; ``body``: Python that changes ``Trainer`` or ``Exp`` before it starts; ``prefix``:
    what its command is an argument of."""
    script = folder / "script.py"
    script.write_text(EXPERIMENT.replace("{body}", body))
    return subprocess.Popen(
        [*prefix, sys.executable, str(script), *arguments(folder, **overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(folder) | (variables or {}),
    )


def finish(process, folder):
    """Wait for a run."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    return Run(process.returncode, out, err, folder)


def run(folder, body="", **overrides):
    """A small run from start to end."""
    return finish(start(folder, body, **overrides), folder)


def schedule_of(folder):
    """Return the steps of a finished run whose rollouts ran ahead, in order."""
    from skyrl_megatron.sources.records import Schedule

    schedule = Schedule(folder)
    schedule.close()
    return [schedule.steps[step] for step in sorted(schedule.steps)]


def until_line(process, text):
    """The lines that a run prints, up to the first with ``text``."""
    for line in process.stdout:
        yield line.rstrip()
        if text in line:
            return
    raise AssertionError(f"the run ended without {text!r}: {process.stderr.read()[-4000:]}")


@contextlib.contextmanager
def cluster(folder):
    """A Ray cluster of one node on the loopback interface, for the block: the variables of a run that joins it."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with ray_head(folder / "cluster.log", cpus=8, environment=environment(folder) | token) as address:
        yield token | {"RAY_ADDRESS": address}
