"""The whole screen, on a machine where things are broken and on this one with the self-test; and what the self-test
says of wrong results and of rungs that hang."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "skyrl_megatron_tools.doctor"]


def doctor(*arguments, timeout=560, **environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | environment
    done = subprocess.run([*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    found = dict(re.findall(r"^  \S+ +(\S.*?)  +(\S.*)$", done.stdout, re.MULTILINE))
    states = {name: state for state, name in re.findall(r"^  (\S+) +(\S.*?)  +\S", done.stdout, re.MULTILINE)}
    return done, states, found


def test_a_gpu_run_on_a_broken_machine(tmp_path):
    """vLLM does not import, the port is taken, the folder read-only, the cluster gone, and there is no GPU."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done, states, found = doctor(
            *("--gpu", "--no-self-test", "trainer.ckpt_path=/proc/checkpoints"),
            "generator.inference_engine.enable_http_endpoint=true",
            f"generator.inference_engine.http_endpoint_port={taken.getsockname()[1]}",
            PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', ROOT)}",
            RAY_ADDRESS="127.0.0.1:9",
        )
    assert done.returncode == 1, done.stdout + done.stderr
    failing = {"Transformer Engine", "CUDA", "vLLM", "ports", "checkpoints", "Ray cluster"}
    assert failing <= {name for name, state in states.items() if state == "FAIL"}, done.stdout
    assert states["Python"] == states["packages"] == states["torch"] == states["megatron-core"] == "ok", done.stdout
    assert "libcudart.so.12" in found["vLLM"] and states["Ray token"] == "warn"
    assert done.stdout.count("fix:") >= len(failing) and "to fix before a run can start" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.vllm
def test_this_machine_and_the_self_test(tmp_path):
    """All rungs over gloo, with our layers and a real engine."""
    done, states, found = doctor("--cpu", "--self-test", f"trainer.ckpt_path={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"all-reduce", "layer", "weight sync", "engine"} <= states.keys(), done.stdout
    assert set(states.values()) == {"ok"}, done.stdout
    assert "within" in found["layer"] and found["engine"].startswith("20 tokens")


FAULTS = """
import sys, torch, torch.distributed as dist
from skyrl_megatron_tools.doctor import self_test as layer_rung, self_test as rungs
from skyrl_megatron.runtime.model.local_weights import local_weights
from skyrl_megatron.workers.runtime_env import free_port

def told(body, *arguments):
    try:
        print("passed:", body(*arguments))
    except RuntimeError as error:
        print("told:", error)

all_reduce, same = dist.all_reduce, layer_rung._same_weights
dist.all_reduce = lambda values: values.add_(1)
told(rungs._all_reduce_rank, 0, 1, free_port(), sys.argv[1])
dist.destroy_process_group()
dist.all_reduce = all_reduce

def wrong_scale(exact, tested, groups):
    same(exact, tested, groups)
    next(weight.tensor for weight in local_weights(tested, groups) if "linear_proj" in weight.name).mul_(1.2)

layer_rung._same_weights = wrong_scale
told(layer_rung.layer)
"""

LOST_UPDATE = """
import sys
from skyrl_megatron_tools.doctor import self_test as rungs

port, end = int(sys.argv[1]), int(sys.argv[2])
made = rungs.Tensors.__init__
rungs.Tensors.__init__ = lambda self, seed: made(self, seed + end)  # each end has its own
rungs._sync_end(end, "gloo", 0, port)
"""


def test_wrong_results_are_told(tmp_path):
    """A sum that is off by one, a projection 1.2 times too large, weights that are not those that were sent."""
    from skyrl_megatron.workers.runtime_env import free_port

    run = [sys.executable, "-W", "ignore", "-c"]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    done = subprocess.run([*run, FAULTS, tmp_path], timeout=300, check=True, **options)
    wrong_sum, wrong_layer = [line for line in done.stdout.splitlines() if ":" in line][-2:]
    assert wrong_sum.startswith("told: all-reduce over 1 ranks: rank 0 has a wrong sum"), done.stdout
    assert wrong_layer.startswith("told: ") and "in bf16 is" in wrong_layer, done.stdout
    port = str(free_port())
    ends = [subprocess.Popen([*run, LOST_UPDATE, port, str(end)], **options) for end in (0, 1)]
    *_, (_, said) = [end.communicate(timeout=300) for end in reversed(ends)][::-1]
    assert "weight sync over gloo: the received embedding differs from the sent one" in said


def test_a_rung_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch):
    from skyrl_megatron_tools.doctor.self_test import run_check

    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    before = set(psutil.Process().children(recursive=True))
    found = run_check("all-reduce", 2.0, gpu=False)
    assert found.state == "FAIL" and found.text == "did not finish within 2 s" and found.fix
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_rung_that_fails_says_its_error(tmp_path, monkeypatch):
    from skyrl_megatron_tools.doctor.self_test import run_check

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: cannot open')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    found = run_check("layer", 120.0, gpu=False)
    assert found.state == "FAIL" and "libcudnn.so.9" in found.text and "launch/setup.sh gpu" in found.fix


def test_without_an_environment_the_script_says_what_to_run(tmp_path):
    (tmp_path / "launch").mkdir()
    script = tmp_path / "launch" / "doctor.sh"
    script.write_bytes((ROOT / "launch" / "doctor.sh").read_bytes())
    script.chmod(0o755)
    done = subprocess.run([script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"fix: {tmp_path}/launch/setup.sh" in done.stderr
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--self-test" in done.stdout
