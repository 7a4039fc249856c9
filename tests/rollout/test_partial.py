"""Batches that end early: what is interrupted continues with the same tokens and what belongs to them.

The engine is a fake on purpose: it samples a known text at a known pace, whatever it is asked to continue. Real
engines are tested in tests/job/test_oversampling.py.
"""

import asyncio
from collections import Counter

import numpy as np
import pytest

from skyrl_megatron.inference.protocol import Generation
from tests.rollout.scripted import Log, generator_of, say, tokenizer_of

END = "<|im_end|>"


class PacedEngine:
    """Samples the turns of each session token by token, one in each ``tick``; ``abort`` ends requests.

    Token k of turn t has the log-prob −(t + k/1000) and the route [version, position in the sequence].
    """

    def __init__(self, texts, tick=0.001):
        tokenizer = tokenizer_of("chatml")
        end = tokenizer.convert_tokens_to_ids(END)
        self.turns = {
            session: [[*tokenizer.encode(text, add_special_tokens=False), end] for text in said]
            for session, said in texts.items()
        }
        self.tick, self.version = tick, "0"
        self.done = Counter()
        self.stopped = {}
        self.requests = []
        self.in_flight = set()

    async def generate(self, prompts, sampling, sessions, adapters=None):
        each = [sampling] * len(sessions) if isinstance(sampling, dict) else sampling
        work = (
            self._one(list(prompt), keys, session)
            for prompt, keys, session in zip(prompts, each, sessions, strict=True)
        )
        return await asyncio.gather(*work)

    async def _one(self, prompt, keys, session):
        self.requests.append((session, len(prompt), keys))
        turn = self.done[session]
        text = self.turns[session][turn]
        known = next(count for count in range(len(text), -1, -1) if not count or prompt[-count:] == text[:count])
        stop = self.stopped[session] = asyncio.Event()
        self.in_flight.add(session)
        token = known
        while token < len(text) and token - known < keys["max_tokens"] and not stop.is_set():
            if self.tick:
                await asyncio.sleep(self.tick)
            token += 1
        self.in_flight.discard(session)
        reason = "stop" if token == len(text) else "abort" if stop.is_set() else "length"
        self.done[session] += reason == "stop"
        first = keys.get("routed_experts_prompt_start", 0)
        end = len(prompt) + token - known - 1
        return Generation(
            text[known:token],
            [-(turn + k / 1000) for k in range(known, token)],
            reason,
            [(self.version, 0, token - known)] if token > known else [],
            np.asarray([[[int(self.version), at]] for at in range(first, end)], np.uint16) if token > known else None,
        )

    async def abort(self, sessions):
        for session in sessions:
            if session in self.in_flight:
                self.stopped[session].set()


def words(count):
    return " ".join(["wrong"] * count)


def batch_of(texts, samples, groups, needed, steps=None, log=None):
    """The log and the input of a batch of all sessions of ``texts``; ``log``: sees what environments are asked."""
    from skyrl_megatron.rollout.interface import TrajectoryID
    from skyrl_megatron.rollout.partial import PartialRollouts

    uids = list(dict.fromkeys(session.partition("_")[0] for session in texts))
    ids = [TrajectoryID(uid, sample) for uid in uids for sample in range(samples)]
    seen = {} if log is None else {"log": log}
    partial = PartialRollouts(groups, samples, lambda complete: len(complete) >= needed)
    return partial, {
        "prompts": [[{"role": "user", "content": f"What is {id.instance_id}?"}] for id in ids],
        "env_classes": ["talking"] * len(ids),
        "env_extras": [
            {"steps": (steps or {}).get(id.to_string(), [say(done=True, reward=1.0)]), **seen} for id in ids
        ],
        "sampling_params": None,
        "trajectory_ids": ids,
        "batch_metadata": None,
        "trajectory_log": partial,
    }


def in_steps(texts, samples, *, needed, options=None):
    """Sample batches until all groups are complete, with a new version in each; returns (outputs, engine, logs)."""
    groups = {session.partition("_")[0]: {} for session in texts}
    engine = PacedEngine(texts, tick=0 if options else 0.001)
    generator = generator_of("chatml", engine, options=options)
    outputs, logs = [], []
    while groups:
        left = {session: said for session, said in texts.items() if session.partition("_")[0] in groups}
        log, batch = batch_of(left, samples, groups, needed)
        outputs.append(asyncio.run(generator.generate(batch, disable_tqdm=True)))
        logs.append(log)
        for uid in log.complete:
            del groups[uid]
        groups = through_the_codec(groups)
        engine.version = str(len(outputs))
        assert not engine.in_flight
    return outputs, engine, logs


def through_the_codec(groups):
    from skyrl_megatron.sources.records import CODEC

    return CODEC.decode(b"".join(bytes(part) for part in CODEC.encode(groups)))


def rows_by_session(outputs):
    found = {}
    for output in outputs:
        for row, id in enumerate(output["trajectory_ids"]):
            found[id.to_string()] = {
                key: output[key][row]
                for key in ("prompt_token_ids", "response_ids", "rollout_logprobs", "loss_masks", "rewards")
            } | {"routes": output["rollout_expert_indices"][row], "versions": output["rollout_versions"][row]}
    return found


TEXTS = {"1_0": [words(4)], "1_1": [words(6)], "2_0": [words(5)], "2_1": [words(190)], "3_0": [words(90)], "3_1": [""]}
MODES = pytest.mark.parametrize("options", [None, {"seed": 3}], ids=["independent", "rounds"])


