"""An endpoint on the loopback interface that speaks the Hugging Face hub's protocol, as far as reading needs it.

Repositories are dictionaries of files; each push makes a commit. Faults are switched on by the test: a file that
breaks off in the middle, a repository that asks for a token, a hub that does not answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import socket
import threading
import urllib.parse

from tests.support.serving import start

TOKEN = "hf_a_token_that_opens_gated_repositories"
_ROUTE = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<revision>[^/]+)|"
    r"/(?P<data>datasets/)?(?P<file_name>[^/]+/[^/]+)/resolve/(?P<file_revision>[^/]+)/(?P<file>.+)"
)


class Repository:
    """One repository: commits, the branches that point at them, and who may read it."""

    def __init__(self):
        self.commits, self.branches, self.gated = {}, {}, False

    def push(self, files, branch="main"):
        """Commit ``files`` (path → bytes) as all there is; returns the hash."""
        digest = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode())
        for path in sorted(files):
            digest.update(files[path])
        commit = digest.hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        return commit

    def files(self, revision):
        """(hash, files) of a branch or commit; None: there is none."""
        commit = self.branches.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None


class Hub:
    """The server: ``repositories`` by ``org/name`` (data sets: ``datasets/org/name``), and what was asked."""

    def __init__(self, url):
        self.url, self.repositories, self.requests = url, {}, []
        self.breaks, self.stalls, self.delay_s, self.ended = {}, set(), 0.0, threading.Event()
        """``breaks``: path → bytes after which its next download breaks off; ``stalls``: paths that stop half way, for
        as long as they are in it; ``delay_s``: before each answer."""

    def repository(self, name):
        return self.repositories.setdefault(name, Repository())

    def downloads(self, path):
        """The ranges in which a file was asked for, in order; None: the whole."""
        return [wanted for method, what, wanted in self.requests if method == "GET" and what.endswith(path)]


def folder_files(folder):
    """Path → bytes of the files of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def serve():
    """Run a hub for the block."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = start(server)
    try:
        yield server.hub
    finally:
        server.hub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def use(monkeypatch, home, **variables):
    """Let this process and those it starts use a hub, a cache and a token as if they had been started so."""
    from huggingface_hub import constants

    variables = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_TOKEN": ""} | variables
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", variables["HF_HUB_OFFLINE"] == "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    if "HF_ENDPOINT" in variables:
        monkeypatch.setattr(constants, "ENDPOINT", variables["HF_ENDPOINT"])


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        hub, path = self.server.hub, urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.delay_s:
            hub.ended.wait(hub.delay_s)
        route = _ROUTE.fullmatch(path)
        if route is None:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        name = route["file_name"] or route["name"]
        name = f"datasets/{name}" if route["data"] or route["kind"] == "datasets" else name
        repository, given = hub.repositories.get(name), (self.headers.get("Authorization") or "")
        if given and given != f"Bearer {TOKEN}":
            return self._send(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        if repository is None:  # the hub does not tell strangers what is private
            code = {"X-Error-Code": "RepoNotFound"} if given else {}
            return self._send(404 if given else 401, b"{}", code)
        if repository.gated and not given and route["file"]:
            return self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
        found = repository.files(route["file_revision"] or route["revision"])
        if found is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        commit, files = found
        if route["file"]:
            return self._file(route["file"], commit, files)
        entries = [(path, len(content), _blob(content)) for path, content in sorted(files.items())]
        if route["what"] == "tree":
            listed = [{"type": "file", "path": path, "size": size, "oid": oid} for path, size, oid in entries]
            return self._send(200, json.dumps(listed).encode())
        siblings = [{"rfilename": path, "size": size, "blobId": oid} for path, size, oid in entries]
        return self._send(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())

    def _file(self, path, commit, files):
        headers = {"X-Repo-Commit": commit}
        if path not in files:
            return self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        content = files[path]
        headers |= {"ETag": f'"{_blob(content)}"', "Accept-Ranges": "bytes"}
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(first[1]) if first else 0
        if first:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(206 if first else 200, content[start:], headers, path=path)

    def _send(self, status, body, headers=None, path=None):
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        hub = self.server.hub
        with contextlib.suppress(ConnectionError):
            if path in hub.breaks:
                self.wfile.write(body[: hub.breaks.pop(path)])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_WR)
                return
            half = len(body) // 2
            self.wfile.write(body[:half])
            while path in hub.stalls and not hub.ended.wait(0.05):
                self.wfile.flush()
            self.wfile.write(body[half:])

    def log_message(self, *args):
        pass


def _blob(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
