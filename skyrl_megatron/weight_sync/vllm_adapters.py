"""The worker's end of a sync of adapters in vLLM 0.32: received into slots beside the one that serves, checked, then
activated.

vLLM takes adapters from folders, and 37,000 tensors of a large one, each by its name. Here its modules are given what
its LoRA manager would have made of them: one set of stacked factors for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.lora.lora_model import LoRAModel

from skyrl_megatron import device
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.adapter_tensors import FactorName
from skyrl_megatron.weight_sync.metadata import metadata_of
from skyrl_megatron.weight_sync.parcel_receiver import ParcelReceiver
from skyrl_megatron.weight_sync.routes import FilledTensor, Unroutable
from skyrl_megatron.weight_sync.vllm_adapter_modules import fill_slot, modules_of, pairs_of
from skyrl_megatron.weight_sync.vllm_adapter_routes import AdapterRoute, SlotTargets, record_adapter_route


class AdapterExtension:
    """Methods of a worker that hold adapters; ``compat.WorkerExtension`` mixes them in."""

    weight_transfer_engine: Any
    model_runner: Any
    skyrl_slots: Mapping[str, int] = {}
    """Adapter → the slot that it was received into, and not activated."""
    skyrl_route: AdapterRoute | None = None
    """What :meth:`skyrl_record_adapter_route` found."""
    skyrl_travelling: Sequence[str] = ()
    """The adapters of the last update by routes."""

    def skyrl_record_adapter_route(self, tensors: list[list[Any]]) -> tuple[list[FilledTensor], bytes] | str:
        """Return the worker's route for ``tensors``, fields of :class:`TensorMeta`, or why it has none."""
        metadata = [metadata_of(*item) for item in tensors]
        try:
            self.skyrl_route = record_adapter_route(self._manager(), metadata)
        except Unroutable as error:
            return str(error)
        self.weight_transfer_engine.take_route(self.skyrl_route.route, metadata)
        return self.skyrl_route.route.plain

    def skyrl_stage_adapters(self, senders: list[list[list[Any]]] | None) -> tuple[list[list[int]], Sequence[str]]:
        """Receive adapters into free slots. ``senders``: as in ``vllm_backend.UpdateInfo``; by routes, one list of all
        that travels.

        Returns the checksums of the buckets, per sender, and the projections that no module here has a place for.
        Raises WeightSyncError for an adapter that the engine was not started for.
        """
        self.skyrl_slots = {}
        try:
            routed = isinstance(self.weight_transfer_engine.receiver, ParcelReceiver)
            self.skyrl_slots, sums, left = self._by_routes(senders) if routed else self._by_buckets(senders)
        except BaseException:
            self.weight_transfer_engine.shutdown()
            raise
        device.mark()()
        return sums, left

    def _by_buckets(
        self, senders: list[list[list[Any]]] | None
    ) -> tuple[dict[str, int], list[list[int]], Sequence[str]]:
        receiver = self.weight_transfer_engine.prepared(senders)
        tensors = dict(receiver.tensors())
        receiver.finish()
        manager, left = self._manager(), []
        adapters = pairs_of(tensors)
        slots = self._free_slots(list(adapters))
        self.skyrl_route = None  # it knows what was in slots
        for name, pairs in adapters.items():
            modules, unplaced = modules_of(manager, pairs)
            fill_slot(manager.modules, slots[name], modules)
            left += unplaced
        return slots, receiver.checksums, left

    def _by_routes(
        self, senders: list[list[list[Any]]] | None
    ) -> tuple[dict[str, int], list[list[int]], Sequence[str]]:
        if senders is not None:
            named = (FactorName.parse(name).adapter for sender in senders for name, *_ in sender)
            self.skyrl_travelling = list(dict.fromkeys(named))
        receiver, route = self.weight_transfer_engine.receiver, self.skyrl_route
        assert route is not None, "a worker without a route has no parcels"
        slots = self._free_slots(self.skyrl_travelling)
        targets = SlotTargets(self._manager(), route, slots)
        device.mark()()  # what is received is written by a stream of its own
        of_tensor = [meta.adapter in slots for meta in route.tensors]
        receiver.receive(targets, [n for n, row in enumerate(receiver.parcels.buckets) if of_tensor[row[5]]])
        targets.finish()
        return slots, receiver.checksums, route.unplaced

    def _free_slots(self, names: Sequence[str]) -> dict[str, int]:
        held = self._manager().lora_index_to_id
        free = [slot for slot, number in enumerate(held) if number is None]
        if len(free) < len(names):
            raise WeightSyncError(f"no slots are free for {len(names)} adapters: {held} are held")
        return dict(zip(names, free, strict=False))

    def skyrl_activate_adapters(self, numbers: dict[str, int]) -> list[int]:
        """Let the slots that adapters were received into last, by name, be these numbers; return all that are held.
        Those that requests use stay."""
        slots, self.skyrl_slots = self.skyrl_slots, {}
        if missing := [name or "the adapter" for name in numbers if name not in slots]:
            raise WeightSyncError(f"{', '.join(missing)} was not received")
        manager = self._manager()
        for name, number in numbers.items():  # as LoRAModelManager.activate_adapter does
            manager._registered_adapters[number] = LoRAModel(number, 0, {})
            manager._active_adapters[number] = None
            manager.lora_index_to_id[slots[name]] = number
        return self._active()

    def skyrl_keep_adapters(self, numbers: list[int]) -> list[int]:
        """Drop what was received and not activated, and all adapters but ``numbers``; return those that are held."""
        self.skyrl_slots = {}
        manager = self._manager()
        for number in list(manager.list_adapters()):
            if number not in numbers:
                manager.remove_adapter(number)
        return self._active()

    def _active(self) -> list[int]:
        return sorted(number for number in self._manager().lora_index_to_id if number is not None)

    def _manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager
