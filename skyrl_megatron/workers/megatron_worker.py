"""The Ray actor of one rank: a process with torch.distributed and one :class:`MegatronEngine`, for any role."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from skyrl_megatron import progress as spans
from skyrl_megatron.config.derive import preferences
from skyrl_megatron.config.roles import has_value_head, role_part
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning
from skyrl_megatron.hub import model_card
from skyrl_megatron.plugins import RANK_ENGINES, load_plugins
from skyrl_megatron.progress import timed
from skyrl_megatron.workers.actor_group import WATCH
from skyrl_megatron.workers.runtime_env import take_port

if TYPE_CHECKING:
    import numpy as np

    from bridges.source import FolderChanges
    from skyrl_megatron.algorithms.registry import RegistryVersions
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.progress import Span
    from skyrl_megatron.runtime.critic import CriticEngine
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.runtime.trained_model import RoleName
    from skyrl_megatron.types import Part, TrainingBatch
    from skyrl_megatron.weight_sync.buckets import TensorMeta
    from skyrl_megatron.weight_sync.point_to_point import ExchangeSchedule
    from skyrl_megatron.weight_sync.slices import SourceMap
    from skyrl_megatron.weight_sync.tensors import AdapterWeights
    from skyrl_megatron.weight_sync.transport import GroupMember
    from skyrl_megatron.workers.dispatch import RankInfo, Share

RANK_ENGINES.register_path("critic", "skyrl_megatron.runtime.critic:CriticEngine")

OWN_SECONDS = "own_seconds"
"""Metric of a single rank: its time in a mini-batch, without the waits for other ranks."""


class RankProcess:
    """One rank of a role's model. All methods except :meth:`address` and :meth:`alive` are called on every rank.

    The methods import Megatron, so that the driver, which only holds actor handles, does not.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._port: socket.socket | None = None
        self._warned: list[str] = []
        self._keep_warnings()

    def address(self) -> tuple[str, int]:
        """Return host and port for rank 0 of the process group. The port is reserved until :meth:`build`."""
        host = ray.util.get_node_ip_address()
        self._port = take_port(host)
        return host, self._port.getsockname()[1]

    def load(self, cfg: SkyRLTrainConfig, role: RoleName, log_folder: str | None = None) -> None:
        """Import what :meth:`build` needs, without communication. Output goes to ``log_folder``, if given."""
        if log_folder is not None:
            _redirect_output(Path(log_folder) / f"{role}_rank{self.rank}.log")
        from skyrl_megatron import device

        if not device.has_cuda():  # nothing is compiled on CPU, and the compiler is slow to import
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        importlib.import_module("skyrl_megatron.runtime.engine")
        load_plugins(cfg.trainer.plugins)

    def build(
        self,
        cfg: SkyRLTrainConfig,
        role: RoleName,
        address: tuple[str, int],
        total_steps: int | None = None,
        log_folder: str | None = None,
    ) -> RankInfo:
        """Call :meth:`load`, join the process group, build the model and load its weights."""
        self.load(cfg, role, log_folder)
        import torch
        import torch.distributed as dist

        from skyrl_megatron import device
        from skyrl_megatron.runtime import parallel_state as waits
        from skyrl_megatron.workers.dispatch import RankInfo

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        # Megatron and libraries below it read torchrun's variables.
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size), "LOCAL_RANK": "0"}
        device.set_local_device(0)  # Ray shows each actor only its own device
        timeout = datetime.timedelta(seconds=cfg.trainer.phase_timeout_s)
        # The open socket itself goes to the store: between closing and binding another process could take its port.
        held = None if self._port is None else self._port.detach()
        store = dist.TCPStore(*address, self.world_size, self.rank == 0, timeout, master_listen_fd=held)
        dist.init_process_group(
            device.collective_backend(), store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )
        waits.start_wait_timer()
        self.cfg, self.role = cfg, role
        self.engine: MegatronEngine = engine_class(cfg, role)(cfg, role, total_steps=total_steps)
        return RankInfo(
            self.engine.dp_rank,
            self.engine.dp_size,
            self.engine.is_collection_rank,
            os.getpid(),
            ray.util.get_node_ip_address(),
            self.engine.model.layer_kind if device.has_cuda() else "",
            self.engine.replayed,
            self.engine.groups.is_first_of_stage,
            self.engine.shares_prefixes,
            self.engine.unshared,
        )

    # ------------------------------------------------------------------ training
    @timed
    def train_mini_batch(
        self, registry: RegistryVersions, algorithm: Mapping[str, Any], more_follow: bool, share: Share
    ) -> dict[str, float]:
        """Take an optimizer step on a mini-batch. All ranks return the same metrics, except those of their own speed.

        ``algorithm``: fields of ``trainer.algorithm`` that this step overrides. ``more_follow``: another mini-batch
        comes before anything else reads the weights.
        """
        from skyrl_megatron import device
        from skyrl_megatron.algorithms.registry import ensure_registry_versions
        from skyrl_megatron.runtime.parallel_state import own_seconds

        began = own_seconds()
        # A loss registered in the driver after this process started.
        ensure_registry_versions(registry)
        objective = self.engine.objective(algorithm)
        result = self.engine.forward_backward(self._batch(share), objective=objective) | self.optim_step(more_follow)
        # On a GPU the call returns before its kernels end, so the host's seconds would say nothing.
        return result if device.has_cuda() else result | {OWN_SECONDS: own_seconds() - began}

    @timed
    def optim_step(self, more_follow: bool = False) -> dict[str, float]:
        """Take an optimizer step with the gradients since the last one."""
        result = self.engine.optim_step(more_follow=more_follow)
        # Nothing reads the optimizer before the next batch: its copies overlap with what the driver does next.
        if not more_follow:
            self.engine.start_offload()
        named = {f"adapter/{name}/": step for name, step in result.adapters.items()}
        return {
            f"{prefix}{metric}": value
            for prefix, step in {"": result, **named}.items()
            for metric, value in (
                *step.metrics.items(),
                ("grad_norm", step.grad_norm),
                ("lr", step.learning_rate),
                ("skipped", step.skipped),
                ("num_zeros_in_grad", step.zeros_in_grad),
            )
            if value is not None
        }

    def restart_schedule(self, lr: float | None, total_steps: int | None) -> None:
        """Restart the learning-rate schedule: as configured, or constant at ``lr``."""
        self.engine.restart_schedule(lr, total_steps)

    def take_expert_load(self) -> dict[int, list[int]] | None:
        """Return on rank 0 the tokens that each expert got in training since the last call, by layer; None
        elsewhere."""
        # Every rank takes, so that all start anew; their answers are equal.
        load = self.engine.take_expert_load()
        return load if self.rank == 0 else None

    # ------------------------------------------------------------------ scoring
    @timed
    def compute_logprobs(self, adapters: bool, share: Share) -> np.ndarray | None:
        """Return log-probs, [R] float32 in nats, on the collection rank of the replica; None elsewhere.

        The result is an array: Megatron changes how tensors are pickled, so unpickling one would import all of
        Megatron in the driver.
        """
        logprobs = self.engine.compute_logprobs(self._batch(share), adapters=adapters)
        return logprobs.numpy() if self.engine.is_collection_rank else None

    @timed
    def compute_logprobs_and_routes(self, share: Share) -> Any:
        """Return log-probs as :meth:`compute_logprobs`. On one rank of each pipeline stage of a replica more results
        follow: for each block of the share the experts of its rows' tokens in this stage's layers, [t, l, K] uint8 or
        uint16."""
        import numpy as np

        from skyrl_megatron.data.batch import recorded_name
        from skyrl_megatron.runtime.recording import Recorder

        engine = self.engine
        with Recorder(engine.model.chunks) as recorder:
            logprobs = engine.compute_logprobs(self._batch(share), make_step=recorder.step)
        answer = logprobs.numpy() if engine.is_collection_rank else None
        if not (engine.replayed and engine.groups.is_first_of_stage):
            return answer
        by_layer = [recorder.found[recorded_name(layer)] for layer in engine.replayed]
        dtype = np.min_scalar_type(engine.model.config.num_moe_experts - 1)

        def of_row(row: int) -> np.ndarray:
            return np.stack([found[row] for found in by_layer], 1, dtype=dtype, casting="unsafe")

        return answer, *(np.concatenate([of_row(row) for row in rows.tolist()]) for rows in share.rows_of_blocks())

    @timed
    def compute_values(self, share: Share) -> np.ndarray | None:
        """Return a critic's values, [R] float32, on the collection rank of the replica; None elsewhere."""
        values = cast("CriticEngine", self.engine).compute_values(self._batch(share))
        return values.numpy() if self.engine.is_collection_rank else None

    @timed
    def compute_scores(self, k: int, share: Share) -> Any:
        """Return a teacher's log-probs, [R] float32 in nats, on the collection rank of the replica; None elsewhere.

        With ``k``, further results follow: for each block of the share the log-probs of the likeliest tokens of its
        rows, [r, k] float32, then for each block their ids, [r, k] int32 (``runtime/scoring.py``)."""
        from skyrl_megatron.runtime.scoring import score_responses

        batch = self._batch(share)
        scores = score_responses(self.engine, batch, k)
        if not self.engine.is_collection_rank:
            return None
        logprobs, top, ids = scores[:, 0].contiguous().numpy(), scores[:, 1 : 1 + k], scores[:, 1 + k :].int()
        return (logprobs, *share.split(batch, top), *share.split(batch, ids)) if k else logprobs

    def _batch(self, share: Share) -> TrainingBatch:
        """Fetch what this rank reads of its rows."""
        return share.batch(self.engine.routes_read, last_stage=self.engine.groups.is_last_stage)

    @timed
    def compute_recorded(
        self, temperature: float | None, layers: bool, perturbation: float, share: Share
    ) -> tuple[np.ndarray | None, dict[str, dict[int, np.ndarray]] | None]:
        """Return log-probs [R] as :meth:`compute_logprobs` does, and on one rank of each pipeline stage of a
        replica the experts and, with ``layers``, the outputs of its layers (``runtime/recording.py``), by row of the
        share.

        ``perturbation``: relative change of every embedding before the pass (``runtime/scoring.py``)."""
        from skyrl_megatron.runtime.recording import Recorder
        from skyrl_megatron.runtime.scoring import perturbed_embeddings

        engine = self.engine
        perturbed = perturbed_embeddings(engine, perturbation) if perturbation else contextlib.nullcontext()
        with perturbed, Recorder(engine.model.chunks, layers=layers) as recorder:
            logprobs = engine.compute_logprobs(self._batch(share), temperature=temperature, make_step=recorder.step)
        # The recorder gathered over tp and cp, so one rank of a stage has all tokens.
        recorded = recorder.found if engine.groups.is_first_of_stage else None
        return logprobs.numpy() if engine.is_collection_rank else None, recorded

    def layer_weights(self, layer: int | None) -> dict[str, np.ndarray]:
        """Return the tensors of a layer that this rank gathers, by HF name, as float32. ``layer=None``: the tensors
        outside of the layers. Shapes [...] are those of the HF checkpoint. A stacked expert tensor is returned per
        expert, as ``<name>.<expert>``."""
        from skyrl_megatron.runtime.hf_weights import stream_hf

        engine, tensors = self.engine, {}
        for piece in stream_hf(engine.model, engine.groups):
            if layer_of(piece.name) == layer:
                name = piece.name if piece.index is None else f"{piece.name}.{piece.index}"
                tensors[name] = piece.tensor.float().cpu().numpy()
        return tensors

    # ------------------------------------------------------------------ weights for the engines
    def weight_metadata(self) -> list[TensorMeta]:
        """List the tensors that this rank sends to the engines, in order."""
        from skyrl_megatron.config.hf_model import engines_quantise
        from skyrl_megatron.config.roles import weight_bucket_sizes, weight_transport
        from skyrl_megatron.weight_sync.megatron_source import weight_source
        from skyrl_megatron.weight_sync.sender import WeightSender

        alone = self.cfg.trainer.policy.model.lora.sync_mode == "memory"
        engine = self.engine
        # Receivers plan by this list. Moved experts would arrive under the names of others.
        self._listed_slots = dict(engine.model.experts.moved)
        engine.onload("weights")  # they are offloaded if an engine starts on this GPU, and are read here
        quantised = engines_quantise(self.cfg, engine.model.hf.config)
        adapters = engine.every_adapter()
        self.source = weight_source(engine.model, adapters, engine.groups, adapters_alone=alone, quantised=quantised)
        bucket_bytes = weight_bucket_sizes(self.cfg)[-1]
        self.sender = WeightSender(self.source, bucket_bytes=bucket_bytes, transport=weight_transport(self.cfg))
        return list(self.sender.metadata())

    def weights_moved(self) -> bool:
        """Return whether experts changed their ranks since :meth:`weight_metadata`."""
        return self._listed_slots != self.engine.model.experts.moved

    def listen_for_engines(self) -> tuple[str, int]:
        """Return an address for this rank's process group with the engine workers."""
        self._address = self.sender.listen(ray.util.get_node_ip_address())
        return self._address

    def connect_engines(self, receivers: int, timeout_s: float) -> None:
        """Open the process group at that address and wait for the engine workers."""
        self.sender.connect(*self._address, receivers, timeout_s)

    def join_engines(self, member: GroupMember, timeout_s: float, sizes: Sequence[int]) -> list[float]:
        """Join a group of ranks and engine workers; return the bandwidth with each bucket size, bytes per second."""
        return self.sender.join(member, timeout_s, sizes)

    def weight_source_map(self) -> SourceMap | str:
        """List the weights that this rank holds, or return why they cannot be resharded."""
        self.engine.onload("weights")
        return self.sender.source_map()

    def set_transfers(
        self, buckets: bytes, copies: bytes, ranks_of: dict[int, int], exchange: ExchangeSchedule | None = None
    ) -> None:
        """Send by this reshard plan from now on."""
        self.sender.set_transfers(buckets, copies, ranks_of, exchange)

    @timed
    def send_weights(self, adapters: Sequence[str] | None = None) -> list[Any]:
        """Send this rank's tensors, or those of ``adapters``; return the checksum of each bucket."""
        from skyrl_megatron.errors import WeightSyncError

        if self.weights_moved():
            raise WeightSyncError("experts moved after the engines were connected, which would get those of others")
        self.engine.onload("weights")
        if adapters is not None:
            cast("AdapterWeights", self.source).choose(adapters)
        return self.sender.send()

    @timed
    def score(self, token_ids: Sequence[int], perturbation: float, adapter: str = "") -> list[float] | None:
        """Score tokens for the probe, see ``runtime/scoring.py``."""
        from skyrl_megatron.runtime.scoring import score_tokens

        return score_tokens(self.engine, token_ids, perturbation=perturbation, adapter=adapter)

    # ------------------------------------------------------------------ weights for another role
    @timed
    def next_weights(self, first: bool) -> list[Any] | None:
        """Return a Ray reference to this rank's part of the ``first``, or the next, bucket of its weights; None after
        the last one. The bytes stay in this process until they are fetched."""
        from skyrl_megatron.runtime.offload import weight_buckets

        if first:
            self.engine.onload("weights")
            self._buckets: Iterator[Any] = weight_buckets(self.engine.model, self.engine.groups)
        bucket = next(self._buckets, None)
        # In a list, in which Ray does not resolve a reference that the driver passes on.
        return None if bucket is None else [ray.put(bucket)]

    @timed
    def take_weights(self, first: bool, given: Sequence[Any]) -> None:
        """Copy this rank's shards from the ``first``, or a later, bucket that ``given`` refers to. An empty ``given``
        ends the transfer. Raises WeightSyncError if a weight is missing then."""
        from skyrl_megatron.runtime.offload import ShardReceiver

        if first:
            self.engine.onload("weights")
            self._shards = ShardReceiver(self.engine.model, self.engine.groups)
        for reference in given:
            self._shards.take(ray.get(reference, timeout=self.cfg.trainer.phase_timeout_s))
        if not given:
            self._shards.finish()

    # ------------------------------------------------------------------ checkpoints
    @timed
    def save_checkpoint(self, adapter: str, folder: str, step: int, background: bool) -> None:
        """Write this rank's part of the role, or of one of its named adapters, into ``folder``. With ``background``,
        return once the state is copied."""
        from skyrl_megatron.runtime.checkpoint.rank_files import RankWriter

        if not hasattr(self, "writers"):
            self.writers = {name: RankWriter() for name in self.engine.adapter_names}
        part = role_part(self.role, adapter)
        self.writers[adapter].write(folder, part, step, self._state(adapter), background=background)

    def wait_checkpoint(self, adapter: str, timeout_s: float) -> None:
        """Wait for the background write."""
        if hasattr(self, "writers"):
            self.writers[adapter].wait(timeout_s)

    @timed
    def load_checkpoint(self, adapter: str, folder: str) -> int:
        """Load weights, moments, schedule and random states; return their step."""
        from skyrl_megatron.runtime.checkpoint.rank_files import read_rank

        part = role_part(self.role, adapter)
        return read_rank(folder, part, self._state(adapter), seed=self.cfg.trainer.seed)

    @timed
    def export_hf(self, folder: str, changes: FolderChanges | None = None) -> None:
        """Write the model as a HF folder, with ``changes`` of its files. An unnamed adapter is merged into the
        weights, and also saved in ``adapter`` next to the folder. Named adapters are only saved in
        ``adapters/<name>`` next to it."""
        from skyrl_megatron.runtime.adapters import save_adapter
        from skyrl_megatron.runtime.hf_weights import save_hf

        engine, trainer = self.engine, self.cfg.trainer
        card = model_card(trainer.hub_commits, trainer.policy.model.path)
        engine.onload("weights")
        if engine.adapters is None:
            save_hf(engine.model, engine.groups, folder, card=card, changes=changes)
        elif engine.adapter_names != ("",):
            for name in engine.adapter_names:
                engine.set_adapter(name)
                save_adapter(engine.adapters, engine.groups, Path(folder).parent / "adapters" / name, engine.base)
        else:
            save_hf(engine.model, engine.groups, folder, of=engine.adapters.merged, card=card, changes=changes)
            save_adapter(engine.adapters, engine.groups, Path(folder).parent / "adapter", engine.base)

    def state_hashes(self) -> dict[str, str]:
        """Return the SHA-256 of every saved block of this rank (weights, moments) and of its random states."""
        import hashlib

        import torch

        from skyrl_megatron.runtime.checkpoint import rank_files as rng
        from skyrl_megatron.runtime.checkpoint.rank_state import blocks_to_save

        hashes: dict[str, Any] = {}
        for name in self.engine.adapter_names:
            prefix, state = f"{name}: " if name else "", self._state(name)
            for block in blocks_to_save(state.model_chunks, state.optimizer, state.groups):
                data: np.ndarray = block.data.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
                hashes.setdefault(f"{prefix}{block.key}", hashlib.sha256()).update(data.tobytes())
            hashes[f"{prefix}rng"] = hashlib.sha256(rng.capture_rng())
        return {name: digest.hexdigest() for name, digest in hashes.items()}

    def _state(self, adapter: str) -> Any:
        from skyrl_megatron.runtime.checkpoint.rank_files import RankState

        engine = self.engine
        engine.onload("weights", "optimizer")
        engine.set_adapter(adapter)
        return RankState(list(engine.chunks), engine.groups, engine.optimizer, engine.lr_schedule, engine.base)

    # ------------------------------------------------------------------ recovery of a lost rank
    def alive(self) -> int:
        """Return the process id. A :data:`ReplaceableWorker` answers while other calls run."""
        return os.getpid()

    @timed
    def keep_state(self, distance: int) -> int:
        """Save a peer checkpoint: copy this rank's state and send it to the rank ``distance`` after this one. Returns
        the host memory of the copies in bytes (``runtime/peer_checkpoint.py``)."""
        from skyrl_megatron.runtime.peer_checkpoint import PeerCheckpoints

        if not hasattr(self, "copies"):
            self.copies = PeerCheckpoints()
        return self.copies.keep(self.engine, distance)

    @timed
    def roll_back(self, holders: Mapping[int, int]) -> None:
        """Restore the peer checkpoint. ``holders``: new rank → the rank that has its copy."""
        from skyrl_megatron.runtime.peer_checkpoint import PeerCheckpoints

        if not hasattr(self, "copies"):
            self.copies = PeerCheckpoints()
        self.copies.roll_back(self.engine, holders)

    def leave(self) -> None:
        """Drop the model and its process groups after a rank was lost; :meth:`build` creates them again. Peer
        checkpoints stay."""
        from skyrl_megatron import device
        from skyrl_megatron.runtime.parallel_state import end_groups

        if hasattr(self, "sender"):
            self.sender.close()
        # What refers to process groups goes before they end.
        for name in ("sender", "source", "_buckets", "_shards", "engine"):
            self.__dict__.pop(name, None)
        gc.collect()
        end_groups(world=True)
        device.empty_cache()

    # ------------------------------------------------------------------ memory
    @timed
    def offload(self, parts: Sequence[Part]) -> None:
        """Free the GPU memory of ``parts``, until they are needed."""
        self.engine.offload(*parts)

    @timed
    def onload(self, parts: Sequence[Part]) -> None:
        """Load ``parts`` to the GPU before they are needed."""
        self.engine.onload(*parts)

    def device_bytes(self) -> int:
        """Return the bytes of the role's state on this rank's device."""
        return self.engine.device_bytes()

    def away(self) -> tuple[Part, ...]:
        """Return the parts that are offloaded."""
        return self.engine.away()

    def memory_bytes(self) -> int:
        """Return the peak device memory of this process, in bytes."""
        from skyrl_megatron import device

        return device.peak_memory_bytes()

    # ------------------------------------------------------------------ measurements and warnings
    def flops(self) -> ModelFlops:
        """Return the FLOP model of a sequence, which balances batches over the replicas."""
        return self.engine.flops

    def peak_flops(self) -> float | None:
        """Return the peak FLOP/s of the device, for MFU; None if unknown."""
        from skyrl_megatron.runtime.flops import peak_flops

        return peak_flops(self.engine.cfg.trainer.peak_flops_per_rank)

    def device_type(self) -> str | None:
        """Return the type of the device, a key of ``GPU_TYPES``; "" if unknown, None for a CPU."""
        from skyrl_megatron.runtime.flops import device_type

        return device_type()

    def take_spans(self) -> list[Span]:
        """Return the spans of this process since the last call."""
        return spans.take()

    def take_warnings(self) -> list[str]:
        """Return the package's warnings since the last call."""
        taken, self._warned = self._warned, []
        return taken

    def _keep_warnings(self) -> None:
        """Collect the package's warnings for the run's console, as this process shows them only in the rank's log."""
        # For the life of the process, so not within catch_warnings, which restores the function at its end.
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, SkyRLMegatronWarning):
                self._warned.append(str(message))
            usual(message, category, *place, **more)

        warnings.showwarning = show


