"""What becomes of trajectories when environments are slow, fail, hang or break their contract."""

import asyncio
import random
import threading
import time
import warnings

import numpy as np
import pytest

from skyrl_megatron.envs import BaseTextEnv, register
from skyrl_megatron.errors import ConfigError, DataError, SkyRLMegatronWarning
from tests.rollout.scripted import Log, ScriptedEngine, batch_of, generation, generator_of, run, say, tokenizer_of

QUESTION = [{"role": "user", "content": "What is 7 + 8?"}]


def answers(tokenizer, text="#### 15", finish="stop", turns=4):
    return [generation([*tokenizer.encode(text), tokenizer.eos_token_id], finish)] * turns


def generate(generator, batch):
    return asyncio.run(generator.generate(batch, disable_tqdm=True))


class Unreliable(BaseTextEnv):
    """Fails, hangs or answers late, as its seed says. What it did is in ``fate``."""

    release = threading.Event()
    made: dict[int, str] = {}  # noqa: RUF012
    closed: list[int] = []  # noqa: RUF012

    def __init__(self, env_config=None, extras=None):
        super().__init__(env_config, extras)
        self.number = extras["number"]
        self.random = random.Random(self.number)
        kinds = ["good"] * 15 + ["late", "late", "raises", "raises in init", "raises in close"]
        self.fate = "hangs" if self.number % 200 == 0 else kinds[self.number % 20]
        self.length = self.random.randint(1, 4)
        self.made[self.number] = self.fate

    def init(self, prompt):
        if self.fate == "raises in init":
            raise OSError("no sandbox left")
        return prompt, {}

    def step(self, action):
        self.turns += 1
        time.sleep(self.random.random() * (0.02 if self.fate == "late" else 0.002))
        if self.fate == "hangs":
            self.release.wait(60)
        if self.turns == self.length and self.fate == "raises":
            raise ValueError(f"environment {self.number} is broken")
        return say("wrong, try again.", reward=self.number, done=self.turns == self.length)

    def close(self):
        self.closed.append(self.number)
        if self.fate == "raises in close":
            raise RuntimeError("close failed")


register("unreliable", Unreliable)


class Broken(BaseTextEnv):
    """As a user writes it: with a mistake below its own functions."""

    def step(self, action):
        return self.graded(action) / 0

    def graded(self, action):
        return len(action)


register("broken", Broken)


def test_an_environment_that_raises_is_named_with_its_line(caplog):
    """The message has the file and line of the environment's own code, the log its traceback, once."""
    tokenizer = tokenizer_of("chatml")
    generator = generator_of("chatml", ScriptedEngine(answers(tokenizer)))
    line = Broken.step.__code__.co_firstlineno + 1
    with pytest.raises(DataError) as raised:
        generate(generator, batch_of([QUESTION] * 4, [{}] * 4, env_class="broken"))
    where = f"ZeroDivisionError: division by zero, at {__file__}:{line} in step"
    assert f"4 of 4 trajectories: environment 'broken' failed ({where})" in str(raised.value)
    assert caplog.text.count("return self.graded(action) / 0") == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 7])
def test_a_thousand_trajectories_have_one_outcome_each(seed):
    """Each by itself, and in step; with environments that are late, raise anywhere, and hang."""
    tokenizer = tokenizer_of("chatml")
    engine = ScriptedEngine(answers(tokenizer))
    Unreliable.made, Unreliable.closed, Unreliable.release = {}, [], threading.Event()
    gym = {"max_env_workers": 32, "env_timeout": 12.0}  # three seconds can pass on a busy machine
    generator = generator_of("chatml", engine, gym=gym, options={"seed": seed})
    batch = batch_of([QUESTION] * 1000, [{"number": i} for i in range(1000)], env_class="unreliable")
    try:
        with pytest.warns(SkyRLMegatronWarning, match=r"155 of 1000 trajectories: environment 'unreliable' failed"):
            output = generate(generator, batch)
    finally:
        Unreliable.release.set()

    assert sorted(Unreliable.made) == list(range(1000))
    assert output["trajectory_ids"] == batch["trajectory_ids"]
    failed = {"raises", "raises in init", "raises in close", "hangs"}
    for number, error, reason, rewards, mask in zip(
        range(1000),
        output["errors"],
        output["stop_reasons"],
        output["rewards"],
        output["loss_masks"],
        strict=True,
    ):
        fate = Unreliable.made[number]
        length = random.Random(number).randint(1, 4)
        if fate in failed:
            assert error and reason == "error" and rewards == [0.0] and mask.tolist() == [0], (number, fate, error)
        else:
            assert error is None and reason == "stop" and sum(rewards) == number * length, (number, fate)
    assert output["rollout_metrics"]["generate/num_failed"] == 155.0
    assert generator.pool.abandoned == 5, "the hanging ones"
    # Every environment that was opened is closed once, but for those that hang, whose thread is still inside.
    assert len(Unreliable.closed) == len(set(Unreliable.closed)) >= 1000 - 5
    assert max(engine.turns.values()) <= 3 and len(engine.turns) == 1000 - 50


