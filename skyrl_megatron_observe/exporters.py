"""Export metrics and phases: a Prometheus endpoint and OpenTelemetry spans."""

from __future__ import annotations

import hashlib
import hmac
import json
import queue
import re
import threading
import urllib.request
import warnings
import wsgiref.simple_server
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.metric_table import describe
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.errors import LaunchError, SkyRLMegatronWarning
from skyrl_megatron.progress import Span
from skyrl_megatron.trainer.tracking import MetricSink
from skyrl_megatron_observe.local_server import HOST, LimitedThreads, QuietHandler

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

POST_S = 10.0
WAITING = 100
"""Maximum number of steps that wait to be sent. Further steps are dropped."""


class PrometheusEndpoint(MetricSink):
    """Serves the last value of every metric at ``http://127.0.0.1:PORT/metrics``, in the text format of Prometheus.

    A metric is a gauge ``skyrl_<name>``; other characters than letters, digits and ``_`` become ``_``. Requests need
    ``Authorization: Bearer TOKEN``. Raises LaunchError if the port is in use.
    """

    def __init__(self, port: int, token: str) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._values: dict[str, float] = {}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # anything with a method collect()
        app = _guarded(make_wsgi_app(registry), token)
        try:
            self._server = wsgiref.simple_server.make_server(HOST, port, app, _Server, _Handler)
        except (OSError, OverflowError) as error:
            raise LaunchError(
                f"trainer.prometheus_port={port}: {error}; choose another port, or stop the process that listens there"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="prometheus")
        self._thread.start()
        self.port: int = self._server.server_port

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._values = {**self._values, **metrics, "step": float(step)}

    def collect(self) -> Iterator[Any]:
        """Yield a gauge for each metric."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in sorted(self._values.items()):
            row = describe(name)
            text = f"{row.meaning} ({row.unit})" if row and row.unit else row.meaning if row else name
            yield GaugeMetricFamily(f"skyrl_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}", text, value=value)

    def finish(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def prometheus(cfg: SkyRLTrainConfig, resumed: bool) -> list[PrometheusEndpoint]:
    """Return the endpoint of ``trainer.prometheus_port``, if it is set."""
    if (port := cfg.trainer.prometheus_port) is None:
        return []
    from skyrl_megatron_agents.http_endpoint import endpoint_token

    return [PrometheusEndpoint(port, endpoint_token(run_folder(cfg) / "prometheus_token", "prometheus_token"))]


class _Server(LimitedThreads, wsgiref.simple_server.WSGIServer):
    """A WSGI server with a limited number of connections, each in a thread."""


class _Handler(QuietHandler, wsgiref.simple_server.WSGIRequestHandler):
    """Handles one request."""


def _guarded(app: Callable[..., Iterable[bytes]], token: str) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that answers 401 to requests without the token."""
    expected = f"Bearer {token}".encode()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), expected):
            return app(environ, start)
        start("401 Unauthorized", [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")])
        return [b"the token is missing or wrong: it is in the file prometheus_token of the run's folder\n"]

    return answer


class SpanSender:
    """Sends the spans of each step as a trace to an OpenTelemetry collector, from its own thread.

    ``endpoint``: OTLP over HTTP, such as ``http://127.0.0.1:4318``; JSON is sent to ``/v1/traces``
    (https://opentelemetry.io/docs/specs/otlp). If it does not answer, a warning is issued and no more spans are sent.
    """

    def __init__(self, endpoint: str, run: str) -> None:
        self.address, self.run = f"{endpoint.rstrip('/')}/v1/traces", run
        self._waiting: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="spans", daemon=True)
        self._thread.start()

    def send(self, step: int, spans: Sequence[Span]) -> None:
        """Queue the spans of a step, and return at once."""
        if spans and self._thread.is_alive() and not self._waiting.full():
            self._waiting.put(json.dumps(as_trace(self.run, step, spans)).encode())

    def finish(self) -> None:
        """Send the queued steps, and wait at most :data:`POST_S`."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(POST_S)

    def _work(self) -> None:
        while (body := self._waiting.get()) is not None:
            request = urllib.request.Request(self.address, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=POST_S):
                    pass
            except (OSError, ValueError) as error:
                text = f"trainer.opentelemetry_endpoint: {self.address} refused the spans and gets no more: {error}"
                warnings.warn(text, SkyRLMegatronWarning, stacklevel=1)
                return


def as_trace(run: str, step: int, spans: Sequence[Span]) -> dict[str, Any]:
    """Return a step as OTLP JSON: a root span, and a child for each of ``spans`` with its lane as attribute."""
    trace = hashlib.sha256(f"{run}/{step}/{spans[0][2]}".encode()).hexdigest()
    begin, end = min(span[2] for span in spans), max(span[3] for span in spans)
    root = _span(trace, 0, f"step {step}", begin, end, {"step": step})
    children = [
        {**_span(trace, number, name, since, until, {"lane": lane}), "parentSpanId": root["spanId"]}
        for number, (lane, name, since, until) in enumerate(spans, 1)
    ]
    resource = {"attributes": _attributes({"service.name": "skyrl-megatron", "run": run})}
    scope = {"scope": {"name": "skyrl_megatron"}, "spans": [root, *children]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def _span(trace: str, number: int, name: str, begin: float, end: float, facts: Mapping[str, Any]) -> dict[str, Any]:
    span = hashlib.sha256(f"{trace}/{number}".encode()).hexdigest()[:16]
    times = {"startTimeUnixNano": str(int(begin * 1e9)), "endTimeUnixNano": str(int(end * 1e9))}
    return {"traceId": trace[:32], "spanId": span, "name": name, "kind": 1, **times, "attributes": _attributes(facts)}


def _attributes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    kinds = {int: "intValue", str: "stringValue"}
    return [{"key": key, "value": {kinds[type(value)]: str(value)}} for key, value in facts.items()]
