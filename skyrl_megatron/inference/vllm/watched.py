"""An engine that replays tokens, for a comparison with the trainer layer by layer (``entrypoints/gap``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skyrl_megatron.inference.vllm.engine import VLLMEngine
from skyrl_megatron.inference.vllm.layers import unpacked
from skyrl_megatron.inference.vllm.requests import sampling_parameters


class WatchedEngine(VLLMEngine):
    """An eager engine that is asked for one thing at a time."""

    async def replay(
        self, token_ids: Sequence[int], *, layers: bool = False
    ) -> tuple[list[float], np.ndarray | None, dict[str, np.ndarray]]:
        """Return log-probs of tokens 1 … n−1 at temperature 1 over the whole vocabulary, nats; experts [n, L, K] of
        every token, where the engine returns them; and with ``layers`` what these give, [n, H] by name."""
        from skyrl_megatron.inference.vllm import compat

        await self.reset_prefix_cache()
        if layers:
            await compat.on_every_worker(self._llm, "skyrl_watch_layers")
        one = {"max_tokens": 1, "prompt_logprobs": 0, "logprobs": None}
        parameters = sampling_parameters("replay", one, support=self.settings.return_support)
        final, _ = await self._finished("replay", token_ids, parameters, "")
        outputs: dict[str, np.ndarray] = {}
        for worker in await compat.on_every_worker(self._llm, "skyrl_layer_outputs") if layers else ():
            outputs |= unpacked(worker)
        scored = zip(token_ids[1:], final.prompt_logprobs[1:], strict=True)
        return [at[token].logprob for token, at in scored], final.outputs[0].routed_experts, outputs

    async def layer_weights(self, layer: int | None) -> list[dict[str, np.ndarray]]:
        """Return each worker's tensors of a layer, by vLLM's names, as float32; None: those of no layer."""
        from skyrl_megatron.inference.vllm import compat

        return [unpacked(each) for each in await compat.on_every_worker(self._llm, "skyrl_layer_weights", layer)]
