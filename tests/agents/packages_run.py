"""Environments of other packages against the packages themselves. ``packages_run.py NAME FOLDER`` runs in an
environment that has the package, and has no torch."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import time
from pathlib import Path

from skyrl_megatron import envs
from skyrl_megatron.errors import DataError

WORDS = """
import verifiers.v1 as vf

class WordData(vf.TaskData):
    word: str

class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def has_word(self, trace, task):
        return float(task.word in trace.last_reply)

    @vf.reward
    async def short(self, trace):
        return 1.0 / (1 + len(trace.last_reply.split()))

class WordsConfig(vf.TasksetConfig):
    first: str = "apple"

class Words(vf.Taskset[WordTask, WordsConfig]):
    def load(self):
        for word in (self.config.first, "pear"):
            yield WordTask(WordData(prompt=f"Say {word}.", word=word, system_prompt="Be brief."), self.config.task)

__all__ = ["Words"]
"""
GUESSING = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    message: str

class Hint(Observation):
    hint: str = ""

class Guessing(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, target=7, **more):
        self.target, self.steps = target, 0
        return Hint(hint="Guess a number.")

    def step(self, action, timeout_s=None, **more):
        self.steps += 1
        guess = int(action.message)
        if guess == self.target:
            return Hint(done=True, reward=1.0 / self.steps)
        if guess < 0:
            return Hint(hint="x" * -guess, reward=0.0)
        return Hint(hint="higher" if guess < self.target else "lower", reward=0.0)

    @property
    def state(self):
        return State(step_count=self.steps)

app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
VERIFYING = """
import sys
import uvicorn
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from omegaconf import OmegaConf
from resources_servers.equivalence_rule import app as theirs

head = BaseServerConfig(host="127.0.0.1", port=1)
client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
config = theirs.EquivalenceRuleResourcesServerConfig(
    host="127.0.0.1", port=int(sys.argv[1]), entrypoint="app.py", name="rule", grading_rule="seq_match"
)
server = theirs.EquivalenceRuleResourcesServer(config=config, server_client=client)
uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def scored(row, *answers, max_turns=1):
    """The rewards of turns in one episode."""
    env = envs.make(row["env_class"], extras={**row, "max_turns": max_turns})
    try:
        shown, _ = env.init(row["prompt"])
        turns = [env.step(answer) for answer in answers]
        return [turn["reward"] for turn in turns], shown, turns
    finally:
        env.close()


def refused(words, work):
    try:
        work()
    except (DataError, ValueError) as error:
        assert words in str(error), error
        return
    raise AssertionError(f"nothing says {words!r}")


def reasoning_gym(folder):
    import reasoning_gym as theirs

    from skyrl_megatron_agents.environments.packages.reasoning_gym import rows

    names = {"leg_counting": {}, "countdown": {"min_numbers": 3, "max_numbers": 4}, "word_sorting": {}, "maze": {}}
    for name, config in names.items():
        data = theirs.create_dataset(name, seed=5, size=6, **config)
        made = list(rows(name, 6, seed=5, **config))
        assert [row["prompt"][-1]["content"] for row in made] == [entry["question"] for entry in data]
        for row, entry in zip(json.loads(json.dumps(made)), data, strict=True):
            for answer in (entry["answer"], "17", f"{entry['answer']} or so", ""):
                want = data.score_answer(answer, entry=entry)
                assert scored(row, f"So: <answer>{answer}</answer>")[0] == [want], (name, answer)
            assert scored(row, entry["answer"])[0] == [data.score_answer(None, entry=entry)], "without the tag"
        assert scored(made[0], f"<answer>{data[0]['answer']}</answer>")[0] == [1.0]
    tasks_of_another_process(folder)
    refused("nope", lambda: next(rows("nope", 1)))
    refused("no_such", lambda: next(rows("maze", 1, no_such=1)))
    refused("index and seed", lambda: envs.make("reasoning-gym:maze", extras={}))


HASHED = ["isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"]
"""Data sets whose tasks depend on the hash seed of the process."""
MAKING = """
import json, random, sys
from skyrl_megatron_agents.environments.packages.reasoning_gym import _dataset, rows
made = []
for name in json.loads(sys.argv[1]):
    random.seed(sys.argv[2])
    data = _dataset(name, 5, 4, "{}")
    answers = [data[index]["answer"] for index in range(4)]
    random.seed(sys.argv[2])
    made += zip(rows(name, 4, seed=5), answers)
print(json.dumps(made))
"""


