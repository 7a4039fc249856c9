"""Real engines for tests: one event loop in a thread of its own, and engines that live on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

KV_BYTES = 64 << 20


class LoopThread:
    """``loop(coroutine)`` runs it on the loop and waits for the result."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, work: Coroutine[Any, Any, Any], timeout_s: float = 300.0) -> Any:
        return self.start(work).result(timeout_s)

    def start(self, work: Coroutine[Any, Any, Any]):
        """A future of the result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


def tiny_settings(model: Path, **changes: Any):
    """Settings of a small fp32 engine on a HF folder."""
    from skyrl_megatron.inference.vllm.settings import EngineSettings

    settings = dict(
        model=str(model),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_cache_bytes=KV_BYTES,
        start_timeout_s=580.0,
    )
    return EngineSettings(**{**settings, **changes})


def reference_logprobs(model: Path, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of tokens 1 … n−1 by transformers in fp32, at a temperature."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = network(torch.tensor([token_ids])).logits[0, :-1] / temperature
    chosen = torch.tensor(token_ids[1:])[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()


def largest_gap(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other), (len(one), len(other))
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
