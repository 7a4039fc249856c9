"""A teacher elsewhere whose answers lack what a run needs, and the registry of such teachers."""

import pytest

from tests.support.serving import start


class Server:
    """Answers as an OpenAI-compatible engine does; only such a stand-in can leave log-probs out."""

    def __init__(self, answer):
        import json
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply({"data": [{"id": "teacher"}]})

            def do_POST(self):
                self.reply(answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

            def reply(self, body):
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        start(self.server)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize(
    "given, message",
    [
        (None, "returns no log-probs of prompts: serve it with vLLM"),
        ([None, {"7": {"logprob": -1.0}}, {"8": {"logprob": -1.0}}], "start it with --max-logprobs 2 or more"),
    ],
)
def test_a_server_without_prompt_logprobs_is_one_error(given, message):
    import asyncio

    from skyrl_megatron.errors import EngineError
    from skyrl_megatron_tools.remote.remote_teacher import RemoteTeacher

    with (
        Server(lambda body: {"choices": [{"prompt_logprobs": given}]}) as server,
        pytest.raises(EngineError, match=message),
    ):
        asyncio.run(RemoteTeacher(server.url).score([[6, 7, 8]], [1], 2))
    with pytest.raises(EngineError, match=r"trainer\.teacher\.models"):
        asyncio.run(RemoteTeacher("http://127.0.0.1:9").score([[6, 7, 8]], [1], 2))