def tasks_of_another_process(folder):
    """The right answers of rows that another process made are right here. Without the task in the row, a question that
    is another one here is refused."""
    import os

    import reasoning_gym as theirs

    names = [*HASHED, "list_functions", "maze", "arc_agi", "sudoku"]
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", MAKING, json.dumps(names), seed], capture_output=True, text=True,
                              env={**os.environ, "PYTHONHASHSEED": seed}, check=True)  # fmt: skip
        differ = 0
        for row, answer in json.loads(done.stdout.splitlines()[-1]):
            name = row["env_class"].partition(":")[2]
            assert "entry" in row["extra_info"], name
            (reward,), *_ = scored(row, f"<answer>{answer}</answer>")
            assert reward == 1.0, (name, row["prompt"][-1]["content"], answer)
            plain = {key: value for key, value in row["extra_info"].items() if key != "entry"}
            data = theirs.create_dataset(name, seed=5, size=4)
            if name in HASHED and data[plain["index"]]["question"] != row["prompt"][-1]["content"]:
                differ += 1
                refused("another question", lambda row=row, plain=plain: scored({**row, "extra_info": plain}, "x"))
        assert differ, "no question differs: this test tests nothing"


def verifiers(folder):
    import asyncio

    (folder / "tiny_words.py").write_text(WORDS)
    sys.path.insert(0, str(folder))
    import tiny_words

    from skyrl_megatron_agents.environments.packages.verifiers import rows

    made = json.loads(json.dumps(list(rows("tiny_words", 2, first="plum"))))
    assert [each["content"] for each in made[0]["prompt"]] == ["Be brief.", "Say plum."]
    for row, word in zip(made, ("plum", "pear"), strict=True):
        for answer in ("plum", "it is a pear", "", "apple apple"):
            (reward,), *_ = scored(row, answer)
            assert math.isclose(reward, 2.0 * (word in answer) + 1 / (1 + len(answer.split())))
    task = list(tiny_words.Words(tiny_words.WordsConfig(id="tiny_words")))[1]
    env = envs.make("verifiers:tiny_words", extras={"extra_info": {"index": 1}})
    env.init([{"role": "user", "content": "Say pear."}])
    trace = env._trace("a pear")
    asyncio.run(task.score(trace))
    assert trace.reward == env.step("a pear")["reward"] and trace.num_turns == 1
    assert [message.role for message in trace.branches[0].messages] == ["user", "assistant"]
    refused("has 2 tasks", lambda: list(rows("tiny_words", 3)))
    refused("not found", lambda: next(rows("no_such_taskset", 1)))


def openenv(folder):
    with server(folder, GUESSING) as url:
        row = {"prompt": [{"role": "user", "content": "Play."}], "env_class": f"openenv:{url}"}
        row["extra_info"] = {"reset": json.dumps({"target": 9}), "action": "message"}
        rewards, shown, turns = scored(row, "3", "12", "9", max_turns=5)
        assert rewards == [0.0, 0.0, 1 / 3] and shown[-1]["content"] == "Guess a number."
        assert [turn["observations"] for turn in turns] == [
            [{"role": "user", "content": "higher"}], [{"role": "user", "content": "lower"}], []
        ]  # fmt: skip
        assert [turn["done"] for turn in turns] == [False, False, True]
        assert [turn["done"] for turn in scored(row, "3", "4", max_turns=2)[2]] == [False, True]
        first, second = (envs.make(row["env_class"], extras={**row, "max_turns": 4}) for _ in range(2))
        for env in (first, second):
            env.init(row["prompt"])
        assert first.step("1")["reward"] == 0.0 and second.step("9")["reward"] == 1.0, "episodes are separate"
        assert first.step("9")["reward"] == 0.5
        first.close()
        second.close()
        most = 1 << 24
        assert len(scored(row, str(-most + 1000), max_turns=2)[2][0]["observations"][0]["content"]) == most - 1000
        refused(
            f"openenv:{url} answered with more than 16,777,216 bytes", lambda: scored(row, str(-most), max_turns=2)
        )
    with server(folder, GUESSING.replace(", max_concurrent_envs=8", "")) as url:
        episodes_that_wait({**row, "env_class": f"openenv:{url}"})


def episodes_that_wait(row):
    """A server with its default of one episode at once, and more episodes than threads: each gets its reward. One that
    waits too long is an error that names the setting."""
    import asyncio

    from skyrl_megatron.envs.env_pool import EnvBusy, EnvPool

    async def episode(pool):
        env = envs.make(row["env_class"], extras={**row, "max_turns": 3})
        try:
            await pool.run(env.init, row["prompt"])
            return [(await pool.run(env.step, answer))["reward"] for answer in ("3", "9")]
        finally:
            await pool.run(env.close)

    async def run():
        pool = EnvPool(2, 60.0)
        rewards = await asyncio.gather(*(episode(pool) for _ in range(4)))
        assert rewards == [[0.0, 0.5]] * 4, rewards
        impatient, held = EnvPool(2, 0.5), envs.make(row["env_class"], extras={**row, "max_turns": 3})
        held.init(row["prompt"])
        try:
            await episode(impatient)
        except EnvBusy as error:
            assert "max_concurrent_envs" in str(error)
        else:
            raise AssertionError("nothing says that the server is full")
        held.close()

    asyncio.run(run())


