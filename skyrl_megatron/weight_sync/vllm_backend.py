"""The worker's side of a weight sync in vLLM 0.32: the weight-transfer backend, and models with draft layers.

Importing this module registers the backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name
from vllm.platforms import current_platform

from skyrl_megatron import device
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync import DEFAULT_BUCKET_BYTES
from skyrl_megatron.weight_sync.buckets import TensorMeta, WeightReceiver
from skyrl_megatron.weight_sync.point_to_point import SliceReceiver
from skyrl_megatron.weight_sync.slices import (
    ReshardUnsupported,
    TargetMap,
    TargetTensor,
    TransferList,
    check_transfers,
)
from skyrl_megatron.weight_sync.tensors import as_on_disk, metadata_of
from skyrl_megatron.weight_sync.transport import (
    DEFAULT_TIMEOUT_S,
    GroupMember,
    default_transport,
    first_line,
    measure,
    open_transport,
)
from skyrl_megatron.weight_sync.vllm_reshard import ModelTargets, record_targets

_EMBEDDING = "model.embed_tokens.weight"


def language_model(model: Any) -> Any:
    """Return the language model, whose loaders take the names that are sent, of a model of text and images."""
    return model.get_language_model() if supports_multimodal(model) else model


class DraftedModel(torch.nn.Module):
    """A target model and its draft model as one model to load: ``modules()`` yields shared modules once."""

    def __init__(self, target: torch.nn.Module, draft: torch.nn.Module) -> None:
        super().__init__()
        self.target: Any = target
        self.draft: Any = draft

    def takes(self, name: str) -> bool:
        """Return whether a tensor, by its HF name, belongs to the draft layer."""
        return get_spec_layer_idx_from_weight_name(self.draft.config, name) is not None

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load (HF name, tensor [shape on disk]) pairs, each with the loaders of the model that it belongs to."""
        self.target.load_weights(self._of_target(tensors))

    def _of_target(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the target's tensors, and load the draft's tensors on the way."""
        # with pipeline parallelism, the last stage drafts with a separate embedding (_maybe_share_embeddings)
        apart = self.draft.model.embed_tokens is not getattr(self.target.model, "embed_tokens", None)
        for name, tensor in tensors:
            of_draft = self.takes(name)
            if of_draft or (apart and name == _EMBEDDING):
                # both models compute with this embedding on the last stage, so both need the new one
                self.draft.load_weights([(name, tensor)])
            if not of_draft:
                yield name, tensor


def drafted_model(worker: Any) -> DraftedModel | None:
    """Return a worker's model with its draft model; None if it does not draft with layers of the model's folder."""
    own, speculative = worker.vllm_config.model_config, worker.vllm_config.speculative_config
    if speculative is None or speculative.method != "mtp" or speculative.draft_model_config.model != own.model:
        return None
    draft = worker.get_draft_model()
    return None if draft is None else DraftedModel(language_model(worker.get_model()), draft)


__all__ = ["BACKEND", "WeightExtension", "WeightTransferInitRequest", "WeightTransferUpdateRequest"]
BACKEND = "skyrl_megatron"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How to join the senders' groups. ``senders``: ``(host, port)`` of each; ``rank_offset``: rank of this engine's
    first worker."""

    senders: list[tuple[str, int]] = field(default_factory=list)
    rank_offset: int = 1
    world_size: int = 2
    transport: str | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S
    transfers: list[list[Any]] | None = None
    """With a reshard plan, for each worker of this engine: its :class:`TransferList`, its member of the group (fields
    of ``transport.GroupMember``), and rank → the member that sends its buckets. None: every worker gets all
    buckets."""
    sizes: tuple[int, ...] = ()
    """Sizes of buckets that the group measures (``transport.measure``)."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Metadata of each sender: lists of :class:`TensorMeta` fields. None: the same as in the previous update."""

    senders: list[list[list[Any]]] | None = None


class BroadcastTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives weights of trainer ranks for vLLM's layerwise reload, with a checksum per bucket.

    Either all weights are broadcast and loaded by the model's loaders, or each worker gets its own slices, which are
    copied to where the loaders would copy them. Errors are kept for :meth:`WeightExtension.skyrl_checksums` and
    :meth:`WeightExtension.skyrl_connected`; ``inference/vllm/requests.py`` says why.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    receiver: WeightReceiver | SliceReceiver | None = None
    failure: Exception | None = None
    drafted: DraftedModel | None = None
    """The model with its draft model, see :func:`drafted_model`."""
    target_map: TargetMap
    """The worker's target map, from :meth:`record`."""
    target_model: torch.nn.Module
    """The model of :attr:`target_map`."""
    dtypes: list[torch.dtype]
    """The dtypes of the tensors of :attr:`target_map`."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, language_model(model))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        self.failure = None
        try:
            self._connect(init_info)
        except Exception as error:
            self.failure = error

    def _connect(self, init_info: InitInfo) -> None:
        config = self.parallel_config
        # workers are numbered through all data-parallel engines of this vLLM instance
        worker = config.data_parallel_index * config.world_size + config.rank
        if init_info.transfers is not None:
            self._join(init_info, *init_info.transfers[worker])
            return
        rank = init_info.rank_offset + worker
        transports = [
            open_transport(
                init_info.transport or default_transport(), host, port, rank, init_info.world_size, init_info.timeout_s
            )
            for host, port in init_info.senders
        ]
        self.receiver = WeightReceiver(transports, init_info.bucket_bytes, torch.device(self.device))

    def _join(
        self,
        info: InitInfo,
        buckets: bytes,
        copies: bytes,
        member_fields: Sequence[Any],
        numbers: list[tuple[int, int]],
    ) -> None:
        transfers, device = TransferList.from_wire(buckets, copies), torch.device(self.device)
        check_transfers(transfers, self.target_map)
        (host, port), number, senders, size = member_fields
        member = GroupMember((host, port), number, senders, size)
        name = info.transport or default_transport()
        transport = open_transport(name, host, port, number, size, info.timeout_s)
        try:
            if info.sizes:
                measure(transport, member, info.sizes)
        except BaseException:
            # the trainer's ranks wait for this member until it has left the group
            transport.close()
            raise
        self.receiver = SliceReceiver(transfers, transport, dict(numbers), self.dtypes, info.bucket_bytes, device)

    def record(self, tensors: list[list[Any]]) -> tuple[list[TargetTensor], bytes] | str:
        """Return the target map of the worker's model for ``tensors`` (fields of :class:`TensorMeta`), or why it has
        none."""
        metadata = [metadata_of(*item) for item in tensors]
        self.target_model = self.loading(meta.name for meta in metadata)
        name_loaders(self.target_model)
        try:
            self.set_targets(record_targets(self.target_model, metadata, torch.device(self.device)), metadata)
        except ReshardUnsupported as error:
            return str(error)
        except Exception as error:  # a loader rejects recorder tensors; the model is unchanged
            return f"{type(error).__name__} while its loaders were recorded: {first_line(error)}"
        return self.target_map.wire

    def set_targets(self, target_map: TargetMap, tensors: Iterable[TensorMeta]) -> None:
        """Use a target map of this worker for the next connection."""
        self.target_map, self.dtypes = target_map, [meta.torch_dtype for meta in tensors]

    def loading(self, names: Iterable[str]) -> Any:
        """Return the model that loads tensors of these names: with its draft model if some are for that."""
        return self.model if self.drafted is None or not any(map(self.drafted.takes, names)) else self.drafted

    def start_weight_update(self) -> None:
        self._begin(self.model)

    def _begin(self, model: torch.nn.Module) -> None:
        """Prepare modules for a reload. Modules that are already prepared do not change."""
        name_loaders(model)
        initialize_layerwise_reload(model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.failure = None
        try:
            if isinstance(self.receiver, SliceReceiver):
                self._begin(self.target_model)
                self.receiver.receive(ModelTargets(self.target_model, self.target_map))
                return
            receiver = self.prepared(update_info.senders)
            model = self.loading(meta.name for sender in receiver.senders for meta in sender)
            self._begin(model)
            tensors = as_on_disk(receiver.tensors(), receiver.senders)
            model.load_weights(without_sinks(self.model, tensors))
            receiver.finish()
        except Exception as error:  # the weights are wrong now; skyrl_abort_update ends the update
            self.shutdown()
            self.failure = error

    def prepared(self, senders: list[list[list[Any]]] | None) -> WeightReceiver:
        """Return the receiver with its metadata set. ``senders``: as in :class:`UpdateInfo`."""
        if not isinstance(self.receiver, WeightReceiver):
            raise WeightSyncError("no trainer is connected: connect to its ranks (InitInfo) before an update")
        if senders is not None:
            self.receiver.set_metadata([[metadata_of(*item) for item in sender] for sender in senders])
        return self.receiver

    def finish_weight_update(self) -> None:
        # modules that both models share are processed once if both are finalized as one
        finalize_layerwise_reload(self.drafted or self.model, self.model_config)
        if current_platform.is_cpu() and getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            pack_output_layer(self.model)
        device.mark()()  # buckets that modules referred to until now may be reused

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None


class WeightExtension:
    """Methods of a worker for weight syncs; ``compat.WorkerExtension`` mixes them in."""

    weight_transfer_engine: BroadcastTransferEngine
    _weight_update_active: bool
    finish_weight_update: Callable[[], None]

    def skyrl_connected(self) -> None:
        """Find the worker's draft model, and raise the error that kept it from joining the trainer's groups."""
        self.weight_transfer_engine.drafted = drafted_model(self)
        if self.weight_transfer_engine.failure is not None:
            raise self.weight_transfer_engine.failure

    def skyrl_checksums(self) -> list[list[int]]:
        """Return the checksums of the last update's buckets, per sender. Raises the error of that update."""
        self.skyrl_connected()
        receiver = self.weight_transfer_engine.receiver
        return [] if receiver is None else receiver.checksums

    def skyrl_record_targets(self, tensors: list[list[Any]]) -> tuple[list[TargetTensor], bytes] | str:
        """Return the worker's target map, see :meth:`BroadcastTransferEngine.record`."""
        self.weight_transfer_engine.drafted = drafted_model(self)
        return self.weight_transfer_engine.record(tensors)

    def skyrl_abort_update(self) -> None:
        """End an update that was started and not finished. The weights are wrong until the next complete update."""
        if self._weight_update_active:
            # vLLM refuses the next update while one is under way
            self.finish_weight_update()


def name_loaders(model: torch.nn.Module) -> None:
    """Name loaders that are partial functions (MiniMax's norms), because a reload reads every loader's name."""
    for parameter in model.parameters():
        loader: Any = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def without_sinks(
    model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load attention sinks, [heads], and yield the other tensors.

    vLLM's gpt-oss copies sinks straight into the parameter, which has no memory during a reload. A reload only sees
    what goes through the parameter's loader.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in tensors:
        if not name.endswith(".sinks"):
            yield name, tensor
            continue
        # vLLM's gpt-oss calls its attention ``attn``
        parameter: Any = parameters.get(name.replace(".self_attn.", ".attn."))
        if parameter is not None:  # else a layer of another pipeline stage
            heads = parameter.shape[0]
            parameter.weight_loader(parameter, tensor.narrow(0, get_tensor_model_parallel_rank() * heads, heads))


def pack_output_layer(model: torch.nn.Module) -> None:
    """Pack the output layer's weight again. On CPU, vLLM computes with a packed copy of it, which is stale after a
    reload if the layer is tied to the embedding."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


with contextlib.suppress(ValueError):  # registered already
    WeightTransferEngineFactory.register_engine(BACKEND, BroadcastTransferEngine)
