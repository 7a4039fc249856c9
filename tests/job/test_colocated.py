"""Runs in which trainer and engines share devices, as is the default: the numbers are those of runs in which they do
not, whatever takes turns, is killed or restarted. Each recipe: ``test_recipes.py``. Two hosts:
``tests/tools/cluster/test_two_hosts.py``."""

import re
import signal
import subprocess
import sys

import pytest

from tests.job import runs
from tests.job.runs import AGREE, GAP, until_line
from tests.job.test_roles import critic

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix, pytest.mark.timeout(2 * runs.TIMEOUT_S)]

APART = {"generator__inference_engine__num_engines": 2}
SHARED = APART | {"trainer__placement__colocate_all": "true"}
NODES = {"trainer__placement__policy_num_nodes": 2, "trainer__placement__policy_num_gpus_per_node": 1}
LORA = {"trainer__policy__model__lora__rank": 4, "trainer__policy__model__lora__alpha": 8}
LASTING = re.compile(r"^(policy|critic|reward|loss|eval)/(?!.*(_per_|memory|mfu|score_))")


def numbers(run):
    """What of a run's metrics does not depend on time or place, by step."""
    return {
        line["step"]: {name: value for name, value in line.items() if LASTING.match(name)}
        for line in run.check().lines
    }


def folder_of(tmp_path, name):
    (tmp_path / name).mkdir()
    return runs.prepare(tmp_path / name)


def test_sharing_changes_no_number(tmp_path):
    """Also where ranks exchange weights, as over two nodes, and where an engine has both devices."""
    of_two = {"generator__inference_engine__num_engines": 1, "generator__inference_engine__tensor_parallel_size": 2}
    four = {"trainer__max_training_steps": 4}
    apart = numbers(runs.run(folder_of(tmp_path, "apart"), **APART, **four))
    assert len(apart) == 4
    assert numbers(runs.run(folder_of(tmp_path, "shared"), **SHARED, **four)) == apart
    over_nodes = runs.run(folder_of(tmp_path, "nodes"), **SHARED | NODES, **four)
    assert "own part by exchange and shared memory" in over_nodes.out
    assert numbers(over_nodes) == apart
    split = runs.run(folder_of(tmp_path, "split"), **SHARED | of_two, **four).check()
    assert all(line[GAP] <= AGREE for line in split.lines)  # tp rounds otherwise


def test_all_roles_take_turns(tmp_path):
    """A policy with adapters in memory, its critic and its reference: each leaves when another works."""
    roles = critic(tmp_path / "run", trainer__algorithm__use_kl_loss="true")
    roles |= {"trainer__placement__critic_num_gpus_per_node": 2}
    roles |= {"trainer__critic__megatron_config__expert_model_parallel_size": 2}
    roles |= {"trainer__policy__model__lora__rank": 4, "trainer__policy__model__lora__sync_mode": "memory"}
    done = runs.run(folder_of(tmp_path, "run"), **SHARED | roles, trainer__max_training_steps=3).check()
    assert len(done.lines) == 3 and all(line[GAP] <= AGREE for line in done.lines)
    held = [line[f"memory/policy_train_{role}_gb"] for line in done.lines for role in ("policy", "critic")]
    assert all(policy > 0 for policy in held[::2]) and not any(held[1::2]), held


@pytest.mark.parametrize(
    "keys",
    [LORA | {"trainer__policy__model__lora__sync_mode": "memory"}, LORA],
    ids=["adapters", "merged adapters"],
)
def test_what_else_ranks_exchange(tmp_path, keys):
    """Over two nodes, as within one."""
    within = runs.run(folder_of(tmp_path, "within"), **SHARED | keys)
    over = runs.run(folder_of(tmp_path, "over"), **SHARED | NODES | keys)
    assert "own part by shared memory" in within.check().out and "by exchange and shared memory" in over.check().out
    assert numbers(over) == numbers(within) and len(over.lines) == 2
    assert all(line[GAP] <= AGREE for line in over.lines)


def test_a_run_that_is_killed_continues_bit_for_bit(tmp_path):
    keys = SHARED | {"trainer__ckpt_interval": 1, "trainer__max_training_steps": 4}
    whole = numbers(runs.run(folder_of(tmp_path, "whole"), **keys))
    folder = folder_of(tmp_path, "killed")
    process = runs.start(folder, **keys)
    list(until_line(process, "step 2/4"))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = runs.run(folder, **keys)
    assert "resumed from" in done.out and numbers(done) == whole


def test_an_engine_that_dies_is_restarted_beside_the_trainer(tmp_path):
    """Killed while it samples, and while the ranks train and it sleeps."""
    body = "from tests.faults import injection\n"
    body += "injection.arm('engine worker', 'SIGKILL', 'generate', 1)\n"
    body += "injection.arm('engine worker', 'SIGKILL', 'policy_train', 3)\n"
    keys = SHARED | {"trainer__max_training_steps": 5}
    done = runs.run(folder_of(tmp_path, "run"), body, **keys).check()
    assert len(done.lines) == 5 and all(line[GAP] <= AGREE for line in done.lines)
    assert (tmp_path / "run" / "faults.txt").read_text().count("\n") == 2


def test_a_model_is_evaluated_alone(tmp_path):
    folder = folder_of(tmp_path, "run")
    keys = SHARED | {"environment__env_class": "gsm8k", "data__train_data": "[]"}
    command = [sys.executable, "-m", "skyrl_megatron", "evaluate", *runs.arguments(folder, **keys)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=runs.TIMEOUT_S, env=runs.environment(folder), check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "placement: engines 2  " in done.stdout and "eval/all/avg_score 0.0" in done.stdout
