"""Workers of an engine that do not do with an adapter what they say."""

from skyrl_megatron.inference.vllm.compat import WorkerExtension


class FaultyWorker(WorkerExtension):
    """``plant``: a mistake of the last worker, or of all."""

    planted: str | None = None

    def plant(self, fault: str | None) -> None:
        self.planted = fault

    def skyrl_activate_adapter(self, number: int) -> None:
        last = self.parallel_config.rank == self.parallel_config.world_size - 1
        if last and self.planted == "fails to activate":
            raise RuntimeError("out of slots, says the test")
        if last and self.planted == "activates nothing":
            self._manager().lora_index_to_id[self._manager().lora_index_to_id.index(None)] = number
            self._manager()._registered_adapters[number] = None
            self._manager()._active_adapters[number] = None
            return
        if self.planted == "ignores experts":
            self.skyrl_staged = {name: f for name, f in self.skyrl_staged.items() if not name.endswith(".experts")}
        super().skyrl_activate_adapter(number)

    def memory(self) -> int:
        """Bytes that the process holds, all of its cache among them: pages count from the first write on."""
        import psutil

        for cache in self.model_runner.kv_caches:
            cache.mul_(1)
        return psutil.Process().memory_info().rss
