"""Runs with ``trainer.exact_rollouts``: no token differs in ten steps, and what breaks it is named with its layer."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.job import mismatch_run, runs
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]

STEPS = 10
RUN = {
    "trainer__exact_rollouts": "true",
    "trainer__max_training_steps": STEPS,
    "trainer__dump_data_batch": "true",
    "trainer__ckpt_interval": STEPS,
    "trainer__policy__optimizer_config__lr": 1e-3,
    "generator__n_samples_per_prompt": 6,
    "generator__sampling_params__max_generate_length": 64,
    "generator__sampling_params__temperature": 0.8,
    "generator__inference_engine__max_num_batched_tokens": 128,
}
MEGATRON = "trainer__policy__megatron_config__"
DENSE = {f"{MEGATRON}expert_model_parallel_size": 1}
MIDDLE = "model.layers.1.self_attn.o_proj.weight"
FAULTY = f"""
import torch
from skyrl_megatron.algorithms import exact_ops
from skyrl_megatron.inference.vllm.exact import ExactExtension
from vllm.v1.sample.sampler import Sampler


class Activation(ExactExtension):
    '''The MLP of layer 2 computes torch's activation.'''

    def skyrl_compile_nothing(self):
        super().skyrl_compile_nothing()
        self.model_runner.model.model.layers[2].mlp.act_fn.forward = ordinary


def ordinary(x):
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Softmax(ExactExtension):
    '''Log-probs are torch's.'''

    def skyrl_compile_nothing(self):
        super().skyrl_compile_nothing()
        Sampler.compute_logprobs = staticmethod(lambda logits: logits.double().log_softmax(-1).float() + 1e-7)


class Weight(ExactExtension):
    '''One element of one tensor is the next larger number.'''

    def skyrl_record_targets(self, tensors):
        model = self.weight_transfer_engine.model
        load = type(model).load_weights
        model.load_weights = lambda weights: load(model, map(altered, weights))
        return super().skyrl_record_targets(tensors)


def altered(named):
    name, tensor = named
    if name != "{MIDDLE}":
        return name, tensor
    tensor = tensor.clone()
    tensor.view(-1)[:1] = torch.nextafter(tensor.view(-1)[:1], torch.tensor([9.0]))
    return name, tensor
"""


def prepared(folder, family):
    runs.prepare(folder)
    shutil.rmtree(folder / "model")
    write_tiny_model(family, folder / "model")
    (folder / "faulty.py").write_text(FAULTY)
    return folder


def no_token_differs(run):
    lines = [line for line in run.check().lines if runs.GAP in line]
    assert len(lines) == STEPS and {line[runs.GAP] for line in lines} == {0.0}
    probes = [
        line["trainer/weight_sync_probe_max_abs_diff"]
        for line in run.lines
        if "trainer/weight_sync_probe_max_abs_diff" in line
    ]
    assert probes and set(probes) == {0.0}
    assert sum(line["generate/avg_num_tokens"] for line in lines) * 24 >= 10_000


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = prepared(tmp_path_factory.mktemp("run"), "qwen3")
    no_token_differs(runs.run(folder, **RUN | DENSE))
    return folder


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_moe", {}), ("glm4_moe", {}), ("qwen3", DENSE | {f"{MEGATRON}tensor_model_parallel_size": 2})],
)
def test_no_token_differs_in_ten_steps(tmp_path, family, layout):
    """Experts, or each tensor, over two ranks."""
    no_token_differs(runs.run(prepared(tmp_path, family), **RUN | layout))


@pytest.mark.parametrize(
    ("extension", "cause", "where"),
    [
        ("Activation", "other operations", "layer 2, mlp"),
        ("Weight", "wrong weight", "layer 1, attention"),
        ("Softmax", "other operations", "the softmax"),
    ],
)
def test_what_breaks_it_is_named(dense, extension, cause, where):
    planted, run = mismatch_run.planted(dense, extension)
    command = [sys.executable, *planted, "explain-mismatch", str(run), "--step", str(STEPS)]
    command += ["--json", str(run / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=runs.environment(dense), timeout=runs.TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((run / "found.json").read_text())
    assert (found["cause"], found["place"]["where"]) == (cause, where), done.stdout
    if extension == "Weight":
        assert [line.split()[0] for line in found["tensors"]] == [MIDDLE]
