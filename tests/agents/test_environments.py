"""The environments that come with the agents: AIME, search, and questions to a database."""

import json
import sqlite3

import pytest

from skyrl_megatron.config import SearchEnvConfig, Text2SQLEnvConfig
from skyrl_megatron.envs import make
from tests.envs.episodes import env, servers

serve = pytest.fixture(servers)


@pytest.mark.parametrize(
    "said, answer, right",
    [
        ("Answer: 42", "42", True),
        ("answer : $42$.", "42", True),
        ("Answer: 41\nAnswer: 42", "42", True),
        ("Answer: 42\nAnswer: 41", "42", False),
        ("42", "42", False),
        ("Answer: 1,234", "1234", True),
        ("Answer: x = 5", "5", True),
        ("Answer: \\frac12", "\\frac{1}{2}", True),
        ("Answer: \\boxed{17}", "17", True),
        ("Answer: \\text{17 inches}", "17", True),
        ("Answer: the value is $\\sqrt3$ units", "\\sqrt{3}", True),
        ("Answer: 42" + " " * 20 + "." * 300, "42", False),  # too far from the end
        ("Answer: 42<|im_end|>Answer: 7", "42", True),
    ],
)
def test_aime(said, answer, right):
    step = make("aime", extras={"reward_model": {"ground_truth": answer}}).step(said)
    assert (step["reward"], step["metadata"]["acc"], step["done"]) == (1.0 if right else -1.0, right, True)


def test_aime_without_an_answer_is_refused():
    with pytest.raises(ValueError, match=r"the row has no reward_model.ground_truth"):
        make("aime", extras={})


# ------------------------------------------------------- search
DOCUMENTS = [{"document": {"contents": " Paris\nThe capital of France. "}}, {"document": {"contents": "Lyon"}}]


def search_env(server, answer="Paris", max_turns=3, timeout=5.0):
    config = SearchEnvConfig(search_url=f"{server.url}/retrieve", topk=2, timeout=timeout)
    return env("search", {"target": answer}, config, max_turns)


def test_search(serve):
    server = serve(lambda path, body, _: (200, {"result": [DOCUMENTS[: body["topk"]]]}))
    episode = search_env(server, ["Lutetia", "Paris"])
    found = episode.step("<think>hm</think><search> capital of France </search>")
    assert server.requests == [{"queries": ["capital of France"], "topk": 2, "return_scores": True}]
    passages = json.loads(found["observations"][0]["content"].strip()[len("<information>") : -len("</information>")])
    assert passages == {"result": "Doc 1: Paris\nThe capital of France.\nDoc 2: Lyon\n"}
    assert found["metadata"]["tool_input"] == [" capital of France "] and not found["done"]
    last = episode.step("<answer>the  PARIS!</answer>")
    assert (last["reward"], last["done"]) == (1.0, True)


def test_search_without_a_query_or_an_answer(serve):
    server = serve(lambda *_: (200, {"result": []}))
    episode = search_env(server, max_turns=3)
    assert "<information></information>" in episode.step("I do not know")["observations"][0]["content"]
    assert server.requests == []
    assert "No search results found." in episode.step("<search>x</search>")["observations"][0]["content"]
    last = episode.step("<search>x</search>")  # the last turn
    assert (last["done"], last["reward"], last["observations"]) == (True, 0.0, [])


def test_search_scores_guessing_less():
    from skyrl_megatron_agents.environments.search import score

    assert score("<answer>x</answer>" * 10 + "<answer>Paris</answer>", "Paris") == 0.25
    assert score("<answer>Lyon</answer><answer>Paris</answer>", "Paris") == 1.0
    assert score("<answer>Paris</answer><answer>Lyon</answer>", "Paris") == 0.0


def test_search_tries_again_and_tells_of_failure(serve, monkeypatch):
    from skyrl_megatron_agents.environments.search import SearchToolGroup

    monkeypatch.setattr(SearchToolGroup, "FIRST_PAUSE_S", 0.01)
    statuses = iter([503, 500, 200])
    server = serve(lambda *_: (next(statuses), {"result": [DOCUMENTS[:1]]}))
    assert "Paris" in search_env(server).step("<search>x</search>")["observations"][0]["content"]
    assert len(server.requests) == 3
    refusing = serve(lambda *_: (404, {}))
    observation = search_env(refusing).step("<search>x</search>")["observations"][0]["content"]
    assert "search at" in observation and "404" in observation
    assert len(refusing.requests) == 1  # the same question would be refused again
    down = serve(lambda *_: (200, {}))
    down.close()
    assert "failed" in search_env(down, timeout=0.5).step("<search>x</search>")["observations"][0]["content"]


@pytest.mark.parametrize("id, text", [("search", "<search>x</search> and"), ("text2sql", "<sql>SELECT 1</sql> so")])
def test_end_tags_must_be_stop_strings(id, text, serve, tmp_path):
    episode = search_env(serve(lambda *_: (200, {}))) if id == "search" else sql_env(tmp_path)
    with pytest.raises(ValueError, match=r"text follows </(search|sql)> .*: add .* to generator.sampling_params.stop"):
        episode.step(text)


