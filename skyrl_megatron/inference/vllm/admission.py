"""The checks between a request and vLLM's engine core: only what the core can decode is sent, and a core whose input
thread has ended is dead.

The core's input thread decodes requests strictly, and ends at the first that it cannot decode
(``vllm/v1/engine/core.py``, ``process_input_sockets``). The process runs on and answers nothing any more. Imported by
every process that makes requests of a core: the run's engines (``compat.py``) and servers (``api_server.py``).
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
"""How long a core may be without its connection: over a network one may break and be made again."""
_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if not name.startswith("_") and name not in RESERVED)
_own = threading.local()


def install() -> None:
    """Put all of it into this process's vLLM, before an engine is made."""
    check_requests()
    offer_structured_outputs()
    notice_lost_cores()


# ------------------------------------------------------------------ requests
def check_requests() -> None:
    """Let vLLM refuse every request that its core could not decode, with the field, before anything knows of it."""
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
            # of what vLLM does with the request's own values; the engine is as it was
            raise VLLMValidationError(f"the request cannot be served: {type(error).__name__}: {error}") from error
        require_decodable(request)
        return request

    process_inputs.checks = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def require_types(params: SamplingParams) -> None:
    """Give every parameter its declared type. Raises VLLMValidationError naming one that has another."""
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
    """Decode a request as the core will. Raises VLLMValidationError where that fails."""
    if not hasattr(_own, "decoder"):  # neither is safe to share between threads
        _own.encoder, _own.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    try:
        _own.decoder.decode(_own.encoder.encode(request))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        field = _wrong_field(request, str(error))
        raise VLLMValidationError(f"{field} cannot be sent to the engine: {error}", parameter=field) from error


def _wrong_field(request: EngineCoreRequest, problem: str) -> str:
    """Return the field that decoding complains of, by its number, or the first that cannot be encoded."""
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
    """Let requests ask for structured outputs without lm-format-enforcer. Before vLLM checks a grammar for whatever
    backend it imports that one, too, which ends in an ImportError where the package is missing."""
    name = "vllm.v1.structured_output.backend_lm_format_enforcer"
    if name in sys.modules or importlib.util.find_spec("lmformatenforcer") is not None:
        return

    def refuse(params: SamplingParams) -> None:
        raise VLLMValidationError(
            "structured outputs: the package lm-format-enforcer is not installed: set "
            "generator.inference_engine.engine_init_kwargs.structured_outputs_config.backend=xgrammar",
            parameter="structured_outputs",
        )

    module: Any = types.ModuleType(name)
    module.validate_structured_output_request_lm_format_enforcer = refuse
    sys.modules[name] = module


# ------------------------------------------------------------------ cores
def notice_lost_cores() -> None:
    """Let an engine be dead as soon as the input thread of a core has ended, which closes the core's connection:
    however long its steps take, a core that lives keeps it."""
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
    """End what waits for answers when a core stays without its connection."""
    missing = 0
    try:
        while True:
            event: asyncio.Future[Any] = asyncio.ensure_future(recv_monitor_message(monitor))
            done, _ = await asyncio.wait([event], timeout=RECONNECT_S if missing > 0 else None)
            if not done:
                event.cancel()
                log.error("an engine core reads no requests any more: its connection is closed")
                resources.engine_dead = True
                resources.output_queue_task.cancel()  # as when vLLM's own monitor finds a dead process
                return
            missing += {zmq.EVENT_DISCONNECTED: 1, zmq.EVENT_ACCEPTED: -1}.get(event.result()["event"], 0)
    finally:
        monitor.close(0)


def serve() -> None:
    """Run vLLM's OpenAI-compatible server, with the arguments of its command line, so that both hold."""
    from vllm.entrypoints.launchers.api_server.entry import main

    install()
    main()
