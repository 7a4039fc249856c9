"""The dashboard of runs over HTTP: on the loopback interface, for those who know the token."""

from __future__ import annotations

import hmac
import http.server
import secrets
import threading
import urllib.parse
from collections.abc import Callable, Sequence

from skyrl_megatron.errors import LaunchError
from skyrl_megatron.trainer.dashboard.page import data_block, page
from skyrl_megatron.trainer.dashboard.reading import RunReader
from skyrl_megatron.trainer.threaded_http import LimitedThreads, QuietHandler

HOST = "127.0.0.1"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class DashboardServer(LimitedThreads, http.server.HTTPServer):
    """Answers for ``runs`` on ``port`` (0: any that is free). Raises LaunchError when the port is taken."""

    def __init__(self, runs: Sequence[RunReader], port: int = 0, token: str | None = None) -> None:
        self.runs, self.token = list(runs), token or secrets.token_urlsafe(16)
        self.reading = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise LaunchError(f"--port={port}: {error}; choose another, or 0 for any that is free") from error

    @property
    def url(self) -> str:
        """Return the address to open, token included."""
        return f"http://{HOST}:{self.server_address[1]}/?token={self.token}"

    def refreshed(self, answer: Callable[[], bytes]) -> bytes:
        """Read what the runs wrote since, and return what ``answer`` makes of it."""
        with self.reading:
            for run in self.runs:
                run.refresh()
            return answer()


class _Handler(QuietHandler):
    server: DashboardServer

    def do_GET(self) -> None:
        asked = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(asked.query))
        given = self.headers.get("Authorization", "").removeprefix("Bearer ") or query.get("token", "")
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._send(401, b"the token is missing or wrong: open the address that the command printed", "text/plain")
            return
        try:
            self._answer(asked.path, query)
        except LaunchError as error:
            self._send(404, str(error).encode(), "text/plain")
        except (ValueError, KeyError, IndexError) as error:
            self._send(400, f"{self.path}: {error}".encode(), "text/plain")

    def _answer(self, path: str, query: dict[str, str]) -> None:
        server = self.server
        if path == "/":
            self._send(
                200, server.refreshed(lambda: page(server.runs, live=True).encode()), "text/html; charset=utf-8"
            )
        elif path == "/data":
            lives = [each.split(":") for each in query.get("known", "").split(",") if each]
            known = [(int(life), int(lines)) for life, lines in lives]
            block = server.refreshed(lambda: data_block(server.runs, live=True, known=known))
            self._send(200, block, "application/octet-stream")
        elif path == "/samples":
            text = server.runs[int(query["run"])].sample_text(int(query["step"]))
            self._send(200, text.encode(), "application/json")
        else:
            self._send(404, b"nothing here", "text/plain")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        headers |= {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}
        headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
