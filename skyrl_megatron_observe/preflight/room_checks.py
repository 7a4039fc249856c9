"""Check room outside of the ranks' memory: disk for checkpoints, exports and journals, and Ray's object store."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.checks import NotChecked, PlannedRun
from skyrl_megatron.config.derive import is_address, supervised
from skyrl_megatron.config.hf_model import model_dimensions
from skyrl_megatron.config.layout import layout_problems
from skyrl_megatron.config.resolve import generates_ahead, longest_sequence, rollouts_folder
from skyrl_megatron.config.roles import active_roles, is_frozen, role_layout
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron_observe.estimate.memory_budget import gigabytes, parameter_tables
from skyrl_megatron_observe.estimate.memory_phases import RoleModel
from skyrl_megatron_observe.estimate.run_totals import checkpoint_bytes

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable

LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every node has for itself, unless a file system of the network is mounted there."""
SHARED_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "glusterfs", "cifs", "9p", "virtiofs")
MOUNTS = Path("/proc/mounts")
TOKEN_BYTES = 30
"""Bytes of a token in a step's rows without its experts: id, two masks and six numbers (``TrainingBatch``)."""
STORE_SHARE, MOST_STORE = 0.3, 200 * 10**9
"""Ray's default object store: this share of a node's memory, and at most so many bytes (``ray_constants.py``)."""
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run writes to a folder."""

    key: str
    folder: str
    nbytes: float
    """At the worst, in bytes."""
    text: str
    """What it is made of."""


def shared_folders(run: PlannedRun) -> Iterator[Problem]:
    """Yield a problem, with the keys, if nodes with GPUs would write to folders that each node has for itself."""
    trainer = run.cfg.trainer
    nodes = max(getattr(trainer.placement, f"{role}_num_nodes") for role in active_roles(run.cfg))
    if run.hardware.is_cpu or nodes < 2:
        return
    folders = {"trainer.log_path": trainer.log_path}
    if run.training:
        folders |= {"trainer.ckpt_path": trainer.ckpt_path, "trainer.export_path": trainer.export_path}
    local = {key: folder for key, folder in folders.items() if not is_address(folder) and _is_local(folder)}
    if local:
        key, others = next(iter(local)), list(local)[1:]
        also = f", and so must {' and '.join(others)}" if others else ""
        fix = f"{nodes} nodes must see this folder{also}: name one on a file system that they share, such as ~/runs"
        yield Problem(key, local[key], fix)


def _is_local(folder: str) -> bool:
    """Return whether a folder is in one of :data:`LOCAL_FOLDERS` and on no file system of the network."""
    names = [*LOCAL_FOLDERS, *([os.environ["TMPDIR"]] if os.environ.get("TMPDIR") else [])]
    if not any(Path(folder).is_relative_to(name) for name in names):
        return False
    mounts = [line.split()[1:3] for line in MOUNTS.read_text().splitlines()] if MOUNTS.is_file() else []
    above = [(len(mount), kind) for mount, kind in mounts if Path(folder).is_relative_to(mount)]
    kind = max(above, default=(0, ""))[1]
    return kind not in SHARED_SYSTEMS and not kind.startswith("fuse.")


def room(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield a problem for each folder whose disk has less than the run writes to it, and what a step's rows take if
    that is more than Ray's object store. For other machines than this one it is a note: their disks are not here."""
    if not run.training:
        return
    try:
        tables = parameter_tables(run.cfg)
    except ConfigError:  # reported by the check of the model
        return
    roles = active_roles(run.cfg)
    if set(tables) != set(roles):
        return
    if any(layout_problems(role_layout(run.cfg, r), model_dimensions(tables[r].plan.hf_config)) for r in roles):
        return  # reported already
    here = not run.hardware.elsewhere or bool(os.environ.get("RAY_ADDRESS"))
    for wanted in written(run.cfg, tables, on_cpu=run.hardware.is_cpu):
        yield from _disk(wanted, here=here)
    if supervised(run.cfg) is None:
        yield from _object_store(run, tables["policy"])