def test_nothing_is_left_to_train_on():
    steps = [ValueError("no such tool")]
    generator = generator_of("chatml", ScriptedEngine(answers(tokenizer_of("chatml"))))
    with pytest.raises(
        DataError,
        match=r"1 of 1 .*'talking' failed \(ValueError: no such tool, at \S+\.py:\d+ in \w+\), so the batch has no",
    ):
        run(generator, QUESTION, steps)


def test_an_environment_that_never_ends_is_ended():
    log = Log()
    generator = generator_of("chatml", ScriptedEngine(answers(tokenizer_of("chatml"))), max_turns=3)
    output = run(generator, QUESTION, [say("go on", 0.5)] * 4, extras={"log": log})
    assert log == ["#### 15"] * 3 + ["closed"]
    assert output["rollout_metrics"]["generate/num_unfinished"] == 1.0
    assert output["rollout_metrics"]["generate/avg_turns"] == 3.0 and sum(output["rewards"][0]) == 1.5
    assert output["errors"] == [None] and output["env_metrics"] == [{"turns": 3}]


@pytest.mark.parametrize(
    "step, message",
    [
        (say(reward="15", done=True), r"'talking', trajectory 0_0: the reward is '15' \(str\), it must be a number"),
        (say(reward=None, done=True), r"the reward is None \(NoneType\)"),
        (say(reward=[1.0], done=True), r"the reward is \[1.0\] \(list\)"),
        (
            say(reward=10**400, done=True),
            r"'talking', trajectory 0_0: the reward \(int\) exceeds the range of a float",
        ),
        (say(reward=10**5000, done=True), r"the reward \(int\) exceeds the range of a float"),
        (say(reward=float("nan"), done=True), r"the reward is nan: .*trainer.algorithm.nonfinite=skip"),
        (say(reward=float("-inf"), done=True), r"the reward is -inf"),
        (
            {"reward": 1.0},
            r"step\(\) returned .* it must return BaseTextEnvStepOutput with observations, reward, done",
        ),
        (None, r"step\(\) returned None"),
        ({**say("x"), "observations": ["x"]}, r"an observation is 'x', it must be a message with role and content"),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_what_breaks_the_contract_of_environments_ends_the_run(step, message, batched):
    log = Log()
    engine = ScriptedEngine(answers(tokenizer_of("chatml")))
    generator = generator_of("chatml", engine, options={"seed": 1 if batched else None})
    batch = batch_of([QUESTION] * 2, [{"steps": [step], "log": log}, {"steps": [say(done=True)], "log": log}])
    with pytest.raises(DataError, match=message):
        generate(generator, batch)
    assert log.count("closed") == 2, "the other environment is closed too"


def test_rewards_that_are_not_finite_may_be_skipped():
    generator = generator_of("chatml", ScriptedEngine(answers(tokenizer_of("chatml"))), options={"nonfinite": "skip"})
    extras = [{"steps": [say(reward=reward, done=True)]} for reward in (1.0, float("nan"), 0.5)]
    with pytest.warns(SkyRLMegatronWarning, match="1 of 3 trajectories"):
        output = generate(generator, batch_of([QUESTION] * 3, extras))
    assert output["stop_reasons"] == ["stop", "error", "stop"]
    assert [sum(reward) for reward in output["rewards"]] == [1.0, 0.0, 0.5]
    assert "the reward is nan" in output["errors"][1]


def test_unknown_environments_are_named_before_anything_is_sampled():
    engine = ScriptedEngine([])
    with pytest.raises(DataError, match=r"no environment 'gsm9k'.*gsm8k"):
        generate(generator_of("chatml", engine), batch_of([QUESTION], [{}], env_class="gsm9k"))
    assert engine.calls == []


def test_a_tokenizer_without_chat_template_is_refused():
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("chatml").backend_tokenizer, eos_token="<|im_end|>")
    with pytest.raises((ConfigError, DataError), match=r"chat.template"):
        generator_of("chatml", ScriptedEngine([]), tokenizer=bare)


def test_every_reason_of_the_engine_is_known():
    import ast

    from skyrl_megatron.config.fields import source_of
    from skyrl_megatron.inference.protocol import CUT_OFF, FINISH_REASONS

    tree = source_of("vllm.v1.engine")
    values = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
              and any(getattr(each, "id", "") == "FINISH_REASON_STRINGS" for each in node.targets)]  # fmt: skip
    assert [frozenset(value) for value in values] == [FINISH_REASONS] and CUT_OFF < FINISH_REASONS


