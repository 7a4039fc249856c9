"""The types of sampling parameters: what is coerced, what is refused and how, and that they are vLLM's own."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from tests.inference.request_bodies import HUGE, SURROGATE, nested

COERCED = [
    ({"max_tokens": 5.0}, {"max_tokens": 5}),
    ({"max_tokens": None}, {"max_tokens": None}),
    ({"temperature": 1}, {"temperature": 1.0}),
    ({"ignore_eos": 1, "skip_special_tokens": 0.0}, {"ignore_eos": True, "skip_special_tokens": False}),
    ({"logit_bias": {"5": 1}}, {"logit_bias": {5: 1.0}}),
    ({"stop": "x"}, {"stop": "x"}),
    ({"stop": ("x", "y")}, {"stop": ["x", "y"]}),
    ({"stop_token_ids": [1.0, 2]}, {"stop_token_ids": [1, 2]}),
    ({"structured_outputs": {"regex": "a"}}, {"structured_outputs": {"regex": "a"}}),
    ({"extra_args": {"a": [1, None, {"b": 2.5}]}}, {"extra_args": {"a": [1, None, {"b": 2.5}]}}),
]
REFUSED = [
    ({"max_tokens": True}, r"max_tokens=True: must be an int or null"),
    ({"max_tokens": 2.5}, r"max_tokens=2.5: must be an int or null"),
    ({"seed": HUGE}, rf"seed={HUGE}: must be between -\d+ and \d+"),
    ({"seed": 2**63 - 1}, r"seed=\d+: must be between"),
    ({"temperature": True}, r"temperature=True: must be a number"),
    ({"temperature": float("nan")}, r"temperature=nan: must be a number up to 1e\+30"),
    ({"repetition_penalty": 1e-320}, r"repetition_penalty=1e-320: must be between 1e-30 and 1e\+30"),
    ({"ignore_eos": "x"}, r"ignore_eos='x': must be a bool"),
    ({"stop": {}}, r"stop={}: must be a str or a list, each a str or null"),
    ({"stop": [SURROGATE]}, r"stop\[0\]='\\ud800': must be Unicode text"),
    ({"bad_words": [1]}, r"bad_words\[0\]=1: must be a str"),
    ({"stop_token_ids": [1, True]}, r"stop_token_ids\[1\]=True: must be an int"),
    ({"logit_bias": [1]}, r"logit_bias=\[1\]: must be an object"),
    ({"logit_bias": {"x": 1}}, r"logit_bias.x='x': keys must be an int"),
    ({"logit_bias": {"5": 1e40}}, r"logit_bias.5=1e\+40: must be a number up to"),
    ({"extra_args": nested(900)}, r"extra_args.a=.*\.\.\.: is nested deeper than 64 levels"),
    ({"extra_args": {"a": HUGE}}, r"extra_args.a=.*has more than 64 bits"),
    ({"structured_outputs": {"rgx": "a"}}, r"structured_outputs.rgx='a': is not a field of StructuredOutputsParams"),
    ({"temprature": 1}, r"temprature=1: unknown sampling key 'temprature': did you mean 'temperature'"),
    ({"n": 2}, r"n=2: unknown sampling key 'n'"),
]
TOKENS = [
    ([True], r"token_ids\[0\]=True: must be an int"),
    ([5, 2.5], r"token_ids\[1\]=2.5: must be an int"),
    ([5, -1], r"token_ids\[1\]=-1: must be 0 to 99, the vocabulary"),
    ([5, 100], r"token_ids\[1\]=100: must be 0 to 99, the vocabulary"),
    ([], r"token_ids=\[\]: must be a list of one or more"),
    ("abc", r"token_ids='abc': must be a list"),
    (None, r"token_ids=None: must be a list"),
]


@pytest.mark.parametrize(("given", "typed"), COERCED)
def test_a_value_that_loses_nothing_is_coerced(given, typed):
    from skyrl_megatron.inference.sampling_params import typed_sampling

    made = typed_sampling(given)
    assert made == typed and [type(value) for value in made.values()] == [type(value) for value in typed.values()]


def test_numpys_numbers_are_pythons():
    import numpy as np

    from skyrl_megatron.inference.sampling_params import typed_sampling, typed_tokens

    made = typed_sampling({"top_k": np.int64(3), "temperature": np.float32(0.5), "ignore_eos": np.bool_(True)})
    assert made == {"top_k": 3, "temperature": 0.5, "ignore_eos": True}
    assert [type(value) for value in made.values()] == [int, float, bool]
    assert [type(token) for token in typed_tokens(np.arange(3))] == [int] * 3
    assert typed_tokens([np.int32(4), 5.0, 6]) == [4, 5, 6]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_a_value_of_another_type_is_refused_by_its_key(given, message):
    from skyrl_megatron.inference.sampling_params import WrongType, typed_sampling

    with pytest.raises(WrongType, match=message):
        typed_sampling(given)


@pytest.mark.parametrize(("given", "message"), TOKENS)
def test_what_is_no_token_id_is_refused_by_its_place(given, message):
    from skyrl_megatron.inference.sampling_params import WrongType, typed_tokens

    with pytest.raises(WrongType, match=message):
        typed_tokens(given, 100)


EOS = 2  # of the tokenizer
STOPS = {  # case: (generation_config.json, config.json, stop tokens)
    "a list": ({"eos_token_id": [11, 12]}, {"eos_token_id": 13}, {EOS, 11, 12}),
    "one": ({"eos_token_id": 12}, {"eos_token_id": 13}, {EOS, 12}),
    "none": ({"temperature": 0.5}, {"eos_token_id": 13}, {EOS}),
    "no file": (None, {"eos_token_id": [13, EOS]}, {EOS, 13}),
    "the default of the family": (None, {"model_type": "bart"}, {EOS}),
}


@pytest.mark.slow
@pytest.mark.process  # importing vLLM does
@pytest.mark.parametrize("case", STOPS)
def test_the_stop_tokens_of_a_folder_are_those_of_vllm(case, tmp_path):
    from vllm import SamplingParams
    from vllm.transformers_utils.config import try_get_generation_config

    from skyrl_megatron.data.tokenizer import load_tokenizer, stop_tokens_of
    from tests.support.tiny_models import write_tokenizer

    generation, config, expected = STOPS[case]
    write_tokenizer(tmp_path)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    tokenizer = load_tokenizer(tmp_path)
    params = SamplingParams()
    read = try_get_generation_config(str(tmp_path), trust_remote_code=False)
    params.update_from_generation_config(read.to_diff_dict(), tokenizer.eos_token_id)
    found = stop_tokens_of(tokenizer)
    assert set(found) == {*params.stop_token_ids, params.eos_token_id} == expected and found[0] == EOS


@pytest.mark.slow
@pytest.mark.process  # importing vLLM does
def test_the_types_are_those_that_vllm_decodes():
    """Each parameter's default passes as it is, and what passes is decoded by the strict decoder of a core."""
    import msgspec
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from skyrl_megatron.inference.sampling_params import WrongType, sampling_types, typed_field

    declared = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert set(sampling_types()) == declared
    decode = msgspec.msgpack.Decoder(SamplingParams, dec_hook=lambda kind, value: value).decode
    tried = [True, 0, 1, 2.0, 2.5, -1, "x", "5", [], [1], [True], [1.0], ["x"], {}, {"5": 1}, {"a": 1}, HUGE, 1e300]
    for name in sorted(declared - {"output_kind", "prompt_logprob_token_ids"}):  # an array by then
        default = getattr(SamplingParams(), name)
        assert default is None or typed_field(name, default) == default
        passed = 0
        for value in tried:
            try:
                typed = typed_field(name, value)
            except WrongType:
                continue
            passed += 1
            with contextlib.suppress(VLLMValidationError, TypeError):  # of its range, which vLLM asks before it sends
                decode(msgspec.msgpack.encode({name: typed}))
        assert 0 < passed < len(tried), name


