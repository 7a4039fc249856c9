"""What a warm-up teaches: known answers, in a run of several turns also those that follow a wrong answer."""

import random

ROW = {
    "prompt": [{"role": "user", "content": "27+35="}],
    "env_class": None,
    "env_extras": {"reward_spec": {"method": "rule", "ground_truth": "62"}},
}


def test_one_turn():
    from skyrl_megatron_tools.embedded.warmup import known_answer

    taught = known_answer(ROW, "addition", 1, random.Random(0))
    assert taught == [*ROW["prompt"], {"role": "assistant", "content": "62"}]


def test_two_turns():
    """About half of the answers come after a wrong number, each with the environment's own hint to it."""
    from skyrl_megatron_tools.embedded.warmup import known_answer

    rng, seconds = random.Random(0), []
    for _ in range(400):
        prompt, *answers = known_answer(ROW, "addition", 2, rng)
        assert prompt == ROW["prompt"][0] and answers[-1] == {"role": "assistant", "content": "62"}
        if len(answers) > 1:
            wrong, hint, _ = answers
            assert wrong["role"] == "assistant" and 50 <= int(wrong["content"]) <= 74 and wrong["content"] != "62"
            assert hint == {"role": "user", "content": "higher" if int(wrong["content"]) < 62 else "lower"}
            seconds.append(int(wrong["content"]))
    assert 160 < len(seconds) < 240 and min(seconds) < 62 < max(seconds)
