"""Patches of vLLM that protect the engine core: invalid requests are rejected, and a core without input thread is
dead.

The core's input thread decodes requests strictly and ends at the first one that it cannot decode
(``vllm/v1/engine/core.py``, ``process_input_sockets``). The process then keeps running, but answers nothing. Every
process that sends requests to a core imports this: the run's engines (``compat.py``) and servers (``api_server.py``).
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
import threading
import types
from typing import Any

import msgspec
import zmq
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from zmq.utils.monitor import recv_monitor_message

from skyrl_megatron.inference.sampling_params import RESERVED, WrongType, typed_field

log = logging.getLogger(__name__)
RECONNECT_S = 3.0
"""How long a core may be disconnected: a network connection may break and be restored."""
_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if not name.startswith("_") and name not in RESERVED)
_own = threading.local()


def install() -> None:
    """Apply all patches to vLLM in this process. Call this before an engine is created."""
    check_requests()
    offer_structured_outputs()
    notice_lost_cores()


# ------------------------------------------------------------------ requests
def check_requests() -> None:
    """Patch vLLM to reject requests that its core cannot decode, before they are registered anywhere."""
    original = InputProcessor.process_inputs
    if getattr(original, "checks", False):
        return

    def process_inputs(
        self: InputProcessor, request_id: str, prompt: Any, params: Any, *rest: Any, **options: Any
    ) -> EngineCoreRequest:
        if isinstance(params, SamplingParams):
            require_types(params)
        try:
            request = original(self, request_id, prompt, params, *rest, **options)
        except (VLLMClientError, ValueError, TypeError, NotImplementedError):
            raise
        except (ImportError, ArithmeticError, LookupError, RecursionError, AttributeError) as error:
            # vLLM failed on the request's values; the engine is not affected
            raise VLLMValidationError(f"the request cannot be served: {type(error).__name__}: {error}") from error
        require_decodable(request)
        return request

    process_inputs.checks = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def require_types(params: SamplingParams) -> None:
    """Convert every parameter to its declared type. Raises VLLMValidationError with the first wrong one."""
    for name in _FIELDS:
        value = getattr(params, name)
        if value is None:
            continue
        try:
            typed = typed_field(name, value)
        except WrongType as error:
            raise VLLMValidationError(str(error), parameter=name) from error
        if typed is not value:
            setattr(params, name, typed)


def require_decodable(request: EngineCoreRequest) -> None:
    """Encode and decode a request as the core will. Raises VLLMValidationError if that fails."""
    if not hasattr(_own, "decoder"):  # encoder and decoder are not thread-safe
        _own.encoder, _own.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    try:
        _own.decoder.decode(_own.encoder.encode(request))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        field = _wrong_field(request, str(error))
        raise VLLMValidationError(f"{field} cannot be sent to the engine: {error}", parameter=field) from error


def _wrong_field(request: EngineCoreRequest, problem: str) -> str:
    """Return the field that a decoding error refers to by number, or the first that cannot be encoded."""
    names: tuple[str, ...] = EngineCoreRequest.__struct_fields__
    at = problem.rpartition("$[")[2].partition("]")[0]
    if at.isdigit() and int(at) < len(names):
        return names[int(at)]
    for name in names:
        try:
            _own.encoder.encode(getattr(request, name))
        except (TypeError, ValueError, OverflowError, RecursionError):
            return name
    return "the request"


def offer_structured_outputs() -> None:
    """Patch vLLM to support structured outputs without lm-format-enforcer, which it imports for every backend."""
    name = "vllm.v1.structured_output.backend_lm_format_enforcer"
    if name in sys.modules or importlib.util.find_spec("lmformatenforcer") is not None:
        return

    def refuse(params: SamplingParams) -> None:
        raise VLLMValidationError(
            "structured outputs: the package lm-format-enforcer is not installed; set "
            "generator.inference_engine.engine_init_kwargs.structured_outputs_config.backend=xgrammar",
            parameter="structured_outputs",
        )

    module: Any = types.ModuleType(name)
    module.validate_structured_output_request_lm_format_enforcer = refuse
    sys.modules[name] = module


# ------------------------------------------------------------------ cores
def notice_lost_cores() -> None:
    """Patch vLLM to mark an engine dead as soon as the input thread of a core ends, which closes the core's
    connection.

    A living core keeps its connection open even during long steps.
    """
    original = AsyncMPClient._ensure_output_queue_task
    if getattr(original, "watches", False):
        return

    def ensure(self: AsyncMPClient) -> None:
        starts = self.resources.output_queue_task is None
        original(self)
        if starts:
            events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
            monitor = self.input_socket.get_monitor_socket(events)
            watch = asyncio.create_task(_watch(monitor, self.resources), name="engine core connections")
            self.resources.output_queue_task.add_done_callback(lambda _: watch.cancel())

    ensure.watches = True  # type: ignore[attr-defined]
    AsyncMPClient._ensure_output_queue_task = ensure


async def _watch(monitor: Any, resources: Any) -> None:
    """Mark the engine dead and fail pending requests if a core stays disconnected."""
    missing = 0
    try:
        while True:
            event: asyncio.Future[Any] = asyncio.ensure_future(recv_monitor_message(monitor))
            done, _ = await asyncio.wait([event], timeout=RECONNECT_S if missing > 0 else None)
            if not done:
                event.cancel()
                log.error("an engine core does not read requests any more: its connection is closed")
                resources.engine_dead = True
                resources.output_queue_task.cancel()  # as vLLM's monitor does for a dead process
                return
            missing += {zmq.EVENT_DISCONNECTED: 1, zmq.EVENT_ACCEPTED: -1}.get(event.result()["event"], 0)
    finally:
        monitor.close(0)


def serve() -> None:
    """Run vLLM's OpenAI-compatible server with the patches. It parses its command line."""
    from vllm.entrypoints.launchers.api_server.entry import main

    install()
    main()