# ------------------------------------------------------------------ requests that are lost with an engine
class Engine:
    """A stand-in that loses what it is given as often as it is asked to: real ones end in ``test_requests.py``."""

    def __init__(self, losses):
        self.losses, self.given = losses, []

    async def generate(self, request_id, prompt, sampling, adapter=""):
        from skyrl_megatron.errors import EngineGoneError
        from skyrl_megatron.inference.protocol import INITIAL_VERSION, Generation

        self.given.append(list(prompt))
        if self.losses and self.losses.pop(0):
            raise EngineGoneError("it is gone")
        await asyncio.sleep(0.01)
        return Generation([1], [0.0], "stop", [(INITIAL_VERSION, 0, 1)])

    async def health(self):
        await asyncio.sleep(0)

    async def version(self):
        return "initial"


def sample(losses, seeds=(0, 1)):
    """Ask for one prompt with each of the seeds in turn; what the engine was given."""
    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron.inference.engine_pool import EnginePool, EngineState
    from skyrl_megatron.inference.protocol import INITIAL_VERSION

    async def work():
        engine = Engine(list(losses))
        pool = EnginePool([lambda: engine], wait_s=5)
        (slot,) = pool.slots
        pool.serve(slot, INITIAL_VERSION)
        client = InferenceClient(pool)

        async def serve_again():
            while True:
                await asyncio.sleep(0)
                if slot.state is EngineState.PAUSED:
                    pool.serve(slot, INITIAL_VERSION)

        again = asyncio.create_task(serve_again())
        try:
            for seed in seeds:
                await client.sample([5], {"seed": seed, "max_tokens": 1})
        finally:
            again.cancel()
        return engine.given

    return asyncio.run(work())


