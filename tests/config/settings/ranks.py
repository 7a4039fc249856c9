"""One rank of a role: what reaches Megatron's model, gradient buffers, optimizer and schedule, and a step of it."""

import dataclasses
import os
import traceback
import warnings
from pathlib import Path
from unittest.mock import patch

from tests.config.settings import base
from tests.support.rank_pool import end_layout


def describe_body(folder, asked):
    """For each of ``asked``, (role, keys with values, part), that part of an engine, or why it cannot be built."""
    os.environ[base.FOLDER] = folder
    os.chdir(folder)
    described = []
    for role, keys, part in asked:
        try:
            described.append(_describe(role, base.resolved(keys), part))
        except Exception:
            described.append(traceback.format_exc())
        end_layout()
    return described


def _describe(role, cfg, part):
    from skyrl_megatron.runtime.engine import MegatronEngine

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = MegatronEngine(cfg, role, total_steps=8)
        described = PARTS[part](engine)
    said = [str(each.message) for each in caught]
    return [text for text in said if "record_memory" in text] if part == "said" else described


def _fields(config):
    return {field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _batch():
    import torch

    from skyrl_megatron.data.batch import collate

    responses = [[5, 6, 7, 8], [5, 6, 9], [7, 8], [4, 3]]
    batch = collate([[10, 11]] * 4, responses, uids=["a", "a", "b", "b"], rewards=[1.0, 0.0, 1.0, 0.0])
    batch.advantages = batch.returns = batch.response_mask.float()
    batch.old_logprobs = batch.ref_logprobs = -batch.response_mask.float()
    assert isinstance(batch.advantages, torch.Tensor)
    return batch


def _trained(engine):
    """Metrics of a step."""
    metrics = engine.forward_backward(_batch())
    engine.optim_step()
    return metrics


def _route_problem(engine):
    """What is said of rows without routes."""
    from skyrl_megatron.runtime.packed_inputs import find_route_problem

    return str(find_route_problem(_batch(), engine.model, engine.megatron.moe_routing_replay_missing))


def _cuts(engine, work):
    """How ``work`` cuts the batch into micro-batches: rows and shape of each."""
    notes, cut = [], engine._micro_batches

    def noting(batch, rows):
        made = cut(batch, rows)
        notes.extend((list(map(int, each.rows)), str(each.packed.tokens.shape)) for each in made)
        return made

    engine._micro_batches = noting
    work()
    return notes


def _schedule(engine):
    from skyrl_megatron.runtime.optimizer import current_lr

    rates = []
    for _ in range(10):
        rates.append(current_lr(engine.optimizer))
        engine.lr_schedule.step(1)
    return rates


def _away(engine):
    _trained(engine)
    engine.offload()
    return engine.away()


def _emptied(engine):
    from skyrl_megatron import device

    calls = []
    with patch.object(device, "empty_cache", lambda: calls.append(1)):
        _trained(engine)
    return len(calls)


def _traces(engine):
    _trained(engine)
    traces = sorted(Path(engine.cfg.trainer.log_path).parent.rglob("*.json.gz"))
    for path in traces:
        path.unlink()
    return [str(path) for path in traces]


def _adapters(engine):
    """Shape and size of each trained tensor, and what a second step does to all."""
    trained = {
        name: (tuple(each.shape), each.abs().sum().item())
        for chunk in engine.chunks
        for name, each in chunk.named_parameters()
        if each.requires_grad
    }
    _trained(engine)
    engine.forward_backward(_batch())
    return trained, engine.optim_step().grad_norm


def _moments(engine):
    """Names of the optimizer's moments, and the groups' rates after a step."""
    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges

    _trained(engine)
    rates = sorted(group["lr"] for group in engine.optimizer.param_groups)
    return sorted({name for each in owned_ranges(engine.optimizer) for name in each.tensors}), rates


PARTS = {
    "adapters": _adapters,
    "transformer": lambda engine: _fields(engine.model.config),
    "model": lambda engine: {name: str(value) for name, value in engine.model.hf.config.items()},
    "path": lambda engine: str(engine.settings.model.path),
    "head": lambda engine: str(engine.head().settings),
    "fused": lambda engine: engine._head_weight is not None,
    "trainable": lambda engine: sum(each.requires_grad for chunk in engine.chunks for each in chunk.parameters()),
    "optimizer": lambda engine: _fields(engine.optimizer.config),
    "decay": lambda engine: sorted(group["wd_mult"] for group in engine.optimizer.param_groups),
    "moments": _moments,
    "buffers": lambda engine: _fields(engine.chunks[0].ddp_config),
    "logprobs": lambda engine: engine.compute_logprobs(_batch()).tolist(),
    "schedule": _schedule,
    "metrics": lambda engine: sorted(_trained(engine)),
    "forward": lambda engine: _cuts(engine, lambda: engine.compute_logprobs(_batch())),
    "micro-batches": lambda engine: _cuts(engine, lambda: _trained(engine)),
    "away": _away,
    "emptied": _emptied,
    "traces": _traces,
    "said": lambda engine: None,
    "replayed": lambda engine: engine._replayed,
    "prefixes": lambda engine: engine.shares_prefixes,
    "routes": _route_problem,
    "draft": lambda engine: [part.extra_loss(engine.head()).scale for part in engine.parts if part.name == "draft"],
}


# --- what only GPUs have: the device says that there is one, and stand-ins note what they are asked


def dtype_on_gpus(cfg):
    """The type of parameters where there is a GPU."""
    from skyrl_megatron.runtime import engine_settings

    with patch.object(engine_settings.device, "has_cuda", lambda: True):
        return str(engine_settings.parameter_dtype(cfg))


def balanced(cfg):
    """The roles whose micro-batches are chosen by experts."""
    from skyrl_megatron.config.roles import balances_experts

    return [role for role in ("policy", "ref") if balances_experts(cfg, role)]


def report(cfg):
    """What ``--check`` says of the policy's experts."""
    from skyrl_megatron_observe.preflight import check_report

    return [line for line in check_report.report(cfg, base.GPUS) if "expert" in line]


def expected_lengths(cfg):
    """The responses with which ``--check`` estimates a step."""
    from skyrl_megatron_observe.estimate.lengths import step_lengths

    return step_lengths(cfg).responses.tolist()


def buffers(cfg):
    """Megatron's settings of gradient buffers that need a GPU."""
    from skyrl_megatron.runtime.engine_settings import ddp_config

    return str(ddp_config(cfg.trainer.policy.megatron_config))
