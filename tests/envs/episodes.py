"""Episodes of an environment, and the servers that some environments ask."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from skyrl_megatron.envs import make
from tests.support.serving import start


def env(id, answer, config=None, max_turns=1, **extras):
    row = {"reward_spec": {"method": "rule", "ground_truth": answer}, "max_turns": max_turns, **extras}
    return make(id, env_config=config, extras=row)


class Server:
    """A real HTTP server on loopback that answers POSTs with ``answer(path, body, headers) → (status, JSON)``."""

    def __init__(self, answer):
        self.requests = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                status, found = answer(self.path, body, self.headers)
                sent = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        start(self.server)

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def servers():
    """A fixture: starts servers, which end with the test."""
    started = []

    def answering(answer):
        started.append(Server(answer))
        return started[-1]

    yield answering
    for server in started:
        server.close()
