"""Check the machine: GPUs, locked memory, memory budget, ports, folders, attention kernels."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bridges.errors import BridgeError
from skyrl_megatron import device
from skyrl_megatron.checks import NotChecked, PlannedRun
from skyrl_megatron.config.derive import is_address
from skyrl_megatron.config.hardware import GPUS, UNLOCK
from skyrl_megatron.config.hf_model import model_dimensions
from skyrl_megatron.config.layout import layout_problems
from skyrl_megatron.config.resolve import generates_ahead, longest_pack, run_folder
from skyrl_megatron.config.roles import active_roles, is_frozen, role_layout
from skyrl_megatron.config.rules.megatron_rules import replaces_attention
from skyrl_megatron.config.rules.placement_rules import device_problems
from skyrl_megatron.config.rules.training_rules import LONGEST_NAME
from skyrl_megatron.errors import CheckpointError, ConfigError, JournalError, Problem, SkyRLMegatronError, shown

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


MIN_LOCKED_BYTES = 64 << 20
"""Minimum locked memory for NCCL between nodes: a channel needs a buffer of 4 MiB (NCCL_BUFFSIZE) and queues. The
usual default limits of Linux are 64 KiB and 8 MiB."""


def machine(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield what only GPUs can show, and a limit of locked memory that is too low for several nodes."""
    if run.hardware.is_cpu:
        return
    here = device.driver_gpu_count()
    if not run.hardware.elsewhere and run.hardware.gpu_bytes is None and shutil.which("nvidia-smi"):
        fix = "nvidia-smi does not answer, so no GPU can be used: restart or reinstall the driver (dmesg tells why)"
        yield Problem("GPUs", run.hardware.gpus_per_node, fix)
    if here < run.hardware.gpus_per_node:
        why = f"this machine has {here} of {run.hardware.gpus_per_node}: drivers, kernels and links are not checked"
        yield NotChecked("GPUs", why)
    yield NotChecked("GPU memory", "how much other programs use when the run starts is unknown")
    yield from _locked_memory(run)


