"""Serve a dashboard of runs on the loopback interface: ``skyrl-megatron dashboard RUN [RUN …]``

RUN is the folder of a run (log_path/project_name/run_name). The command serves a page on the loopback interface and
prints its address, which contains a token. --export writes the page as one self-contained file. Several runs share
the same charts, and the page lists the differences between their configurations. To open the page from another
machine, use --port 8265 and ``ssh -L 8265:127.0.0.1:8265 HOST``.
"""

from __future__ import annotations

import argparse
import hmac
import http.server
import secrets
import sys
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl_megatron.command import run_command
from skyrl_megatron.errors import LaunchError
from skyrl_megatron_observe.local_server import HOST, LimitedThreads, QuietHandler
from skyrl_megatron_observe.run_report import RunReader, data_block, page

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class DashboardServer(LimitedThreads, http.server.HTTPServer):
    """Serves the page of ``runs`` on ``port`` (0: any free port). Raises LaunchError if the port is in use."""

    def __init__(self, runs: Sequence[RunReader], port: int = 0, token: str | None = None) -> None:
        self.runs, self.token = list(runs), token or secrets.token_urlsafe(16)
        self.reading = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise LaunchError(f"--port={port}: {error}; choose another port, or 0 for any free port") from error

    @property
    def url(self) -> str:
        """Return the address to open, with the token."""
        return f"http://{HOST}:{self.server_address[1]}/?token={self.token}"

    def refreshed(self, answer: Callable[[], bytes]) -> bytes:
        """Read new lines of the runs, and return ``answer()``."""
        with self.reading:
            for run in self.runs:
                run.refresh()
            return answer()


class _Handler(QuietHandler):
    server: DashboardServer

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or query.get("token", "")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._send(401, b"the token is missing or wrong: open the address that the command printed", "text/plain")
            return
        try:
            self._answer(url.path, query)
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
            pairs = [pair.split(":") for pair in query.get("known", "").split(",") if pair]
            positions = [(int(life), int(lines)) for life, lines in pairs]
            block = server.refreshed(lambda: data_block(server.runs, live=True, known=positions))
            self._send(200, block, "application/octet-stream")
        elif path == "/samples":
            text = server.runs[int(query["run"])].sample_text(int(query["step"]))
            self._send(200, text.encode(), "application/json")
        elif path == "/trajectories":
            text = server.runs[int(query["run"])].trajectory_text(int(query["step"]))
            self._send(200, text.encode(), "application/json")
        else:
            self._send(404, b"not found", "text/plain")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        headers |= {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}
        headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: any free port)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one file instead of serving")
    args = parser.parse_args(argv)

    def work() -> int:
        runs = [RunReader(folder) for folder in args.run]
        for run in runs:
            run.refresh()
        return _export(runs, args.export) if args.export else _serve(runs, args.port)

    return run_command(work)


def _export(runs: Sequence[RunReader], path: Path) -> int:
    from skyrl_megatron_observe.run_report import write_page

    try:
        size = write_page(runs, path)
    except OSError as error:
        raise LaunchError(f"--export={path}: cannot be written ({error}); choose another file") from error
    print(f"{path}: {size / 1e6:.1f} MB, {sum(run.columns.rows for run in runs)} lines of metrics")
    return 0


def _serve(runs: Sequence[RunReader], port: int) -> int:
    with DashboardServer(runs, port) as server:
        print(f"dashboard: {server.url}\nCtrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
