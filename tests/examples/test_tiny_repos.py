"""The agent on tiny repositories: the lines that it puts in solve them, and a run trains on its calls."""

import json
import random
import runpy
import subprocess
import sys

import pytest

from tests.examples.commands import EXAMPLES, environment

FOLDER = EXAMPLES / "tiny_repos"


@pytest.fixture(scope="module")
def scripts():
    return {name: runpy.run_path(str(FOLDER / f"{name}.py"), run_name=name) for name in ("agent", "make", "train")}


def test_the_right_line_repairs_each_repository(scripts):
    """And only what the task names is changed."""
    agent, make = scripts["agent"], scripts["make"]
    for each in make["repositories"](0, 100):
        name, module, call, wanted = agent["TASK"].search(each.text).groups()
        source, solution = each.files[f"{module}.py"], each.solution[f"{module}.py"]
        line = solution.partition(f"def {name}(")[2].splitlines()[1].strip()
        made = agent["repaired"](source, name, line)
        names = {}
        exec(made, names)
        printed = [json.dumps(names[name](*case)) for case in each.cases]
        assert "".join(f"{line}\n" for line in printed) == each.expected
        assert repr(eval(call, names)) == wanted
        assert made == solution or name.startswith("turned"), "a missing function is added at the end"
        seen = agent["shown"](source, name)
        assert (seen in source and line not in seen and name in seen) if seen else name.startswith("turned")


def test_the_model_is_taught_the_form_of_answers_and_few_right_ones(scripts):
    make, train = scripts["make"], scripts["train"]
    held_out = {each.name for each in make["repositories"](0, 40)}
    taught = make["repositories"](0, 100)[40:]
    assert not held_out & {each.name for each in taught}
    made = train["talks"](taught, make, random.Random(0))
    talks = [next(made) for _ in range(2000)]
    assert {message["role"] for talk in talks for message in talk} == {"user", "assistant"}
    assert 1.5 < sum(map(len, talks)) / len(talks) / 2 < 2, "most first answers are wrong, and followed by a second"


@pytest.mark.full_matrix
@pytest.mark.vllm
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_the_agent_is_trained(tmp_path):
    (tmp_path / "launch").symlink_to(EXAMPLES.parent)
    words = ["trainer.max_training_steps=1", "trainer.eval_interval=1", "generator.eval_n_samples_per_prompt=1"]
    done = subprocess.run(
        [sys.executable, "launch/examples/tiny_repos/train.py", *words],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (file,) = tmp_path.rglob("metrics.jsonl")
    before, step = [json.loads(line) for line in file.read_text().splitlines()]
    assert 0 < before["eval/all/avg_score"] < 0.8 and step["policy/grad_norm"] > 0
    assert step["agents/token_in_rate"] == 1.0 and step["generate/avg_turns"] > 1
    assert step["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4