def _locked_memory(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    limit, placement = run.hardware.lockable_bytes, run.cfg.trainer.placement
    if limit is None:
        return
    text = f"{limit / 1e6:g} MB"
    nodes = max(getattr(placement, f"{role}_num_nodes") for role in active_roles(run.cfg))
    if nodes > 1 and limit < MIN_LOCKED_BYTES:
        why = f"NCCL between nodes registers {MIN_LOCKED_BYTES / 1e6:.0f} MB or more of buffers with RDMA cards"
        yield Problem("locked memory", text, f"{why}: {UNLOCK}")
    else:
        yield NotChecked("locked memory", f"the limit is {text}; if NCCL needs more for RDMA cards: {UNLOCK}")


def memory(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield a problem for each phase that does not fit into memory, or what is unknown: memory sizes, the model.

    ``recompute_granularity=auto`` is resolved in place.
    """
    hardware = run.hardware
    if hardware.is_cpu or not run.training:
        return
    missing = {"--gpu h100": hardware.gpu_bytes, "--host-memory 2TB": hardware.host_bytes}
    asked = [option for option, size in missing.items() if size is None]
    if asked:
        yield NotChecked("memory", f"the memory size of GPUs or nodes is unknown: add {' and '.join(asked)}")
    if len(asked) == len(missing):
        return
    from skyrl_megatron_observe.estimate.memory_budget import Budget, memory_problems, parameter_tables
    from skyrl_megatron_observe.estimate.memory_recompute import choose_recomputation

    try:
        tables = parameter_tables(run.cfg)
    except ConfigError:  # reported by the check of the model
        return
    if set(tables) != set(active_roles(run.cfg)):
        yield NotChecked("memory", "config.json of the model is not available here")
        return
    if any(device_problems(run.cfg, hardware)):
        return  # reported already, as are those of layouts
    for role in active_roles(run.cfg):
        dims = model_dimensions(tables[role].plan.hf_config)
        if layout_problems(role_layout(run.cfg, role), dims):
            return
    if hardware.gpu_bytes is not None:
        choose_recomputation(run.cfg, tables, hardware.gpu_bytes)
    yield from memory_problems(run.cfg, tables, Budget.of(run.cfg, tables, hardware))


def ports(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield the ports of the endpoint and the registry that cannot be bound."""
    engine, cluster = run.cfg.generator.inference_engine, os.environ.get("RAY_ADDRESS", "")
    listeners = (
        (engine.enable_http_endpoint, "http_endpoint_port", engine.http_endpoint_host, engine.http_endpoint_port),
        (engine.enable_registry, "registry_port", engine.registry_host, engine.registry_port),
    )
    for enabled, name, host, port in listeners:
        if not (enabled and port):
            continue
        key = f"generator.inference_engine.{name}"
        if cluster or run.hardware.elsewhere:
            yield NotChecked(f"{key}={port}", "the run may bind it on another node than this one")
        elif why := _cannot_listen(host, port):
            yield Problem(key, port, f"cannot listen on {host} ({why}): set another port, or 0 for a free one")
    if engine.enable_registry and not run.training:
        fix = "engines that join need weights from a trainer, which an evaluation does not have: set it to false"
        yield Problem("generator.inference_engine.enable_registry", True, fix)
    if cluster:
        yield NotChecked("the cluster", "whether its nodes have this Python environment shows when the run joins it")


def _cannot_listen(host: str, port: int) -> str | None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def folders(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield folders for logs, checkpoints and exports that cannot be created or written, and a missing checkpoint to
    resume from."""
    trainer = run.cfg.trainer
    resume = trainer.resume_path
    if trainer.resume_mode == "from_path" and resume and not is_address(resume) and not os.path.isdir(resume):
        yield Problem("trainer.resume_path", resume, "no such folder: set it to a global_step_N folder")
    named = all(len(name.encode()) <= LONGEST_NAME for name in (trainer.project_name, trainer.run_name))
    logs = run_folder(run.cfg) if named else Path(trainer.log_path)  # the rules report names that are too long
    wanted = {"trainer.log_path": (trainer.log_path, logs)}
    if run.training:
        wanted["trainer.ckpt_path"] = (trainer.ckpt_path, Path(trainer.ckpt_path))
    if run.training and generates_ahead(run.cfg) and (path := trainer.fully_async.rollouts_path):
        wanted["trainer.fully_async.rollouts_path"] = (path, Path(path))
    if _exports(run.cfg, run.training):
        wanted["trainer.export_path"] = (trainer.export_path, Path(trainer.export_path))
    for key, (value, folder) in wanted.items():
        if is_address(value):
            yield NotChecked(f"{key}={value}", "an object store; whether it is writable shows at the first save")
        elif why := write_failure(folder):
            yield Problem(key, value, f"{why}; set it to a folder that you can write to")


def _exports(cfg: SkyRLTrainConfig, training: bool) -> bool:
    """Return whether anything is written to ``export_path``."""
    trainer = cfg.trainer
    evaluates = not training or trainer.eval_before_train or trainer.eval_interval > 0
    dumps = trainer.dump_eval_results and bool(cfg.data.val_data or cfg.data.eval_sets) and evaluates
    return dumps or (training and (trainer.hf_save_interval > 0 or trainer.dump_data_batch))


def write_failure(folder: Path) -> str | None:
    """Return why files cannot be created in ``folder``, or the folder itself; None if they can.

    Writes a temporary file in the folder, or in its nearest existing parent.
    """
    existing = folder.absolute()
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
    except OSError as error:  # an invalid file name
        return f"{shown(folder)} cannot be created ({error.strerror})"
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
    """Return text that names the owner of the folder; empty if it is the current user."""
    owner = folder.stat().st_uid
    if owner == os.getuid():
        return ""
    try:
        return f"; it belongs to {folder.owner()}"
    except KeyError:
        return f"; it belongs to user {owner}"


LIMIT = 1 << 30
"""Sequences · heads per rank · tokens² at which Transformer Engine stops using cuDNN's deterministic backward on
Hopper, whose workspace takes 128 bytes for each (version 2.20, ``SM90_DET_FUSED_THD_BWD_MAX_BHSS`` in
dot_product_attention/utils.py)."""


def attention(run: PlannedRun) -> Iterator[Problem]:
    """Yield a problem for each role whose micro-batches are too large for a deterministic attention kernel on Hopper.

    On other GPUs, ``runtime/model/attention_kernels.py`` checks this when it builds the model.
    """
    newer = (run.hardware.gpu_bytes or 0) > GPUS["h200"] << 20
    if run.hardware.is_cpu or newer or not (run.training and run.cfg.trainer.deterministic):
        return
    from skyrl_megatron.runtime.model.attention_kernels import no_deterministic_kernel
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.memory_phases import RoleModel

    try:
        tables = parameter_tables(run.cfg)
    except ConfigError:  # reported by the check of the model
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
        fused = model.kernels.fused and not replaces_attention(run.cfg, role)  # else the attention is ours
        if fused and not (unfused or flash) and sequences * heads * tokens**2 >= LIMIT:
            yield no_deterministic_kernel(sequences, heads, tokens, f"trainer.{role}.megatron_config.")


def resume(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield a problem if the checkpoint that the run would continue is of another model, data set or verb."""
    trainer = run.cfg.trainer
    if not run.training or trainer.resume_mode in (None, "none") or is_address(trainer.ckpt_path):
        return
    if trainer.resume_mode == "latest" and not os.path.isdir(trainer.ckpt_path):
        return
    from skyrl_megatron.trainer.checkpoints import resume_problems  # loads torch, and new runs do not resume

    try:
        yield from resume_problems(run.cfg)
    except (BridgeError, SkyRLMegatronError, OSError):  # of model, tokenizer or data: reported where they are checked
        return


def replay(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield why the run cannot train on the rollouts of ``trainer.fully_async.replay_from`` from its first step."""
    folder = run.cfg.trainer.fully_async.replay_from
    if not (folder and run.training and generates_ahead(run.cfg)):
        return
    from skyrl_megatron.sources.replayed import KEY, ReplayedRollouts
    from skyrl_megatron.trainer.checkpoints import resumed_step  # loads torch, and few runs replay

    try:
        recorded = ReplayedRollouts(run.cfg, lambda number, uid: {})
        try:
            recorded.check(resumed_step(run.cfg))
        finally:
            recorded.store.close()
    except ConfigError as error:
        yield from error.problems
    except (CheckpointError, JournalError) as error:
        yield Problem(KEY, folder, str(error))
