"""Requests that an engine works on: what a test waits for instead of a time."""

from __future__ import annotations

import asyncio
from typing import Any


async def has_sampled(engine: Any, request_id: str, within_s: float = 120.0) -> None:
    """Wait until vLLM has sampled the first token of a request."""
    processor = engine._llm.output_processor
    async with asyncio.timeout(within_s):
        while not any(
            not processor.request_states[known].is_prefilling
            for known in processor.external_req_ids.get(request_id, [])
            if known in processor.request_states
        ):
            await asyncio.sleep(0.001)