@MODES
def test_interrupted_turns_continue_where_they_were(options):
    (whole,), _, _ = in_steps(TEXTS, 2, needed=3, options=options)
    cut, engine, logs = in_steps(TEXTS, 2, needed=1, options=options)
    assert [log.complete for log in logs] == [["1"], ["3"], ["2"]]
    expected, found = rows_by_session([whole]), rows_by_session(cut)
    assert expected.keys() == found.keys()
    for session, row in found.items():
        for key in ("prompt_token_ids", "response_ids", "rollout_logprobs", "loss_masks", "rewards"):
            assert np.array_equal(row[key], expected[session][key]), (session, key)
        length, prompt = len(row["response_ids"]), len(row["prompt_token_ids"])
        spans = row["versions"]
        assert [a for _, a, _ in spans] == [0, *(b for *_, b in spans[:-1])] and spans[-1][2] == length
        assert row["routes"][:, 0, 1].tolist() == list(range(prompt + length - 1))
        for name, first, end in spans:  # the pass that samples a token computes the one before it
            assert set(row["routes"][prompt + first - 1 : prompt + end - 1, 0, 0].tolist()) == {int(name)}
    assert [name for name, *_ in found["2_1"]["versions"]] == ["0", "1", "2"]
    requests = Counter(session for session, *_ in engine.requests)
    assert requests["1_0"] == 1 and requests["2_1"] == 3


def test_rounds_do_not_depend_on_time():
    runs = [in_steps(TEXTS, 2, needed=1, options={"seed": 3}) for _ in range(2)]
    requests = [[(s, length, keys["max_tokens"], keys["seed"]) for s, length, keys in run[1].requests] for run in runs]
    assert requests[0] == requests[1]
    assert len(set(seed for *_, seed in requests[0])) == len(requests[0])
    limit = -(-1024 // 16)
    assert {tokens for _, _, tokens, _ in requests[0]} == {limit}


@MODES
def test_environments_of_several_turns_are_closed_and_replayed(options):
    texts = {"1_0": [words(60)], "2_0": [words(2), words(3), words(300), "b"]}
    turns = [*(say("more", reward=float(turn)) for turn in range(3)), say(done=True, reward=9.0)]
    groups, engine, log = {"1": {}, "2": {}}, PacedEngine(texts, tick=0 if options else 0.001), Log()
    generator = generator_of("chatml", engine, options=options, max_input_length=2048)
    first, batch = batch_of(texts, 1, groups, 1, {"2_0": turns}, log)
    one = asyncio.run(generator.generate(batch, disable_tqdm=True))
    assert first.complete == ["1"] and [id.instance_id for id in one["trajectory_ids"]] == ["1"]
    sample = groups["2"][0]
    assert log.count("closed") == 2 and len(sample.turns) == engine.done["2_0"] == (1 if options else 2)
    assert bool(sample.begun) == (not options)
    del groups["1"], texts["1_0"]
    log.clear()
    second, batch = batch_of(texts, 1, groups, 1, {"2_0": turns}, log)
    two = asyncio.run(generator.generate(batch, disable_tqdm=True))
    assert second.counts == {"resumed": 1} and log == [*texts["2_0"], "closed"]
    (reward,), (mask,) = two["rewards"], two["loss_masks"]
    assert sum(reward) == 0 + 1 + 2 + 9 and int(mask.sum(dtype=int)) == sum(map(len, engine.turns["2_0"]))


def test_another_prompt_restarts_a_begun_turn():
    texts = {"1_0": [words(2)], "2_0": [words(60)]}
    groups = {"1": {}, "2": {}}
    engine = PacedEngine(texts)
    generator = generator_of("chatml", engine)
    _, batch = batch_of(texts, 1, groups, 1)
    asyncio.run(generator.generate(batch, disable_tqdm=True))
    assert len(groups["2"][0].begun.generation.token_ids) > 0
    del groups["1"]
    log, batch = batch_of({"2_0": texts["2_0"]}, 1, groups, 1)
    batch["prompts"] = [[{"role": "user", "content": "Something else?"}]]
    output = asyncio.run(generator.generate(batch, disable_tqdm=True))
    assert log.counts == {"restarted": 1}
    assert output["response_ids"][0].tolist() == engine.turns["2_0"][0]


def test_a_begun_turn_never_ends_inside_a_stop_string():
    from skyrl_megatron.rollout.continuation import without_open_stop

    tokenizer = tokenizer_of("chatml")
    ids = tokenizer.encode("answer ####", add_special_tokens=False)
    part = Generation(ids, [-1.0] * len(ids), "abort", [("3", 0, len(ids))], np.zeros((20, 1, 1), np.uint8))
    kept = without_open_stop(part, tokenizer.decode, ["#### 7", "</a>"])
    assert tokenizer.decode(kept.token_ids).rstrip() == "answer"
    dropped = len(ids) - len(kept.token_ids)
    assert 0 < dropped and len(kept.routed_experts) == 20 - dropped
    assert kept.versions == [("3", 0, len(kept.token_ids))] and len(kept.logprobs) == len(kept.token_ids)
    assert without_open_stop(part, tokenizer.decode, ["</a>"]) is part


def test_turns_whose_sampling_depends_on_all_tokens_start_again():
    texts = {"1_0": [words(2)], "2_0": [words(60)]}
    groups = {"1": {}, "2": {}}
    engine = PacedEngine(texts)
    generator = generator_of("chatml", engine)
    _, batch = batch_of(texts, 1, groups, 1)
    batch["sampling_params"] = {"max_tokens": 1024, "presence_penalty": 0.5, "logprobs": 0}
    asyncio.run(generator.generate(batch, disable_tqdm=True))
    assert groups["2"][0].begun is None and not groups["2"][0].turns
