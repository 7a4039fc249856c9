"""Experts that tokens were routed to, on CPU. vLLM 0.32 returns them from Model Runner V2 alone, the one on CUDA.

What keeps them by block of the KV cache, so that cached prefixes have theirs, and hands them to the scheduler is not
bound to a runner (vllm/distributed/aux_output_connector); the first runner is made to drive it here, step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.outputs import ModelRunnerOutput


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the collector reads of Model Runner V2's batch."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    num_computed_tokens_np: np.ndarray


def return_routes(runner: Any) -> None:
    """Let the first model runner put the routes of each step into its outputs."""
    connector = get_aux_output_connector(runner.model, runner.vllm_config, runner.kv_cache_config)
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    waiting: list[tuple[Any, np.ndarray]] = []

    def execute_and_capture(scheduler_output: Any, *rest: Any, **options: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        answer = execute_model(scheduler_output, *rest, **options)
        if scheduler_output.total_num_scheduled_tokens:
            count = runner.input_batch.num_reqs
            batch = _Batch(
                list(runner.input_batch.req_ids[:count]),
                runner.query_start_loc.np[: count + 1].copy(),
                runner.input_batch.num_computed_tokens_cpu[:count].copy(),
            )
            if (pending := connector.prepare_output(batch)) is not None:
                waiting.append((pending, ~runner.discard_request_mask.np[:count]))
        return answer

    def sample_and_hand_over(*arguments: Any, **options: Any) -> Any:
        answer = sample_tokens(*arguments, **options)
        output = getattr(answer, "_model_runner_output", answer)  # wrapped where scheduling is asynchronous
        if waiting and isinstance(output, ModelRunnerOutput):
            pending, sampled = waiting.pop()
            pending.enqueue_cpu_copy(sampled.astype(np.int64), np.zeros(len(sampled), np.int64))
            output.aux_output_connector_output = pending.process_output()
        return answer

    runner.execute_model, runner.sample_tokens = execute_and_capture, sample_and_hand_over


def allow_routes_on_cpu() -> None:
    """Let a configuration ask for routes: vLLM refuses it without Model Runner V2. What else it refuses, the rules of
    ``generator.inference_engine.enable_return_routed_experts`` do."""
    VllmConfig._verify_aux_output_compatibility = lambda self: None
