"""Released agents, unmodified and without a network, work on a task folder with a real engine, and are trained on.

The run has top_k, so that engines return supports: smolagents and pydantic-ai require tool calls, which is a grammar.

The policy of a tiny model calls no tools. So a grammar lets the engine say one text only; which tokens spell it is
sampled, so that hardly any answer has the tokens that its text would have.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.agents.released import RELEASES, ROOT, install, opencode, tool_call
from tests.agents.test_harbor_tasks import write
from tests.agents.wires import set_template
from tests.support.engines import tiny_settings

pytestmark = [
    pytest.mark.full_matrix,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.engines("released agents"),
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
]
CONTEXT, ANSWER = 31_000, 2_000
"""Tokens of the context, which is less than the 32,000 that many agents ask for, and of the longest answer."""
VOCABULARY = 8192
ASIDE = "<think>Short</think>A title."
"""Thinking ends with a letter or digit, here and in :func:`script`. After a full stop, ".<" could be sampled, and then
no token could be the mark. Whether it is changes with the repository's text, which the tokenizer is trained on."""
TASK = """
[agent]
timeout_sec = 200
[verifier]
env = {WANTED = 'hello'}
[environment]
memory_mb = 3000
storage = "512M"
"""
LOOK, WRITE = "ls -a; cat hello.sh", "printf '#!/bin/sh\\necho hello\\n' > hello.sh && ./hello.sh > /data/out.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokenizer knows the words of prompts, as those of agents have 80,000 characters."""
    from transformers import AutoTokenizer

    from tests.support.tiny_models import write_tiny_model, write_tokenizer

    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "num_hidden_layers": 1}
    made = write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), **sizes)
    texts = [path.read_text() for path in sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("skyrl_megatron/**/*.py")])]
    write_tokenizer(made, texts, VOCABULARY - 2)
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(made)
    set_template(made)
    return made


@pytest.fixture(scope="module")
def engine(folder, engines):
    from skyrl_megatron.inference.client import InferenceClient

    with engines.pool(tiny_settings(folder, max_model_len=CONTEXT, return_support=True)) as pool:
        yield InferenceClient(pool)


class Directed:
    """Engines that are made to say the next answer of a script where the prompt offers the script's tool, and
    :data:`ASIDE` elsewhere."""

    def __init__(self, client, tokenizer, tool: str, answers: list[str]) -> None:
        self.client, self.tokenizer, self.answers, self.tool = client, tokenizer, answers, f'"name": "{tool}"'
        self.sampled = []
        """(whether it is the task's, prompt, what was sampled)"""

    async def generate(self, prompts, sampling, sessions=None, adapters=None):
        each = [sampling] * len(prompts) if isinstance(sampling, dict) else sampling
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        of_the_task = [self.tool in text for text in texts]
        # The marks of thinking are single tokens, as in any model that thinks.
        marks = {self.tokenizer.convert_tokens_to_ids(mark): 100.0 for mark in ("<think>", "</think>")}
        asked = [
            {**keys, "structured_outputs": {"choice": [self.next_of(text, is_it)]}, "logit_bias": marks}
            for keys, text, is_it in zip(each, texts, of_the_task, strict=True)
        ]
        made = await self.client.generate(prompts, asked, sessions)
        self.sampled += zip(of_the_task, map(list, prompts), made, strict=True)
        return made

    def next_of(self, text: str, is_the_tasks: bool) -> str:
        answers = self.answers if is_the_tasks else [ASIDE]
        return answers[min(text.count("<|im_start|>assistant\n"), len(answers)) - 1]


@pytest.fixture
def run(folder, engine, engines, tmp_path, monkeypatch):
    """``run(release, answers)``: output of a batch of one task, the engine's record, the graph, and the requests."""
    from transformers import AutoTokenizer

    from skyrl_megatron.config import GeneratorConfig, SkyRLGymConfig
    from skyrl_megatron.config.schema.generator import AgentConfig, SamplingParams
    from skyrl_megatron.errors import SandboxError
    from skyrl_megatron_agents.sandbox_agent import SandboxAgentGenerator
    from skyrl_megatron_agents.sandboxes.sandbox_queue import make_provider

    monkeypatch.setenv("SKYRL_MEGATRON_HOME", str(tmp_path / "home"))
    try:
        make_provider("namespaces")
    except SandboxError as error:
        pytest.skip(str(error))

    def run(release, answers):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        client = Directed(engine, tokenizer, release.tool, answers)
        agent = AgentConfig(
            command=list(release.command),
            mounts=install(release),
            at_once=1,
            reasoning_parser=release.reasoning_parser,
        )
        sampling = SamplingParams(max_generate_length=ANSWER, temperature=1.0, top_k=20)
        cfg = GeneratorConfig(max_turns=9, max_input_length=CONTEXT - ANSWER, sampling_params=sampling, agent=agent)
        generator = SandboxAgentGenerator(cfg, SkyRLGymConfig(), client, tokenizer)
        batch = {
            "prompts": [[{"role": "user", "content": ""}]],
            "env_classes": ["task"],
            "env_extras": [{"task": str(write(tmp_path / "task", **{"task.toml": TASK}))}],
            "sampling_params": None,
            "trajectory_ids": None,
            "batch_metadata": None,
        }
        requests = []

        async def work():
            gateway = (await generator.start()).gateway
            plain = gateway.answer_to

            async def answer_to(trajectory, path, body, *, retry):
                requests.append((path, json.loads(body)))
                return await plain(trajectory, path, body, retry=retry)

            gateway.answer_to = answer_to
            try:
                output = await generator.generate(batch, True)
                (trajectory,) = gateway.trajectories.values()
                return output, trajectory.graph
            finally:
                await generator.stop()

        output, graph = engines.loop(work(), 400)
        # vLLM finds the marks by token. If several spell the end of thinking, the answer has no text, and agents ask
        # again.
        marks = {tokenizer.convert_tokens_to_ids(mark) for mark in ("<think>", "</think>")}
        assert all(marks <= set(made.token_ids) for *_, made in client.sampled)
        return output, client.sampled, graph, requests

    return run


