"""The environments of the core: gsm8k in its forms."""

import pytest

from skyrl_megatron.config import GSM8kLLMJudgeEnvConfig, SkyRLGymConfig
from skyrl_megatron.envs import make
from skyrl_megatron.envs.base_text_env import config_of
from tests.envs.episodes import env, servers

serve = pytest.fixture(servers)


@pytest.mark.parametrize(
    "text, reward, parsed",
    [
        ("so it is\n#### 1,234", 1.0, "1234"),
        ("#### 1234", 1.0, "1234"),
        ("#### -1234", 0.0, "-1234"),
        ("####1234", 0.0, None),
        ("1234", 0.0, None),
        ("#### 12 then #### 1234", 0.0, "12"),
        ("#### 1234.", 0.0, "1234."),
    ],
)
def test_gsm8k(text, reward, parsed):
    step = env("gsm8k", "1234").step(text)
    assert (step["reward"], step["metadata"]["parsed_answer"], step["done"]) == (reward, parsed, True)


def test_gsm8k_flexible_extraction():
    from skyrl_megatron.envs.gsm8k import extract_answer

    assert extract_answer("1,000 and 2,500 . , ok", strict=False) == "2500"
    assert extract_answer("nothing", strict=False) is None


def test_gsm8k_multi_turn():
    episode = env("gsm8k_multi_turn", "7", max_turns=3)
    first, second = episode.step("hm"), episode.step("#### 6")
    assert (first["reward"], first["done"]) == (0.0, False)
    assert (second["reward"], second["done"]) == (pytest.approx(0.2 / 3), False)
    assert "last turn" not in first["observations"][0]["content"]
    assert "last turn" in second["observations"][0]["content"]
    last = episode.step("#### 7")
    assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    assert episode.get_metrics() == {"steps": 3}
    assert episode.aggregate_metrics([{"steps": 3}, {"steps": 2}]) == {"avg_steps": 2.5}
    assert env("gsm8k_multi_turn", "7", max_turns=3).step("#### 7")["done"]
    assert env("gsm8k_multi_turn", "7", max_turns=None, extra_info={"max_turns": 2}).max_turns == 2


@pytest.mark.parametrize("id", ["gsm8k", "gsm8k_multi_turn"])
def test_a_row_without_an_answer_is_refused(id):
    with pytest.raises(ValueError, match=r"the row has no reward_spec.ground_truth"):
        make(id, extras={})


@pytest.mark.parametrize(
    "reply, score",
    [("It matches.\n### Final Score: 1", 1.0), ("### Final Score: 0", 0.0), ("1", 1.0), ("### Final Score: 1.0", 1.0)],
)
def test_judge(serve, monkeypatch, reply, score):
    def answer(path, body, headers):
        assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
        return 200, {"choices": [{"message": {"role": "assistant", "content": reply}}]}

    server = serve(answer)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    config = GSM8kLLMJudgeEnvConfig(model="judge-1", base_url=f"{server.url}/v1")
    step = env("gsm8k_llm_judge", "7 + 8 = 15\n#### 15", config).step("I say #### 15")
    assert (step["reward"], step["done"]) == (score, True)
    (request,) = server.requests
    assert request["model"] == "judge-1"
    assert "#### 15" in request["messages"][0]["content"] and "I say" in request["messages"][0]["content"]
    assert config_of("gsm8k_llm_judge", SkyRLGymConfig()) == SkyRLGymConfig().llm_as_a_judge


@pytest.mark.parametrize(
    "status, body, message",
    [
        (500, {"error": "overloaded"}, "500"),
        (200, {"choices": []}, "index out of range"),
        (200, b"no json", "Expecting value"),
        (200, {"choices": [{"message": {"content": "fine, I think"}}]}, "returned no score: 'fine, I think'"),
    ],
)
def test_a_judge_that_does_not_judge_is_named(serve, status, body, message):
    server = serve(lambda *_: (status, body))
    config = GSM8kLLMJudgeEnvConfig(model="judge-1", base_url=server.url)
    with pytest.raises(RuntimeError, match=f"the judge at {server.url}.*{message}"):
        env("gsm8k_llm_judge", "15", config).step("15")