@pytest.mark.parametrize(("max_turns", "cut_off"), [(1, "length"), (4, "length"), (4, "repetition")])
def test_trajectories_that_were_cut_off(max_turns, cut_off):
    """``zero_reward_on_non_stop`` and overlong filtering (DAPO) look at how the last turn ended."""
    from skyrl_megatron.rollout.outputs import to_training_batch

    tokenizer = tokenizer_of("chatml")

    def script(session):
        finish = cut_off if session == "1_0" else "stop"
        return answers(tokenizer, finish=finish)

    def made(**config):
        generator = generator_of("chatml", ScriptedEngine(script), max_turns=max_turns, **config)
        extras = [{"steps": [say(reward=1.0, done=True)]} for _ in range(2)]
        return generate(generator, batch_of([QUESTION] * 2, extras))

    plain = made()
    assert plain["stop_reasons"] == ["stop", cut_off]
    assert to_training_batch(plain, ["a", "b"]).truncated.tolist() == [False, True]
    assert plain["rollout_metrics"]["generate/truncated_ratio"] == 0.5
    assert [np.sum(reward) for reward in plain["rewards"]] == [1.0, 1.0]
    assert [bool(mask.any()) for mask in plain["loss_masks"]] == [True, True]
    zeroed = made(zero_reward_on_non_stop=True)
    assert [np.sum(reward) for reward in zeroed["rewards"]] == [1.0, 0.0]
    assert np.shape(zeroed["rewards"][1]) == np.shape(plain["rewards"][1])
    filtered = made(apply_overlong_filtering=True)
    assert [bool(mask.any()) for mask in filtered["loss_masks"]] == [True, False]
    assert [np.sum(reward) for reward in filtered["rewards"]] == [1.0, 1.0]


