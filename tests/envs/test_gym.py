"""The environments of the installed ``skyrl_gym``: they work by their id, and ours of the same ids score like them."""

import asyncio
import random
import sqlite3

import pytest

from skyrl_megatron import envs
from skyrl_megatron.config import SearchEnvConfig, Text2SQLEnvConfig
from skyrl_megatron.errors import DataError
from tests.rollout.scripted import ScriptedEngine, batch_of, generation, generator_of, tokenizer_of


@pytest.fixture
def gym():
    import skyrl_gym

    skyrl_gym.register(id="their-gsm8k", entry_point="skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv")
    yield skyrl_gym
    skyrl_gym.envs.registration.registry.pop("their-gsm8k", None)


def test_environments_of_the_gym_work_by_their_id(gym):
    assert {"lcb", "searchcode", "their-gsm8k"} <= set(envs.registered())
    tokenizer = tokenizer_of("chatml")
    engine = ScriptedEngine([generation([*tokenizer.encode(f"#### {n}"), tokenizer.eos_token_id]) for n in (14, 15)])
    extras = [{"reward_spec": {"ground_truth": "15"}, "extra_info": {}}]
    prompts = [[{"role": "user", "content": "What is 7 + 8?"}]]
    output = asyncio.run(
        generator_of("chatml", engine).generate(batch_of(prompts, extras, env_class="their-gsm8k"), disable_tqdm=True)
    )
    assert [reward for reward in output["rewards"][0] if reward] == [0.2 / 4, 1.0], "four turns are allowed"
    assert output["rollout_metrics"]["environment/avg_steps"] == 2.0
    # A failed construction costs its trajectory, an id that nobody knows the run.
    with pytest.raises(DataError, match=r"failed \(AssertionError: reward_spec.ground_truth is required"):
        asyncio.run(
            generator_of("chatml", engine).generate(
                batch_of(prompts, [{}], env_class="their-gsm8k"), disable_tqdm=True
            )
        )
    gym.envs.registration.registry.pop("their-gsm8k")
    with pytest.raises(DataError, match="no environment 'their-gsm8k'"):
        envs.make("their-gsm8k")


def theirs(id, **arguments):
    import skyrl_gym

    return skyrl_gym.make(id, **arguments)


def played(env, actions):
    """[(reward, done, number of observations)] of an episode, and its metrics."""
    env.init([{"role": "user", "content": "?"}])
    turns = []
    for action in actions:
        step = env.step(action)
        turns.append((step["reward"], step["done"], len(step["observations"])))
        if step["done"]:
            break
    return turns, env.get_metrics()


NUMBERS = ["15", "1,500", "-3", "2.5", "15.", "$15", ".", ",", "1500", "15 apples", "015", "1/2"]
GLUE = ["#### ", "####", "### ", "the answer is ", "\n", " = ", "$", ". ", " "]


@pytest.mark.parametrize("id", ["gsm8k", "gsm8k_multi_turn"])
def test_gsm8k_scores_like_the_gym(id):
    choose = random.Random(0)
    for _ in range(3000):
        truth = choose.choice(["15", "1500", "-3", "2.5"])
        extras = {"reward_spec": {"ground_truth": truth}, "extra_info": {"max_turns": choose.randint(1, 4)}}
        actions = [
            "".join(choose.choice(GLUE) + choose.choice(NUMBERS) for _ in range(choose.randint(1, 3)))
            for _ in range(4)
        ]
        mine, other = envs.make(id, env_config={}, extras=extras), theirs(id, env_config={}, extras=extras)
        assert played(mine, actions) == played(other, actions), (truth, actions)


LATEX = [
    *("\\frac12", "\\frac{1}{2}", "\\sqrt3", "\\sqrt{3}", "\\boxed{7}", "$7$", "7^\\circ", "\\text{7}", "1,000"),
    *("10,000 dollars", "x=7", "an apple", "7 cm", "\\textbf{7}", "\\overline{AB}", "7\\%", "{,}", "(1, 2)", "\\$7"),
    *("70.$", "\\text{and}", "\\mathrm{th}", "7!", '"', "\\dots", "A", "1, 2,\\text{and} 3"),
]


def test_aime_scores_like_the_gym():
    choose = random.Random(1)
    for _ in range(3000):
        parts = [choose.choice(LATEX) for _ in range(choose.randint(1, 3))]
        truth = choose.choice([parts[0], choose.choice(LATEX), "7"])
        lead = choose.choice(["Answer: ", "answer:", "ANSWER : ", "The Answer: ", "so ", "Answer:\n"])
        action = "thinking … " * choose.randint(0, 40) + lead + choose.choice(["", " "]).join(parts)
        action += choose.choice(["", "\nAnswer: 7", "\nbye"])
        extras = {"reward_model": {"ground_truth": truth}}
        mine = envs.make("aime", env_config={}, extras=extras).step(action)
        other = theirs("aime", env_config={}, extras=extras).step(action)
        assert (mine["reward"], mine["metadata"]) == (other["reward"], other["metadata"]), (truth, action)


def test_search_scores_like_the_gym():
    """The score of the last turn; neither asks the retriever. (Text behind an answer is an error of the settings in
    ours: the tags must be stop strings.)"""
    choose = random.Random(2)
    pieces = ["Paris", "the PARIS!", "Lyon", "a  city", "", " ", "<answer>", "<think>x</think>"]
    for _ in range(3000):
        truth = {"target": choose.choice(["Paris", ["Lutetia", "paris"], ["a city"]])}
        action = "".join(choose.choice(pieces) for _ in range(3)) + choose.choice(["", "</answer>"])
        extras = {"reward_spec": {"ground_truth": truth}, "max_turns": 1}
        mine, other = (make("search", env_config=SearchEnvConfig(), extras=extras) for make in (envs.make, theirs))
        assert mine.step(action)["reward"] == other.step(action)["reward"], (truth, action)


def test_text2sql_scores_like_the_gym(tmp_path):
    folder = tmp_path / "spider/database/geo"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "geo.sqlite") as connection:
        connection.execute("CREATE TABLE city (name TEXT, people INTEGER)")
        connection.executemany("INSERT INTO city VALUES (?, ?)", [(f"c{i}", i) for i in range(3)])
    connection.close()
    queries = [
        "SELECT name FROM city WHERE people > 1",
        "SELECT 'c2'",
        "SELECT name FROM city",
        "SELECT name FROM city ORDER BY people DESC",
        "SELEC 1",
        "",
        "SELECT name FROM nowhere",
    ]
    choose = random.Random(3)
    config = Text2SQLEnvConfig(db_path=str(tmp_path))
    for _ in range(150):
        truth = choose.choice(queries[:4])
        think = [choose.choice(["<think>a</think>", "", "<think>a"]) for _ in range(3)]
        actions = [f"{t}<sql>{choose.choice(queries)}</sql>" for t in think[: choose.randint(0, 2)]]
        actions.append(f"{choose.choice(think)}<solution>{choose.choice(queries)}</solution>")
        extras = {"reward_spec": {"ground_truth": truth}, "max_turns": 3, "db_id": "geo", "data": "spider"}
        mine, other = (make("text2sql", env_config=config, extras=extras) for make in (envs.make, theirs))
        assert [t[:2] for t in played(mine, actions)[0]] == [t[:2] for t in played(other, actions)[0]], (
            truth,
            actions,
        )