def _disk(wanted: Wanted, *, here: bool) -> Iterator[Problem | NotChecked]:
    if is_address(wanted.folder):
        return
    existing = Path(wanted.folder).absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        usage = shutil.disk_usage(existing)
    except OSError:  # reported by the check of folders
        return
    if not usage.total:  # no file system that keeps files, which that check reports too
        return
    free = usage.free
    if free >= wanted.nbytes:
        return
    why = f"{wanted.text}, and {gigabytes(free)} are free there"
    if here:
        yield Problem(wanted.key, wanted.folder, f"{why}: name a folder with more room, or keep less")
    else:
        yield NotChecked(f"{wanted.key}={wanted.folder}", f"{why}, as this machine sees it")


def written(cfg: SkyRLTrainConfig, tables: Mapping[str, ParameterTable], *, on_cpu: bool) -> Iterator[Wanted]:
    """Yield what a run writes to each of its folders, at the worst."""
    trainer, trained = cfg.trainer, [role for role in active_roles(cfg) if not is_frozen(role)]
    one = sum(checkpoint_bytes(RoleModel.of(cfg, role, tables[role], on_cpu=on_cpu)) for role in trained)
    steps = trainer.max_training_steps
    if trainer.ckpt_interval > 0:
        number = math.ceil(steps / trainer.ckpt_interval) if steps else 1
        if trainer.max_ckpts_to_keep > 0:  # the oldest is removed when the next one is complete
            number = min(number, trainer.max_ckpts_to_keep + 1) if steps else trainer.max_ckpts_to_keep + 1
        if not is_address(trainer.ckpt_path):
            number = max(number - _saved(Path(trainer.ckpt_path)), 1)
        text = f"a checkpoint takes {gigabytes(one)}, {number} at a time {gigabytes(number * one)}"
        yield Wanted("trainer.ckpt_path", trainer.ckpt_path, number * one, text)
    if trainer.hf_save_interval > 0:
        number = math.ceil(steps / trainer.hf_save_interval) if steps else 1
        size = sum(tables[role].total() for role in trained) * (2 if trainer.bf16 else 4)
        text = f"an export takes {gigabytes(size)}, {number} of them {gigabytes(number * size)}"
        yield Wanted("trainer.export_path", trainer.export_path, number * size, text)
    if generates_ahead(cfg):
        folder, key = rollouts_folder(cfg)
        size = row_bytes(cfg, tables["policy"])
        text = f"the journal of a step's samples takes up to {gigabytes(size)}"
        yield Wanted(key, folder, size, text)


def _saved(folder: Path) -> int:
    try:
        return len(list(folder.glob("global_step_*")))
    except OSError:  # such as a name that is too long, which the check of folders reports
        return 0


def row_bytes(cfg: SkyRLTrainConfig, table: ParameterTable) -> int:
    """Return the bytes of all rows of a step if every one has the maximum length."""
    trainer, token = cfg.trainer, TOKEN_BYTES
    if trainer.policy.megatron_config.moe_enable_routing_replay and table.experts:
        layers = sum(bool(moe) for moe in table.plan.shape.moe)
        token += layers * table.top_k * (1 if table.experts <= 256 else 2)
    return trainer.train_batch_size * cfg.generator.n_samples_per_prompt * longest_sequence(cfg) * token


def _object_store(run: PlannedRun, table: ParameterTable) -> Iterator[NotChecked]:
    size = run.hardware.host_bytes
    if size is None or run.hardware.is_cpu:
        return
    store, what = min(int(STORE_SHARE * size), MOST_STORE), "Ray's object store of a node by default"
    if not run.hardware.elsewhere and os.path.isdir(SHARED_MEMORY):
        free = shutil.disk_usage(SHARED_MEMORY).free
        store, what = min((store, what), (free, f"{SHARED_MEMORY}, where Ray's object store is"))
    if (needed := row_bytes(run.cfg, table)) > store:
        why = (
            f"the rows of a step take up to {gigabytes(needed)}, {what} has {gigabytes(store)}: Ray writes the rest "
            "to its temporary folder. Start Ray with a larger --object-store-memory, or lower trainer.train_batch_size"
        )
        yield NotChecked("object store", why)