def test_a_prompt_over_the_limit_is_one_masked_token():
    engine = ScriptedEngine([])
    generator = generator_of("chatml", engine, max_input_length=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = run(generator, QUESTION, [])
    assert engine.calls == [] and output["stop_reasons"] == ["length"]
    assert len(output["prompt_token_ids"][0]) == 8 and output["loss_masks"][0].tolist() == [0]


def test_batched_requests_carry_seeds_of_their_own():
    """Seeds follow uid, repetition, turn and step, not the place in the batch."""

    def seeds(order, step=3):
        from skyrl_megatron.rollout.interface import BatchMetadata, TrajectoryID

        engine = ScriptedEngine(answers(tokenizer_of("chatml")))
        ids = [TrajectoryID(uid, repetition) for uid in "ab" for repetition in range(2)]
        batch = batch_of(
            [QUESTION] * 4,
            [{"steps": [say("again"), say(done=True)]} for _ in ids],
            trajectory_ids=[ids[i] for i in order],
            batch_metadata=BatchMetadata(step, "train"),
        )
        generate(generator_of("chatml", engine, options={"seed": 11}), batch)
        assert len(engine.calls) == 2, "one request a turn"
        names = [name for call in engine.calls for name in call]
        return {(name, turn): s["seed"] for turn, (name, s) in enumerate(zip(names, engine.sampling, strict=True))}

    first = seeds(range(4))
    assert len(set(first.values())) == 8
    again = seeds([3, 1, 0, 2])
    assert sorted(first.values()) == sorted(again.values())
    by_name = {name: {s for (n, _), s in first.items() if n == name} for name, _ in first}
    assert by_name == {name: {s for (n, _), s in again.items() if n == name} for name, _ in again}
    assert not set(first.values()) & set(seeds(range(4), step=4).values())


def test_in_step_and_each_by_itself_make_the_same_rows():
    def rows(**options):
        tokenizer = tokenizer_of("chatml")
        script = answers(tokenizer, "It is 16.", turns=1) + answers(tokenizer, turns=1)
        extras = [{"steps": [say("wrong, try again.", 0.1), say(reward=i, done=True)]} for i in range(3)]
        output = generate(
            generator_of("chatml", ScriptedEngine(script), options=options), batch_of([QUESTION] * 3, extras)
        )
        return {
            key: [np.asarray(value).tolist() for value in output[key]]
            for key in (
                "prompt_token_ids",
                "response_ids",
                "rewards",
                "loss_masks",
                "rollout_logprobs",
                "stop_reasons",
            )
        }

    assert rows() == rows(seed=5)


def test_generators_may_be_extended():
    """The hooks, and an agent loop of one's own."""
    from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator

    class Hooked(SkyRLGymGenerator):
        def _setup_env_extras(self, env_class, env_extras, prompt, sampling_params, max_tokens, max_input_length):
            return {"steps": [say(reward=float(len(prompt)), done=True)]}

        def _post_process_agent_loop_output(self, output, trajectory_id):
            output.rows[-1].reward[-1] += 10
            return output

    class OwnLoop(Hooked):
        async def agent_loop(self, *arguments, **options):
            outcome = await super().agent_loop(*arguments, **options)
            outcome.rows[-1].reward[-1] *= 2
            return outcome

    for cls, options, reward in ((Hooked, {}, 11.0), (Hooked, {"seed": 1}, 11.0), (OwnLoop, {}, 22.0)):
        engine = ScriptedEngine(answers(tokenizer_of("chatml")))
        output = generate(generator_of("chatml", engine, cls=cls, options=options), batch_of([QUESTION], [{}]))
        assert output["rewards"][0][-1] == reward
    with pytest.warns(SkyRLMegatronWarning, match="OwnLoop overrides agent_loop"):
        generator_of("chatml", ScriptedEngine([]), cls=OwnLoop, options={"seed": 1})


@pytest.mark.parametrize(
    "config, message",
    [
        ({"batched": True}, "generator.batched.*max_turns=4"),
        ({"step_wise_trajectories": True, "use_conversation_multi_turn": False}, "use_conversation_multi_turn"),
        ({"merge_stepwise_output": True}, "needs generator.step_wise_trajectories=true"),
    ],
)
def test_settings_that_do_not_go_together(config, message):
    with pytest.raises(ConfigError, match=message):
        generator_of("chatml", ScriptedEngine([]), **config)


@pytest.mark.parametrize("seed", [None, 3])
def test_requests_name_the_adapter_of_their_row(seed):
    """Each turn again, one by one and batched; without names nothing is said."""
    tokenizer, asked = tokenizer_of("chatml"), []
    extras = [{"steps": [say("more"), say(done=True)], "adapter": name} for name in ("math", "code")]
    for names in (("math", "code"), ()):
        engine = ScriptedEngine(answers(tokenizer))
        options = {"adapters": names, "seed": seed}
        generator = generator_of("chatml", engine, tokenizer=tokenizer, options=options)
        generate(generator, batch_of([QUESTION] * 2, extras))
        asked.append(sorted(engine.adapters))
    assert asked == [["code", "code", "math", "math"], []]