MegatronWorker = ray.remote(RankProcess)
ReplaceableWorker = ray.remote(concurrency_groups={WATCH: 1})(RankProcess)
"""A worker that answers :meth:`RankProcess.alive` while it is busy."""


def engine_class(cfg: SkyRLTrainConfig, role: str) -> Callable[..., MegatronEngine]:
    """Return the class of a role's engine: that of log-probs or of a critic's values, unless the run trains on other
    data. Raises ConfigError if no installed package registers it."""
    if role == "critic":
        kind = "critic"
    # After the critic, which has a value head too.
    elif has_value_head(cfg, role):
        kind = "reward"
    elif role == "policy" and preferences(cfg) is not None:
        kind = "preferences"
    else:
        from skyrl_megatron.runtime.engine import MegatronEngine

        return MegatronEngine
    if (cls := RANK_ENGINES.find(kind)) is None:
        raise ConfigError([Problem(f"{RANK_ENGINES.key} ({role})", kind, "no installed package registers it")])
    return cls


def layer_of(name: str) -> int | None:
    """Return the layer number in a tensor's HF name; None for a tensor outside of the layers."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def _redirect_output(path: Path) -> None:
    """Redirect stdout and stderr of this process, libraries included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    # By descriptor, because NCCL and other libraries write past sys.stdout.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