def nemo_gym(folder):
    from difflib import SequenceMatcher

    from skyrl_megatron_agents.environments.packages.nemo_gym import rows

    said = {"responses_create_params": {"input": [{"role": "user", "content": "Say abcd"}]}, "expected_answer": "abcd"}
    (folder / "data.jsonl").write_text(json.dumps(said) + "\n")
    with server(folder, VERIFYING) as url:
        (row,) = rows(folder / "data.jsonl", url)
        assert row["prompt"][0]["content"] == "Say abcd"
        for answer in ("abcd", "abxx", "ABCD ", "zz"):
            want = SequenceMatcher(None, answer.strip().lower(), "abcd").ratio()
            assert math.isclose(scored(row, answer)[0][0], want), answer
    refused("extra_info.row", lambda: envs.make(f"nemo-gym:{url}", extras={}))


class server:
    """A server of a package in a process of its own."""

    def __init__(self, folder, source):
        (folder / "serve.py").write_text(source)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.command = [sys.executable, str(folder / "serve.py"), str(self.port)]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while time.monotonic() < until and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return f"http://127.0.0.1:{self.port}"
            except OSError:
                time.sleep(0.2)
        self.__exit__()
        raise AssertionError("the server did not start")

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def harbor(folder):
    """Its own new task, and one with all that we read, are read as its classes read them."""
    from harbor.environments.definition import parse_dockerfile_workdir
    from harbor.models.task.task import Task
    from harbor.models.task.verifier_mode import resolve_verifier_environment_definition
    from harbor.models.trial.paths import EnvironmentPaths

    init = [str(Path(sys.executable).with_name("harbor")), "tasks", "init", "--no-pytest", "-p", str(folder)]
    for mode in ("shared", "separate"):
        made = subprocess.run(
            [*init, "--verifier-mode", mode, f"demo/{mode}"], capture_output=True, text=True, timeout=120
        )
        assert made.returncode == 0, made.stderr
        (folder / mode / "instruction.md").write_text("Do it.\n")
    files = {
        "instruction.md": "<!-- canary 1 -->\n# canary 2\n\nDo it.\n\n# Then\n",
        "task.toml": "[agent]\ntimeout_sec = 7.5\n[verifier]\ntimeout_sec = 8\nenv = {A = '1'}\n[environment]\n"
        "cpus = 2\nmemory = '2G'\nstorage_mb = 512\nenv = {B = '2'}\n",
        "environment/Dockerfile": "FROM ubuntu AS one\nWORKDIR /x\nFROM debian\nWORKDIR /app\nWORKDIR deep/er\n",
        "tests/test.sh": "true\n",
    }
    for name, text in files.items():
        (folder / "full" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "full" / name).write_text(text)
    for name in ("shared", "separate", "full"):
        theirs, ours = Task(folder / name), envs.make("task", extras={"task": str(folder / name)}).task
        config, place, limits = theirs.config, theirs.config.environment, ours.spec.limits
        assert ours.text == theirs.instruction, name
        assert ours.folder == parse_dockerfile_workdir(theirs.paths.environment_dir / "Dockerfile"), name
        assert ours.agent_timeout_s == config.agent.timeout_sec, name
        assert ours.tests_timeout_s == config.verifier.timeout_sec, name
        assert (ours.environment, ours.tests_environment) == (place.env, config.verifier.env), name
        if place.memory_mb:
            assert (limits.cpus, limits.memory, limits.disk) == (
                place.cpus,
                place.memory_mb << 20,
                place.storage_mb << 20,
            )
        assert ours.rewards == str(EnvironmentPaths().verifier_dir)
        its = resolve_verifier_environment_definition(config, theirs.paths)
        assert (its is None) == (ours.place is None) == (name != "separate")
        if its is not None:
            assert its.bundled_tests is (not ours.tests) and ours.place.spec.image == str(its.directory)


if __name__ == "__main__":
    {each.__name__: each for each in (reasoning_gym, verifiers, openenv, nemo_gym, harbor)}[sys.argv[1]](
        Path(sys.argv[2])
    )
    print("PASSED")