# ------------------------------------------------------- SQL
def sql_env(folder, answer="SELECT name FROM city WHERE people > 1", max_turns=3, rows=3):
    database = folder / "spider/database/geo/geo.sqlite"
    if not database.exists():
        database.parent.mkdir(parents=True)
        with sqlite3.connect(database) as connection:
            connection.execute("CREATE TABLE city (name TEXT, people INTEGER)")
            connection.executemany("INSERT INTO city VALUES (?, ?)", [(f"c{i}", i) for i in range(rows)])
        connection.close()
    config = Text2SQLEnvConfig(db_path=str(folder))
    return env("text2sql", answer, config, max_turns, db_id="geo", data="spider")


def test_text2sql(tmp_path):
    episode = sql_env(tmp_path)
    look = episode.step("<think>look</think><sql>SELECT * FROM city</sql>")
    text = look["observations"][0]["content"]
    assert "name people\n  c0      0\n  c1      1\n  c2      2\n" in text and "2 turns left" in text
    done = episode.step("<think>so</think><solution>SELECT name FROM city ORDER BY people DESC LIMIT 1</solution>")
    assert (done["reward"], done["done"]) == (1.0, True)


@pytest.mark.parametrize(
    "turns, reward",
    [
        (["<think>a</think><solution>SELECT 'c2'</solution>"], 1.0),
        (["<think>a</think><solution>SELECT 'c1'</solution>"], 0.0),
        (["<think>a</think><solution>SELEC 'c2'</solution>"], 0.0),
        (["<solution>SELECT 'c2'</solution>"], -1.0),  # no thought
        (["<think>a</think><sql>SELECT 1</sql>", "<solution>SELECT 'c2'</solution>"], -1.0),  # none after seeing
        (["<think>a</think><sql>SELECT 1</sql>", "<think>b</think><solution>SELECT 'c2'</solution>"], 1.0),
        (["<think>a</think><solution><sql>SELECT 'c2'</sql></solution>"], None),
        (["<think>a</think>"] * 3, -1.0),  # no solution in the last turn
        (["<think>a</think><solution>DELETE FROM city</solution>"], 0.0),
    ],
)
def test_text2sql_rewards(tmp_path, turns, reward):
    episode = sql_env(tmp_path)
    if reward is None:
        with pytest.raises(ValueError, match="text follows </sql>"):
            episode.step(turns[0])
        return
    steps = [episode.step(turn) for turn in turns]
    assert steps[-1]["done"] and steps[-1]["reward"] == reward
    assert all(step["reward"] == 0.0 for step in steps[:-1])


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO city VALUES ('x', 1)",
        "DROP TABLE city",
        "ATTACH DATABASE '/tmp/other.sqlite' AS other",
        "PRAGMA writable_schema = 1",
        "SELECT load_extension('/tmp/x.so')",
        "CREATE TEMP TABLE t (a)",
        "SELECT 1; DELETE FROM city",
    ],
)
def test_text2sql_only_reads(tmp_path, query):
    from skyrl_megatron_agents.environments.text2sql import QueryFailed, run_query

    database = sql_env(tmp_path).database
    before = database.read_bytes()
    with pytest.raises(QueryFailed, match="SQL error"):
        run_query(database, query, 5.0)
    assert database.read_bytes() == before
    assert "SQL error" in sql_env(tmp_path).step(f"<sql>{query}</sql>")["observations"][0]["content"]


def test_text2sql_limits(tmp_path):
    """Endless, huge and long results end with a message, within the time limit."""
    from skyrl_megatron_agents.environments.text2sql import QueryFailed, as_table, run_query

    database = sql_env(tmp_path).database
    counting = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n{limit}) SELECT {what} FROM n"
    with pytest.raises(QueryFailed, match=r"longer than 0.2 s"):
        run_query(database, counting.format(limit="", what="count(*)"), 0.2)
    with pytest.raises(QueryFailed, match="more than 100000 rows"):
        run_query(database, counting.format(limit="", what="i"), 20.0)
    with pytest.raises(QueryFailed, match="too big"):
        run_query(database, "SELECT randomblob(1000000000)", 5.0)
    names, rows = run_query(database, counting.format(limit=" LIMIT 5000", what="i"), 5.0)
    table = as_table(names, rows)
    assert table.startswith("The first 50 of 5000 rows:") and len(table) <= 9000
    assert run_query(database, "PRAGMA table_info(city)", 5.0)[1][0][1] == "name"


def test_text2sql_bad_rows(tmp_path):
    sql_env(tmp_path)
    config = Text2SQLEnvConfig(db_path=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"none.sqlite does not exist: set environment.skyrl_gym.text2sql"):
        env("text2sql", "SELECT 1", config, db_id="none", data="spider")
    for db_id, data in (("geo", "elsewhere"), ("../geo", "spider"), (None, "spider")):
        with pytest.raises(ValueError, match="text2sql needs data"):
            env("text2sql", "SELECT 1", config, db_id=db_id, data=data)
