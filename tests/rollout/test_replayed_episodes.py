"""An interrupted episode goes on where its recorded turns left it, in real environments, or begins anew."""

import asyncio
import sqlite3

import numpy as np
import pytest

from skyrl_megatron.envs import BaseTextEnv, register
from tests.rollout.scripted import ScriptedEngine, generation, generator_of, tokenizer_of

PROMPT = [{"role": "user", "content": "What is 3 + 4?"}]


def words(text, end="<|im_end|>", **more):
    """A generation that says a text and ends its turn."""
    tokenizer = tokenizer_of("chatml")
    ids = tokenizer.encode(text, add_special_tokens=False)
    return generation([*ids, tokenizer.convert_tokens_to_ids(end)], **more)


def through_the_codec(turns):
    from skyrl_megatron.sources.records import CODEC

    return [CODEC.decode(b"".join(bytes(part) for part in CODEC.encode(turn))) for turn in turns]


def episode_of(env_class, extras, *, gym=None, options=None, **config):
    from skyrl_megatron.rollout.episode import Episode
    from skyrl_megatron.rollout.interface import TrajectoryID

    generator = generator_of("chatml", ScriptedEngine([]), gym=gym, **config)
    rollout = generator._rollout_config(options, 64, 4096)
    return Episode(rollout, PROMPT, env_class, extras, TrajectoryID("0", 0), recording=True)


async def play(episode, generations, recorded=()):
    """Begin, take the generations that are left behind the recorded turns, and end; returns (prompts, trajectory)."""
    await episode.begin(recorded)
    prompts = []
    for each in generations[episode.turns :]:
        prompt = episode.request()
        if prompt is None:
            break
        prompts.append(list(prompt))
        await episode.answer(each)
    return prompts, await episode.end()


def rows_of(trajectory):
    return [
        {name: getattr(row, name) for name in row.__dataclass_fields__} | {"turns": trajectory.turns}
        for row in trajectory.rows
    ]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if isinstance(a[name], np.ndarray):
                assert a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]), name
            else:
                assert a[name] == b[name], name


def database(folder):
    path = folder / "spider/database/shop/shop.sqlite"
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE item (name TEXT, price INTEGER)")
        connection.executemany("INSERT INTO item VALUES (?, ?)", [("pen", 2), ("ink", 7)])


TRUTH = {"method": "rule", "ground_truth": "7"}
EPISODES = {
    "gsm8k_multi_turn": ({"reward_spec": TRUTH}, ["hm", "#### 6", "#### 8", "#### 7"]),
    "multiply": ({"reward_spec": TRUTH}, ["hm", "\\boxed{8}", "\\boxed{7}"]),
    "text2sql": (
        {"reward_spec": {"ground_truth": "SELECT name FROM item"}, "data": "spider", "db_id": "shop"},
        [
            "<think>look</think><sql>SELECT * FROM item</sql>",
            "<think>again</think><sql>SELECT nothing</sql>",
            "<think>so</think><solution>SELECT name FROM item</solution>",
        ],
    ),
}
FORMS = {
    "chat": {},
    "one message": {"use_conversation_multi_turn": False},
    "step-wise": {"step_wise_trajectories": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("env_class", EPISODES)
def test_an_episode_goes_on_behind_any_turn(env_class, form, tmp_path):
    extras, said = EPISODES[env_class]
    database(tmp_path)
    gym = {"max_env_workers": 2, "env_timeout": 20, "text2sql": {"db_path": str(tmp_path)}}
    generations = [words(text, versions=[(str(i), 0, 2)]) for i, text in enumerate(said)]

    async def body():
        whole = episode_of(env_class, extras, gym=gym, **FORMS[form])
        prompts, expected = await play(whole, generations)
        assert expected.turns == len(said) and expected.rows[-1].reward[-1] == 1.0
        for turns in range(1, len(said) + 1):
            resumed = episode_of(env_class, extras, gym=gym, **FORMS[form])
            recorded = through_the_codec(whole.recorded[:turns])
            later, trajectory = await play(resumed, generations, recorded)
            assert resumed.restarted is None and later == prompts[turns:]
            assert_same(rows_of(trajectory), rows_of(expected))
            assert len(resumed.recorded) == len(said)

    asyncio.run(body())


def test_a_long_prompt_is_recorded_once():
    async def body():
        episode = episode_of("gsm8k_multi_turn", {"reward_spec": TRUTH})
        await play(episode, [words("hm"), words("#### 6"), words("#### 7")])
        first, second, third = episode.recorded
        assert first.shared == 0 and len(first.prompt_rest) > 10
        assert second.shared == len(first.prompt_rest) + len(first.generation.token_ids)
        assert third.shared == second.shared + len(second.prompt_rest) + len(second.generation.token_ids)

    asyncio.run(body())


class CountingEnv(BaseTextEnv):
    """Says how many steps all its instances have taken: no two answers are the same."""

    steps = 0
    closed = 0

    def step(self, action):
        type(self).steps += 1
        return {
            "observations": [{"role": "user", "content": str(type(self).steps)}],
            "reward": 0.0,
            "done": False,
            "metadata": {},
        }

    def close(self):
        type(self).closed += 1


class OrderingEnv(CountingEnv):
    """Has effects outside, and says so."""

    replayable = False


register("counting", CountingEnv)
register("ordering", OrderingEnv)


@pytest.mark.parametrize(
    "env_class, kind, stepped, why",
    [
        ("counting", CountingEnv, 1, "environment 'counting' returns another result for turn 0 than recorded"),
        ("ordering", OrderingEnv, 0, "environment 'ordering' sets replayable=False"),
    ],
)
def test_what_cannot_be_repeated_begins_anew(env_class, kind, stepped, why):
    generations = [words("a"), words("b"), words("c"), words("d")]

    async def body():
        whole = episode_of(env_class, {})
        await play(whole, generations[:2])
        steps, closed = kind.steps, kind.closed
        resumed = episode_of(env_class, {})
        prompts, trajectory = await play(resumed, generations, through_the_codec(whole.recorded))
        assert resumed.restarted == why
        assert kind.steps == steps + stepped + 4 and kind.closed == closed + 2  # the one that was tried, and its own
        assert trajectory.turns == 4 and len(prompts) == 4

    asyncio.run(body())


def test_another_prompt_begins_anew():
    async def body():
        whole = episode_of("gsm8k_multi_turn", {"reward_spec": TRUTH})
        await play(whole, [words("hm"), words("#### 6")])
        resumed = episode_of("gsm8k_multi_turn", {"reward_spec": TRUTH})
        resumed.prompt = [{"role": "user", "content": "Something else?"}]
        await resumed.begin(whole.recorded)
        assert resumed.restarted == "turn 0 of environment 'gsm8k_multi_turn' has another prompt than recorded"
        assert (resumed.turns, resumed.recorded, resumed.error) == (0, [], None)
        await resumed.end()

    asyncio.run(body())


def test_fewer_turns_than_before_begin_anew():
    async def body():
        whole = episode_of("gsm8k_multi_turn", {"reward_spec": TRUTH})
        await play(whole, [words("hm"), words("#### 6"), words("#### 5")])
        resumed = episode_of("gsm8k_multi_turn", {"reward_spec": TRUTH}, max_turns=2)
        await resumed.begin(whole.recorded)
        assert resumed.restarted and resumed.turns == 0
        await resumed.end()

    asyncio.run(body())
