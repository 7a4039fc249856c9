"""Train on what a language model says of the answers: an LLM as judge, behind an OpenAI-compatible endpoint.

    python launch/examples/llm_judge.py [--judge FOLDER] [key=value …]

takes the keys of ``skyrl_megatron.entrypoints.main_base``. With ``--judge`` a second engine serves that model here, on
the loopback interface and with a token, for as long as the run; without, the endpoint is that of ``OPENAI_BASE_URL``
and ``OPENAI_API_KEY``. A judge that does not answer, or not with 0 or 1, fails the trajectory: no reward is made up.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import httpx

from skyrl_megatron.envs import BaseTextEnv, BaseTextEnvStepOutput, register

QUESTION = "Key: {key}\nAnswer: {answer}\nIs the answer right? Say 1 or 0."


class Judged(BaseTextEnv):
    """The judge's verdict, 0 or 1, on what stands behind ``####``; 0 without asking where nothing does."""

    replayable = False  # a judge that is asked again may say otherwise

    @cached_property
    def client(self) -> httpx.Client:
        """Connection to the endpoint, of this episode."""
        address = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1/")
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
        return httpx.Client(base_url=address, headers=headers, timeout=60)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Ask the judge. Raises ValueError for a verdict that is none, httpx's errors when it does not answer."""
        _, marker, answer = action.rpartition("####")
        verdict = self.ask(QUESTION.format(key=self.ground_truth, answer=answer.strip())) if marker else "0"
        if verdict not in ("0", "1"):
            raise ValueError(f"the judge said {verdict!r}, not 0 or 1")
        self.agrees = float(verdict == str(int(answer.strip() == str(self.ground_truth))))
        return {"observations": [], "reward": float(verdict), "done": True, "metadata": {"judge": verdict}}

    def ask(self, question: str) -> str:
        """Return the answer of the judge at temperature 0."""
        messages = [{"role": "user", "content": question}]
        body = {"model": os.environ.get("JUDGE", "judge"), "messages": messages, "temperature": 0, "max_tokens": 4}
        answer = self.client.post("chat/completions", json=body).raise_for_status().json()
        return str(answer["choices"][0]["message"]["content"]).strip()

    def close(self) -> None:
        """Close the connection, where one was made."""
        if "client" in self.__dict__:
            self.client.close()

    def get_metrics(self) -> dict[str, float]:
        """Return ``judge_agrees`` with the known answer: what a judge is worth is measured before it is trusted."""
        return {"judge_agrees": self.agrees} if hasattr(self, "agrees") else {}


register("judged", Judged)


@contextmanager
def served(folder: str) -> Iterator[None]:
    """Serve a model to this process for the time of ``with``: an engine, and the package's own HTTP endpoint."""
    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron.inference.vllm.settings import EngineSettings
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
    from skyrl_megatron.trainer.event_loop import LoopThread
    from skyrl_megatron_agents.http_endpoint import HttpServer, build_app, endpoint_token

    settings = EngineSettings(model=folder, served_model_name="judge", max_model_len=512, kv_cache_bytes=64 << 20)
    pool = EnginePool([lambda: VLLMEngine(settings)])
    with LoopThread() as loop, tempfile.TemporaryDirectory() as private:
        token = endpoint_token(Path(private) / "token")
        server = HttpServer(build_app(InferenceClient(pool), "judge", token), "127.0.0.1", 0)
        try:
            loop.run(pool.start(), "judge", timeout_s=600)
            loop.run(server.start(), "judge", timeout_s=60)
            os.environ |= {"OPENAI_BASE_URL": f"{server.url}/v1/", "OPENAI_API_KEY": token, "JUDGE": "judge"}
            print(f"judge: {folder} at {server.url}", flush=True)
            yield
        finally:
            loop.run(server.stop(), "judge", timeout_s=60)
            loop.run(pool.shutdown(), "judge", timeout_s=60)


def main(arguments: list[str]) -> int:
    """Serve the judge that is asked for, and train; returns the exit code."""
    from skyrl_megatron.entrypoints.main_base import main as train

    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1].strip(), allow_abbrev=False)
    parser.add_argument("--judge", metavar="FOLDER", help="model to serve as judge")
    given, keys = parser.parse_known_args(arguments)
    checks = any(key.startswith("--check") for key in keys)
    with served(given.judge) if given.judge and not checks else nullcontext():
        return train(["environment.env_class=judged", *keys])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