def script(release, look=LOOK) -> list[str]:
    """Answers that look, write the file, and end; each with thinking before it."""
    first, second = (tool_call(release.tool, **{release.key: each}, **release.more) for each in (look, WRITE))
    return [f"<think>Now {n}</think>{text}" for n, text in enumerate(["I look.\n" + first, second, release.last])]


def assert_all_is_trained_once(graph, sampled) -> None:
    """By the rows of all paths."""
    from skyrl_megatron_agents.rows import rows_of

    rows = [np.asarray(row.response_ids)[np.asarray(row.loss_mask) > 0] for row in rows_of(graph)]
    assert sorted(np.concatenate(rows)) == sorted(token for *_, made in sampled for token in made.token_ids)


@pytest.mark.parametrize("name", RELEASES)
def test_it_solves_a_task_and_every_token_of_it_is_trained(run, name):
    """Reward, row and log-probs are the task's: what it asked besides is another path of the graph."""
    release = RELEASES[name]
    output, sampled, graph, requests = run(release, script(release))
    assert output["errors"] == [None] and [sum(each) for each in output["rewards"]] == [1.0]
    # By prompt: a client that waits long, as on a busy machine, asks again, and its row has the last answer.
    answers = {tuple(prompt): made for is_the_tasks, prompt, made in sampled if is_the_tasks}
    task = list(answers.values())
    asides = {tuple(prompt) for is_the_tasks, prompt, _ in sampled if not is_the_tasks}
    assert len(task) == 3 and len(asides) == release.asides, [len(prompt) for _, prompt, _ in sampled]
    metrics = output["rollout_metrics"]
    assert (metrics["agents/unmatched"], metrics["agents/refused"]) == (2 * release.rewrites, 0)
    (row,), (mask,) = output["response_ids"], output["loss_masks"]
    trained, of_the_row = np.flatnonzero(mask), task[-1:] if release.rewrites else task
    assert np.asarray(row)[trained].tolist() == [token for made in of_the_row for token in made.token_ids]
    logprobs = np.asarray([value for made in of_the_row for value in made.logprobs], np.float32)
    np.testing.assert_array_equal(np.asarray(output["rollout_logprobs"][0], np.float32)[trained], logprobs)

    assert_all_is_trained_once(graph, sampled)
    limits = [body.get("max_tokens") or body.get("max_completion_tokens") or 0 for _, body in requests]
    assert (max(limits) > CONTEXT) == release.clamped


def test_compaction_is_a_fork(run):
    """opencode believes in a small context. It has the history summed up, and continues with the summary and the last
    answer, which is text there: the one call that does not continue a path."""
    plain = RELEASES["opencode"]
    config = json.dumps(opencode({"limit": {"context": 13_000, "output": 500}}))
    command = [f"OPENCODE_CONFIG_CONTENT={config}" if "CONFIG_CONTENT" in word else word for word in plain.command]
    output, sampled, graph, _ = run(replace(plain, command=command), script(plain, "seq 3000"))
    assert output["errors"] == [None] and [sum(each) for each in output["rewards"]] == [1.0]
    assert [is_the_tasks for is_the_tasks, *_ in sampled] == [False, True, True, False, True]
    assert [call.text_only for call in graph.calls] == [False, False, False, False, True]
    (row,), (mask,) = output["response_ids"], output["loss_masks"]
    of_the_row = [token for *_, made in sampled[1:3] for token in made.token_ids]
    assert np.asarray(row)[np.asarray(mask) > 0].tolist() == of_the_row
    assert_all_is_trained_once(graph, sampled)
