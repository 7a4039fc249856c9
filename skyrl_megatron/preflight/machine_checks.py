"""Check the machine: GPUs, locked memory, memory budget, ports, folders, attention kernels."""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron import device
from skyrl_megatron.config.derive import is_address
from skyrl_megatron.config.hardware import GPUS, UNLOCK
from skyrl_megatron.config.hf_model import model_dimensions
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.config.roles import active_roles, is_frozen, role_layout
from skyrl_megatron.config.rules.layout import layout_problems
from skyrl_megatron.config.rules.training_rules import LONGEST_NAME, longest_pack, runs_ahead
from skyrl_megatron.errors import CheckpointError, ConfigError, JournalError, Problem, shown
from skyrl_megatron.preflight.option_checks import NotChecked, PlannedRun

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


LEAST_LOCKED = 64 << 20
"""Bytes under which NCCL cannot start between nodes: a channel's buffer has 4 MiB (NCCL_BUFFSIZE), and queues come
to it. The limits that systems come with are 64 KiB and 8 MiB."""


def machine(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield what shows only on GPUs, and a limit of locked memory that ends a run over several nodes."""
    if run.hardware.is_cpu:
        return
    here = device.driver_gpu_count()
    if here < run.hardware.gpus_per_node:
        yield NotChecked("GPUs", f"{run.hardware.gpus_per_node} asked for, {here} here: drivers, kernels and links")
    yield NotChecked("GPU memory", "what other programs hold of it when the run starts")
    yield from _locked_memory(run)


def _locked_memory(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    limit, placement = run.hardware.lockable_bytes, run.cfg.trainer.placement
    if limit is None:
        return
    text = f"{limit / 1e6:g} MB"
    nodes = max(getattr(placement, f"{role}_num_nodes") for role in active_roles(run.cfg))
    if nodes > 1 and limit < LEAST_LOCKED:
        why = f"NCCL registers buffers with RDMA cards between nodes, {LEAST_LOCKED / 1e6:.0f} MB and more"
        yield Problem("locked memory", text, f"{why}: {UNLOCK}")
    else:
        yield NotChecked("locked memory", f"{text} may be registered with RDMA cards; if NCCL asks for more: {UNLOCK}")


def memory(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield a problem for each phase that does not fit; what is not known where sizes or models are not at hand."""
    hardware = run.hardware
    if hardware.is_cpu or not run.training:
        return
    missing = {"--gpu h100": hardware.gpu_bytes, "--host-memory 2TB": hardware.host_bytes}
    asked = [option for option, known in missing.items() if known is None]
    if asked:
        yield NotChecked("memory", f"how large GPUs or nodes are is not known here: add {' and '.join(asked)}")
    if len(asked) == len(missing):
        return
    from skyrl_megatron.preflight.memory_budget import Budget, parameter_tables, problems

    try:
        tables = parameter_tables(run.cfg)
    except ConfigError:  # reported by those who need the model
        return
    if set(tables) != set(active_roles(run.cfg)):
        yield NotChecked("memory", "config.json of the model is not here")
        return
    for role in active_roles(run.cfg):
        dims = model_dimensions(tables[role].plan.hf_config)
        if layout_problems(role_layout(run.cfg, role), dims):
            return  # reported already
    yield from problems(run.cfg, tables, Budget.of(run.cfg, tables, hardware))


def ports(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield the ports of the endpoint and the registry that cannot be listened on."""
    engine, cluster = run.cfg.generator.inference_engine, os.environ.get("RAY_ADDRESS", "")
    listeners = (
        (engine.enable_http_endpoint, "http_endpoint_port", engine.http_endpoint_host, engine.http_endpoint_port),
        (engine.enable_registry, "registry_port", engine.registry_host, engine.registry_port),
    )
    for enabled, name, host, port in listeners:
        if not (enabled and port):
            continue
        key = f"generator.inference_engine.{name}"
        if cluster:
            yield NotChecked(f"{key}={port}", "the run's process may be on another node of the cluster")
        elif why := _cannot_listen(host, port):
            yield Problem(key, port, f"cannot listen on {host} ({why}): set another port, or 0 for a free one")
    if engine.enable_registry and not run.training:
        fix = "engines that join wait for a trainer's weights, and there is none: set it to false"
        yield Problem("generator.inference_engine.enable_registry", True, fix)
    if cluster:
        yield NotChecked("the cluster", "whether this environment is on its nodes shows when it is joined")


def _cannot_listen(host: str, port: int) -> str | None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def folders(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield folders for logs, checkpoints and exports that cannot be written or made, and a checkpoint to resume from
    that is not there."""
    trainer = run.cfg.trainer
    resume = trainer.resume_path
    if trainer.resume_mode == "from_path" and resume and not is_address(resume) and not os.path.isdir(resume):
        yield Problem("trainer.resume_path", resume, "no such folder")
    named = all(len(name.encode()) <= LONGEST_NAME for name in (trainer.project_name, trainer.run_name))
    logs = run_folder(run.cfg) if named else Path(trainer.log_path)  # the rules report names that are too long
    wanted = {"trainer.log_path": (trainer.log_path, logs)}
    if run.training:
        wanted["trainer.ckpt_path"] = (trainer.ckpt_path, Path(trainer.ckpt_path))
    if run.training and runs_ahead(run.cfg) and (path := trainer.fully_async.rollouts_path):
        wanted["trainer.fully_async.rollouts_path"] = (path, Path(path))
    if _exports(run.cfg, run.training):
        wanted["trainer.export_path"] = (trainer.export_path, Path(trainer.export_path))
    for key, (value, folder) in wanted.items():
        if is_address(value):
            yield NotChecked(f"{key}={value}", "an object store: whether it can be written shows at the first save")
        elif why := cannot_write(folder):
            yield Problem(key, value, f"{why}; name a folder that you can write to")


def _exports(cfg: SkyRLTrainConfig, training: bool) -> bool:
    """Return whether anything is written to ``export_path``."""
    trainer = cfg.trainer
    evaluates = not training or trainer.eval_before_train or trainer.eval_interval > 0
    dumps = trainer.dump_eval_results and bool(cfg.data.val_data) and evaluates
    return dumps or (training and (trainer.hf_save_interval > 0 or trainer.dump_data_batch))


def cannot_write(folder: Path) -> str | None:
    """Say why no file can be made in ``folder``, or the folder itself cannot; None if it can.

    Tried in the folder, or in the nearest one above it that exists.
    """
    existing = folder.absolute()
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
    except OSError as error:  # a name that no file system takes
        return f"{shown(folder)} cannot be made ({error.strerror})"
    if not existing.is_dir():
        return f"{existing} is a file"
    try:
        with tempfile.TemporaryDirectory(prefix=".skyrl-megatron-", dir=existing) as probe:
            (Path(probe) / "probe").write_bytes(b"\0")
    except OSError as error:
        reason = error.strerror or str(error)
        return f"{existing} cannot be written ({reason}{_owner(existing)})"
    return None


def _owner(folder: Path) -> str:
    """Name whose folder it is, if not the user's own."""
    owner = folder.stat().st_uid
    if owner == os.getuid():
        return ""
    try:
        return f"; it belongs to {folder.owner()}"
    except KeyError:
        return f"; it belongs to user {owner}"


LIMIT = 1 << 30
"""Sequences · heads of a rank · tokens² from which Transformer Engine leaves cuDNN's deterministic backward on Hopper:
it asks for 128 bytes for each (2.20, ``SM90_DET_FUSED_THD_BWD_MAX_BHSS`` in dot_product_attention/utils.py)."""


def attention(run: PlannedRun) -> Iterator[Problem]:
    """Yield a problem for each role whose micro-batches are too large for a deterministic kernel.

    It would take unfused attention, or have none. What GPUs other than Hopper have shows when a model is built on one
    (``runtime/model/attention_kernels.py``).
    """
    newer = (run.hardware.gpu_bytes or 0) > GPUS["h200"] << 20
    if run.hardware.is_cpu or newer or not (run.training and run.cfg.trainer.deterministic):
        return
    from skyrl_megatron.preflight.memory_budget import parameter_tables
    from skyrl_megatron.preflight.memory_phases import RoleModel
    from skyrl_megatron.runtime.model.attention_kernels import no_deterministic_kernel

    try:
        tables = parameter_tables(run.cfg)
    except ConfigError:  # reported by those who need the model
        return
    sequences, tokens = longest_pack(run.cfg)
    for role in active_roles(run.cfg):
        if is_frozen(role) or role not in tables:
            continue
        model = RoleModel.of(run.cfg, role, tables[role])
        asked = model.settings.megatron_config.transformer_config_kwargs.get("attention_backend")
        unfused = asked == "unfused" or (asked is None and not run.cfg.trainer.flash_attn)
        flash = not model.table.plan.shape.mla and importlib.util.find_spec("flash_attn") is not None
        heads = model.table.plan.shape.dims["A"] // model.parallel.tp
        if model.kernels.fused and not (unfused or flash) and sequences * heads * tokens**2 >= LIMIT:
            yield no_deterministic_kernel(sequences, heads, tokens, f"trainer.{role}.megatron_config.")


def replay(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield why the rollouts of ``trainer.fully_async.replay_from`` cannot be trained on from where the run begins."""
    folder = run.cfg.trainer.fully_async.replay_from
    if not (folder and run.training and runs_ahead(run.cfg)):
        return
    from skyrl_megatron.trainer.checkpoints import resumed_step  # these need torch, and few runs replay
    from skyrl_megatron.trainer.rollout_replay import KEY, ReplayedRollouts

    try:
        recorded = ReplayedRollouts(run.cfg, lambda number: {})
        try:
            recorded.check(resumed_step(run.cfg))
        finally:
            recorded.store.close()
    except ConfigError as error:
        yield from error.problems
    except (CheckpointError, JournalError) as error:
        yield Problem(KEY, folder, str(error))