def test_a_request_that_is_lost_once_is_made_again():
    assert sample([True]) == [[5]] * 3


def test_one_that_was_answered_is_no_suspect_any_more():
    """Bad luck, twice, with an answer between: asked for a third time it is answered."""
    assert sample([True, False, True], seeds=(0, 1, 2)) == [[5]] * 5


def test_one_that_is_lost_twice_is_refused_with_any_seed():
    from skyrl_megatron.errors import RequestError

    with pytest.raises(RequestError, match=r"killed two.*1 tokens .*\[5\].*the second, engine 0: it is gone"):
        sample([True, True])


class Mortal:
    """An engine that a request ends when it has been sampled for so many steps, and all in flight with it."""

    def __init__(self):
        self.ended = asyncio.Event()

    async def start(self):
        pass

    async def kill(self):
        self.ended.set()

    async def generate(self, request_id, prompt, sampling, adapter=""):
        from skyrl_megatron.errors import EngineGoneError
        from skyrl_megatron.inference.protocol import INITIAL_VERSION, Generation

        for step in range(40):
            if self.ended.is_set():
                raise EngineGoneError("it is gone")
            if sampling.get("extra_args") == {"ends": step}:
                self.ended.set()
            await asyncio.sleep(0.001)
        return Generation(list(prompt), [0.0], "stop", [(INITIAL_VERSION, 0, 1)])

    async def health(self):
        from skyrl_megatron.errors import EngineGoneError

        await asyncio.sleep(0.002)  # between two steps
        if self.ended.is_set():
            raise EngineGoneError("it is gone")

    async def version(self):
        return "initial"


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("place", [0, 3, -1], ids=["first", "fourth", "last"])
@pytest.mark.parametrize("step", [0, 20])
@pytest.mark.parametrize(("beside", "lost"), [(6, 2), (40, 3)])
def test_one_of_many_ends_its_engine_in_the_middle(engines, place, step, beside, lost):
    """The others are answered, it alone is refused. Few are given alone at once, many after their second loss."""
    from skyrl_megatron.errors import RequestError
    from skyrl_megatron.inference.client import HealthMonitor, InferenceClient
    from skyrl_megatron.inference.engine_pool import EnginePool

    async def work():
        pool = EnginePool([Mortal] * engines, wait_s=20)
        await pool.start()
        client, monitor = InferenceClient(pool), HealthMonitor(pool, interval_s=0.005)
        monitor.start()
        guilty = (place if place >= 0 else beside) % (beside + 1)
        tasks = [
            asyncio.create_task(client.sample([at], {"extra_args": {"ends": step} if at == guilty else {}}))
            for at in range(beside + 1)
        ]
        answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        await asyncio.sleep(0.05)
        await monitor.stop()
        refusal = answers.pop(guilty)
        assert isinstance(refusal, RequestError) and "killed two engines" in str(refusal)
        assert [each.token_ids for each in answers] == [[at] for at in range(beside + 1) if at != guilty]
        return sum(len(slot.restarts) for slot in pool.slots)

    assert 2 <= asyncio.run(work()) <= lost
