"""Workers of an engine that do not do with adapters what they say."""

from skyrl_megatron_lora.vllm_worker import AdapterWorkerExtension


class FaultyWorker(AdapterWorkerExtension):
    """``plant``: a mistake of the last worker, or of all; ``adapter``: the one of several that it is about."""

    planted: str | None = None
    about: str = ""

    def plant(self, fault: str | None, adapter: str = "") -> None:
        self.planted, self.about = fault, adapter

    def skyrl_activate_adapters(self, numbers: dict[str, int]) -> list[int]:
        last = self.parallel_config.rank == self.parallel_config.world_size - 1
        if last and self.planted == "fails to activate":
            raise RuntimeError("out of slots, says the test")
        if last and self.planted == "activates nothing":
            numbers = dict(numbers)
            self._pretend(numbers.pop(self.about))
        if self.planted == "ignores experts":
            for name, module in self._manager().modules.items():
                if name.endswith(".experts"):
                    module.reset_lora(self.skyrl_slots[self.about])
        if self.planted == "takes one for the other":
            names = list(self.skyrl_slots)
            self.skyrl_slots = dict(zip(names, reversed(self.skyrl_slots.values()), strict=True))
        return super().skyrl_activate_adapters(numbers)

    def _pretend(self, number: int) -> None:
        """Give a slot to an adapter, with zeros in it."""
        manager, slot = self._manager(), self.skyrl_slots[self.about]
        for module in manager.modules.values():
            module.reset_lora(slot)
        manager.lora_index_to_id[slot] = number
        manager._registered_adapters[number] = None
        manager._active_adapters[number] = None

    def slot_bytes(self) -> int:
        """Bytes of the slots of adapters."""
        from vllm.lora.layers.fused_moe import FusedMoEWithLoRA

        of_experts = [f"{part}_lora_{letter}_stacked" for part in ("w13", "w2") for letter in "ab"]
        return sum(
            tensor.nbytes
            for module in self._manager().modules.values()
            for name in (of_experts if isinstance(module, FusedMoEWithLoRA) else ("lora_a_stacked", "lora_b_stacked"))
            for tensor in getattr(module, name)
        )

    def slot_sums(self) -> dict[str, str]:
        """What lies in the slot of the adapter that was activated last, by module and tensor."""
        import torch
        from blake3 import blake3

        manager = self._manager()
        slot = manager.lora_index_to_id.index(max(filter(None, manager.lora_index_to_id)))
        found = {}
        for path, module in manager.modules.items():
            for name, value in vars(module).items():
                if name.endswith("_stacked") or name == "adapter_enabled":
                    for n, each in enumerate((value,) if isinstance(value, torch.Tensor) else value):
                        if each.dim() != 2:  # else a view of one expert's
                            found[f"{path}.{name}.{n}"] = blake3(each[slot].numpy().tobytes()).hexdigest()
        return found

    def memory(self) -> int:
        """Bytes that the process holds, all of its cache among them (pages count from the first write on), without
        what the C library keeps of freed memory."""
        import ctypes

        import psutil

        for cache in self.model_runner.kv_caches:
            cache.mul_(1)
        ctypes.CDLL(None).malloc_trim(0)
        return psutil.Process().memory_info().rss
