"""A teacher's scores and the distillation loss on real Megatron equal transformers and autograd, in every layout."""

import pytest

from tests.training import bodies, reference
from tests.training.test_step import LAYOUTS, MORE

K, COEF = 5, 0.7
PLAIN = ("tp2·cp2·ep4",)
A = "trainer.algorithm.distillation."


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Another model of the same vocabulary."""
    from tests.bridges.tiny_models import save_tiny

    sizes = dict(num_hidden_layers=4, num_key_value_heads=2, initializer_range=0.2)
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("teacher"), seed=7, **sizes)


def scored(folder, batch):
    """[R, 1 + 2K]: log-prob of the token, of the likeliest, their ids, by transformers."""
    import torch

    model = reference.load_model(folder)
    out = []
    for row in range(len(batch)):
        every, ids = row_logprobs(model, batch, row)
        best = every.detach().topk(K, -1)
        own = every.detach().gather(1, ids[:, None])
        out.append(torch.cat([own, best.values, best.indices.float()], -1))
    return torch.cat(out)


def row_logprobs(model, batch, row):
    """([r, V] log-probs, [r] ids) of a row's response."""
    import torch

    tokens, responses = reference.tokens_of(batch, row), int(batch.response_lengths[row])
    length = tokens.shape[1]
    logits = model(tokens, use_cache=False).logits[0, length - responses - 1 : -1].float() / reference.TEMPERATURE
    return torch.log_softmax(logits, -1), tokens[0, -responses:]


def scores_body(folder, teacher, batch, layout):
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.scoring import score_responses

    long = dict(tp="tensor_model", pp="pipeline_model", cp="context", ep="expert_model", etp="expert_tensor")
    keys = {f"trainer.teacher.megatron_config.{long[k]}_parallel_size": v for k, v in layout.items() if k in long}
    if "vpp" in layout:
        keys["trainer.teacher.megatron_config.virtual_pipeline_model_parallel_size"] = layout["vpp"]
    keys |= {
        "trainer.teacher.model.path": str(teacher),
        "trainer.placement.teacher_num_gpus_per_node": layout["world"],
    }
    engine = MegatronEngine(bodies.config(folder, overrides=keys), "teacher")
    rows = split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank]
    return rows, score_responses(engine, batch.select(rows), K)


def every_layout():
    return [pytest.param(n, marks=[] if n in PLAIN else pytest.mark.full_matrix) for n in (LAYOUTS | MORE)]


@pytest.mark.parametrize("name", every_layout())
def test_what_a_teacher_says(ranks, folder, teacher, batch, name):
    import torch

    layout, wanted = (LAYOUTS | MORE)[name], scored(teacher, batch)
    for rows, scores in ranks(layout["world"], scores_body, folder, teacher, batch, layout):
        expected = batch.responses.select(wanted, rows)
        torch.testing.assert_close(scores[:, : 1 + K], expected[:, : 1 + K], rtol=1e-5, atol=1e-5)
        assert torch.equal(scores[:, 1 + K :], expected[:, 1 + K :]), "the same tokens in the same order"


def divergence(student, teacher_top, ids):
    """KL(teacher ‖ student) over the likeliest tokens and all others."""
    import torch

    p, q = teacher_top.exp(), student.exp().gather(-1, ids)
    p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in (p, q))
    return (p * (p / q).log()).sum(-1)


def expected_step(folder, batch):
    """(divergence, gradient norm, gradients by HF name) of COEF · divergence alone."""
    import copy
    import tempfile
    from pathlib import Path

    import torch

    model = reference.load_model(folder)
    total = 0.0
    for row in range(len(batch)):
        every, _ = row_logprobs(model, batch, row)
        place = batch.responses.of(row)
        value = divergence(every, batch.teacher_top_logprobs[place], batch.teacher_top_ids[place].long())
        total = total + (value * batch.loss_mask[place]).sum()
    total = total / batch.loss_mask.sum()
    (COEF * total).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    holder = copy.deepcopy(model)
    for parameter, source in zip(holder.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(source.grad)
    with tempfile.TemporaryDirectory() as scratch:
        return total.item(), norm, reference.on_disk(holder, Path(scratch) / "grads")


def step_body(folder, batch, layout, overrides, grads):
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import stream_hf

    keys = bodies.NO_DISTRIBUTED | {f"{A}loss_coef": COEF, f"{A}top_k": K, f"{A}divergence_alone": True}
    keys |= {"trainer.algorithm.use_kl_loss": False, "trainer.algorithm.use_entropy_loss": False}
    engine = MegatronEngine(bodies.config(folder, **layout, overrides=keys | overrides))
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
    metrics = engine.forward_backward(part)
    engine.reduce_gradients()
    errors = {}
    for piece in stream_hf(engine.model, engine.groups, of=lambda parameter: parameter.main_grad):
        want = grads[piece.name]
        errors[piece.name] = float((piece.tensor - want).abs().max() / want.abs().max())
    return metrics, engine.optim_step().grad_norm, errors


@pytest.fixture(scope="module")
def taught(teacher, batch):
    batch = batch.select(range(len(batch)))
    scores = scored(teacher, batch)
    batch.teacher_logprobs = scores[:, 0]
    batch.teacher_top_logprobs, batch.teacher_top_ids = scores[:, 1 : 1 + K], scores[:, 1 + K :].int()
    return batch


@pytest.mark.parametrize("name", every_layout())
def test_the_divergence_is_learned(ranks, folder, taught, name):
    layout = (LAYOUTS | MORE)[name]
    total, norm, grads = expected_step(folder, taught)
    looked_at = set()
    for metrics, found, errors in ranks(layout["world"], step_body, folder, taught, layout, {}, grads):
        assert metrics["distillation_loss"] == pytest.approx(total, rel=1e-5)
        assert metrics["final_loss"] == pytest.approx(COEF * total, rel=1e-5), "nothing else counts"
        assert 0.01 < metrics["teacher_omitted"] < 1
        assert found == pytest.approx(norm, rel=1e-5)
        assert all(error <= bodies.GRADIENT_TOLERANCE for error in errors.values()), errors
        looked_at |= set(errors)
    assert looked_at == set(grads)
