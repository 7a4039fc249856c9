"""Samplers alone: the order of each, adaptive draws that depend on no time, and states that continue exactly."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.errors import ConfigError, DataError, SkyRLMegatronWarning


class Table:
    """Rows in memory, of several data sets, with what samplers read of ``JoinedRows``."""

    def __init__(self, sizes, **columns):
        self.ends, self.columns = np.cumsum(sizes).tolist(), columns
        self.column_names = ["prompt", *columns]

    def __len__(self):
        return self.ends[-1]

    def each(self, columns):
        return ({name: self.columns[name][row] for name in columns} for row in range(len(self)))

    def place(self, row):
        return f"data.jsonl, row {row}"


def sampled(sizes, kept=None, **columns):
    from skyrl_megatron.data.samplers import SampledRows

    return SampledRows(Table(sizes, **columns), [f"set{place}.jsonl" for place in range(len(sizes))], kept)


def sampler_of(name, rows, batch=4, seed=3, **options):
    from skyrl_megatron.data.samplers import make_sampler

    return make_sampler(name, options, rows, batch, seed)


def loader_of(name, rows, batch=4, seed=3, lag=0, **options):
    from skyrl_megatron.data.loader import PromptLoader

    class Entries:
        def __len__(self):
            return len(rows)

        def __getitem__(self, place):
            return str(rows.uids[place])

        def collate_fn(self, uids):
            return [{"uid": uid} for uid in uids]

    sampler = sampler_of(name, rows, batch, seed, **options)
    return PromptLoader(Entries(), batch, seed=seed, sampler=sampler, name=f"{name} {options}", lag=lag)


def test_the_default_order_is_that_of_before(tmp_path):
    """Runs continue, and metrics of earlier runs can be compared: the order is a constant of the project."""
    from skyrl_megatron.data.loader import PromptLoader

    for sampler in (None, sampler_of("shuffle", sampled([11]), 4, 7)):
        loader = PromptLoader(range(11), 4, seed=7, sampler=sampler)
        for epoch in range(3):
            order = np.random.default_rng([7, epoch]).permutation(11).tolist()
            assert list(loader) == [order[:4], order[4:8]]
    before = {"epoch": 1, "batch": 1, "rows": 11, "batch_size": 4, "seed": 7, "shuffle": True, "drop_last": True}
    loader.load_state_dict(before | {"files": []})  # a checkpoint without a sampler
    assert loader.number == 12


def test_in_order_and_list(tmp_path):
    assert sampler_of("in_order", sampled([3, 2])).epoch(5).tolist() == [0, 1, 2, 3, 4]
    (tmp_path / "order").write_text("4\n2\n\n 2\n9\n0\n")
    listed = loader_of("list", sampled([6, 4], [0, 2, 4, 9]), 5, path=str(tmp_path / "order"))
    assert [[entry["uid"] for entry in batch] for batch in listed] == [["4", "2", "2#1", "9", "0"]]
    assert [listed.prompt(number)["uid"] for number in range(4, 9)] == ["0", "4", "2", "2#1", "9"]
    for text, said in (
        ("2\nx\n", "line 2 is 'x', which is no row: the rows are 0 to 9"),
        ("10\n", "line 1 is '10', which is no row"),
        ("-1\n", "line 1 is '-1', which is no row"),
        ("1\n", "line 1 is '1', which trainer.max_prompt_length leaves out"),
    ):
        (tmp_path / "order").write_text(text)
        with pytest.raises(ConfigError, match=said) as error:
            sampler_of("list", sampled([6, 4], [0, 2, 4, 9]), path=str(tmp_path / "order"))
        assert [problem.key for problem in error.value.problems] == ["data.sampler_options.path"]
    with pytest.raises(ConfigError, match="No such file"):
        sampler_of("list", sampled([6]), path=str(tmp_path / "missing"))
    (tmp_path / "order").write_text("")
    with pytest.raises(DataError, match="0 prompts do not fill one batch of 5"):
        loader_of("list", sampled([6]), 5, path=str(tmp_path / "order"))


@pytest.mark.parametrize("weights", [[3, 1], [1, 1, 1], [0.1, 5, 2], [1]])
def test_a_mixture_keeps_its_weights_at_any_time(weights):
    sizes = [5, 40, 9][: len(weights)]
    mixture = sampler_of("mixture", sampled(sizes), weights=weights)
    order = np.concatenate([mixture.epoch(epoch) for epoch in range(20)])
    sources = mixture.rows.sources[order]
    shares = np.asarray(weights) / sum(weights)
    for place, share in enumerate(shares):
        counts = np.cumsum(sources == place)
        assert np.abs(counts - share * np.arange(1, len(order) + 1)).max() <= len(weights)
        drawn = order[sources == place]
        first = sum(sizes[:place])
        passes = [drawn[start : start + sizes[place]] for start in range(0, len(drawn) - sizes[place], sizes[place])]
        for each in passes:  # each row once before any comes again
            assert sorted(each) == list(range(first, first + sizes[place]))
        assert len(passes) < 2 or sizes[place] < 5 or passes[0].tolist() != passes[1].tolist()
    again = sampler_of("mixture", sampled(sizes), weights=weights)
    assert again.epoch(7).tolist() == mixture.epoch(7).tolist()  # whatever was asked for before
    assert again.epoch(7).tolist() != sampler_of("mixture", sampled(sizes), seed=4, weights=weights).epoch(7).tolist()


@pytest.mark.parametrize(("sizes", "weights"), [([4, 1], [4, 1]), ([7, 6], [1, 3]), ([5, 3, 3], [1, 1, 5])])
def test_a_mixture_keeps_its_weights_where_batches_do_not_fill_the_epoch(sizes, weights):
    """With the last rows of each epoch left out, the single row of the first case was never taken."""
    loader = loader_of("mixture", sampled(sizes), 4, seed=1, weights=weights)
    batches = [[int(entry["uid"].partition("#")[0]) for entry in batch] for _ in range(40) for batch in loader]
    rows = np.concatenate(batches)
    shares = [np.mean(np.searchsorted(np.cumsum(sizes), rows, side="right") == place) for place in range(len(sizes))]
    assert shares == pytest.approx(np.asarray(weights) / sum(weights), abs=len(sizes) / len(rows))
    assert set(rows.tolist()) == set(range(sum(sizes)))
    resumed = loader_of("mixture", sampled(sizes), 4, seed=1, weights=weights)
    per_epoch = len(loader)
    resumed.load_state_dict({**loader.state_dict(), "epoch": 17, "batch": per_epoch - 1})
    taken = [[int(entry["uid"].partition("#")[0]) for entry in batch] for _ in range(23) for batch in resumed]
    assert taken == batches[18 * per_epoch - 1 :]


def test_what_an_epoch_leaves_out():
    """Never the hardest in each epoch; an order that does not change says what it never takes."""
    sampler = sampler_of("easy_to_hard", sampled([6], level=[1, 2, 3, 4, 5, 6]), column="level")
    orders = [sampler.epoch(epoch).tolist() for epoch in range(40)]
    assert all(len(order) == 4 and order == sorted(order) for order in orders)
    left_out = Counter(row for order in orders for row in set(range(6)) - set(order))
    assert min(left_out[row] for row in range(6)) >= 4
    with pytest.warns(
        SkyRLMegatronWarning, match="data.sampler=in_order.*: the last 2 of 6 prompts fill no batch of 4"
    ):
        loader_of("in_order", sampled([6]), 4)


def test_easy_to_hard():
    values = [3, 0.5, 2, 2, True, 2]
    sampler = sampler_of("easy_to_hard", sampled([6], level=values), batch=3, column="level")
    orders = [sampler.epoch(epoch).tolist() for epoch in range(8)]
    assert all([values[row] for row in order] == sorted(values) for order in orders)
    assert len({tuple(order) for order in orders}) > 1  # equal ones are shuffled anew
    with pytest.raises(DataError, match=r"no column 'difficulty'; there are prompt, level"):
        sampler_of("easy_to_hard", sampled([6], level=values))
    for wrong in (None, "hard", float("nan"), float("inf")):
        with pytest.raises(DataError, match=r"data.jsonl, row 1: level is .*, it must be a finite number"):
            sampler_of("easy_to_hard", sampled([2], level=[1, wrong]), column="level")


@pytest.mark.parametrize(
    ("name", "options", "key", "said"),
    [
        (
            "shuffled",
            {},
            "data.sampler",
            "not registered; known: shuffle, in_order, mixture, list, easy_to_hard, pools",
        ),
        ("shuffle", {"weights": [1]}, "data.sampler_options.weights", "unknown"),
        ("mixture", {}, "data.sampler_options.weights", "data.train_data has 2 data sets, so give as many weights"),
        ("mixture", {"weights": [1, 0]}, "data.sampler_options.weights", "a weight must be above 0, 0.0 is not"),
        ("mixture", {"weights": [-1, 2]}, "data.sampler_options.weights", "a weight must be above 0, -1.0 is not"),
        ("mixture", {"weights": [1, float("inf")]}, "data.sampler_options.weights", "must be a finite number"),
        ("mixture", {"weights": "much"}, "data.sampler_options.weights", ""),
        ("pools", {"floor": 2}, "data.sampler_options.floor", "must be at least 0 and at most 1"),
        ("pools", {"easy_weight": 0}, "data.sampler_options.easy_weight", "must be above 0"),
        (
            "pools",
            {"easy": 0.5, "hard": 0.5},
            "data.sampler_options.hard",
            "must be below data.sampler_options.easy=0.5",
        ),
    ],
)
def test_wrong_options_are_one_error(name, options, key, said):
    with pytest.raises(ConfigError) as error:
        sampler_of(name, sampled([5, 5]), **options)
    assert [problem.key for problem in error.value.problems] == [key]
    assert said in str(error.value)


# ------------------------------------------------------------------ pools
def test_pools_draw_by_weight_and_treat_the_unseen_as_neutral():
    sampler = sampler_of("pools", sampled([40]), 8, easy_weight=0.25, hard_weight=0.5)
    for row in range(30):
        sampler.observe(row, [0.0, 0.5, 1.0][row // 10])
    drawn = Counter(int(row) for number in range(3000) for row in sampler.draw(number))
    pools = np.asarray([sum(drawn[row] for row in range(first, first + 10)) for first in (0, 10, 20, 30)])
    assert all(len(set(sampler.draw(number).tolist())) == 8 for number in range(50))
    # Without replacement the shares are nearer to each other than the weights: those of an independent simulation.
    rng, weights = random.Random(0), [0.5] * 10 + [1.0] * 10 + [0.25] * 10 + [1.0] * 10
    simulated = Counter()
    for _ in range(3000):
        left = dict(enumerate(weights))
        for _ in range(8):
            (row,) = rng.choices(list(left), list(left.values()))
            del left[row]
            simulated[row // 10] += 1
    for pool, count in enumerate(pools):
        assert abs(count - simulated[pool]) < 6 * np.sqrt(simulated[pool]), (pools, simulated)
    assert abs(pools[1] - pools[3]) < 6 * np.sqrt(pools[1])  # never seen counts as between easy and hard
    assert sampler.metrics() == {"observed_share": 0.75, "easy_share": 0.25, "hard_share": 0.25, "retired_share": 0.0}


def test_pools_retire_with_a_floor_and_return():
    sampler = sampler_of("pools", sampled([20]), 4, retire_after=2, floor=0.5)
    for row in range(16):
        for _ in range(2 + (row < 12)):
            sampler.observe(row, 1.0)
    assert sampler.retired().sum() == 10 and sampler.retired()[:10].all()  # half stays: those easy least often
    assert {int(row) for number in range(200) for row in sampler.draw(number)} == set(range(10, 20))
    sampler.observe(3, 0.75)  # no longer easy, and so not retired
    assert not sampler.retired()[3] and sampler.retired().sum() == 10
    few = sampler_of("pools", sampled([6]), 4, retire_after=1, floor=0)
    for row in range(6):
        few.observe(row, 1.0)
    assert few.retired().sum() == 2 and sorted(few.draw(0).tolist()) == [2, 3, 4, 5]  # a batch always fills


def test_pools_warm_up_as_shuffle():
    pools, shuffle = sampler_of("pools", sampled([11]), warmup_batches=5), sampler_of("shuffle", sampled([11]))
    expected = [shuffle.epoch(epoch)[first : first + 4].tolist() for epoch in range(3) for first in (0, 4)]
    assert [pools.draw(number).tolist() for number in range(5)] == expected[:5]
    assert pools.draw(5).tolist() != expected[5]


def test_a_success_is_a_reward_above_the_bound():
    sampler = sampler_of("pools", sampled([11]), above=0.5)
    assert sampler.score(np.asarray([0.5, 0.6, 1.0, -1.0])) == 0.5
    assert sampler_of("pools", sampled([11])).score(np.asarray([-1.0, 1.0])) == 0.5
    assert sampler_of("pools", sampled([11])).score(np.asarray([0.0, 0.0])) == 0.0


# ------------------------------------------------------------------ draws, in any order of completion
def rewards_of(uid, number):
    """Of a world whose rewards depend on the prompt and on when it is asked; some fail."""
    rng = random.Random(f"{uid} {number}")
    return (
        None if rng.random() < 0.1 else [float(rng.random() < int(uid.partition("#")[0]) % 10 / 9) for _ in range(4)]
    )


OPTIONS = {"retire_after": 2, "warmup_batches": 2}


def synchronous(batches):
    loader, taken = loader_of("pools", sampled([50], range(0, 100, 2)), 4, **OPTIONS), []
    while len(taken) < batches:
        for batch in loader:
            uids = [entry["uid"] for entry in batch]
            first = 4 * len(taken)
            found = {uid: rewards_of(uid, number) for number, uid in enumerate(uids, first)}
            loader.observe_batch({uid: rewards for uid, rewards in found.items() if rewards is not None})
            taken.append(uids)
            if len(taken) == batches:
                break
    return taken, loader


@pytest.mark.parametrize("seed", range(12))
def test_asynchronous_draws_depend_on_no_time(seed):
    """Prompts finish in a random order, ahead of the steps, and the process is killed and resumed now and then."""
    lag, batches = seed % 3, 30
    expected = run_ahead(random.Random("in order"), lag, batches, kills=False)
    found = run_ahead(random.Random(seed), lag, batches, kills=True)
    assert found == expected
    if not lag:
        assert [found[4 * batch : 4 * batch + 4] for batch in range(batches)] == synchronous(batches)[0]


def run_ahead(rng, lag, batches, *, kills):
    def fresh():
        return loader_of("pools", sampled([50], range(0, 100, 2)), 4, lag=lag, **OPTIONS)

    loader, uids, running, done, saved = fresh(), {}, [], set(), None
    while len(done) < 4 * batches:
        ready = len(uids) < 4 * batches and loader.ready(len(uids))
        assert ready or running, "nothing can go on"
        if ready and (not running or (kills and rng.random() < 0.6)):
            number = len(uids)
            uids[number] = loader.prompt(number)["uid"]
            running.append(number)
        elif running:
            number = running.pop(rng.randrange(len(running)) if kills else 0)
            loader.observe(number, rewards_of(uids[number], number))
            loader.observe(number, [9.0])  # only the first counts
            done.add(number)
        if kills and rng.random() < 0.1:
            oldest = min(set(range(4 * batches + 1)) - done)
            loader.seek(oldest)
            saved = oldest, json.loads(json.dumps(loader.state_dict()))
        if kills and saved and rng.random() < 0.1:  # what finished after the checkpoint is lost, or sampled again
            oldest, state = saved
            loader = fresh()
            loader.load_state_dict(state)
            again = [number for number in uids if number >= oldest]
            rng.shuffle(again)
            for number in again:
                if loader.ready(number):
                    assert loader.prompt(number)["uid"] == uids[number]
            before, running = dict(uids), []
            done = set(range(oldest))
            uids = {number: uid for number, uid in uids.items() if number < oldest}
            for number in sorted(again):
                if not loader.ready(number):
                    break
                uids[number] = loader.prompt(number)["uid"]
                assert uids[number] == before[number]
                running.append(number)
    return [uids[number] for number in range(4 * batches)]


def test_synchronous_draws_continue_after_any_batch():
    whole, _ = synchronous(40)
    for stop in (1, 2, 7, 12, 25, 39):
        state = json.loads(json.dumps(synchronous(stop)[1].state_dict()))
        loader = loader_of("pools", sampled([50], range(0, 100, 2)), 4, **OPTIONS)
        loader.load_state_dict(state)
        batch = next(iter(loader), None) or next(iter(loader))  # the epoch may be at its end
        assert [entry["uid"] for entry in batch] == whole[stop]


def test_a_recorded_prompt_is_recalled():
    """Observations of filtered groups are not recorded: the draws of a resumed run may differ from the records."""
    loader = loader_of("pools", sampled([50], range(0, 100, 2)), 4, lag=1)
    drawn = [loader.prompt(number)["uid"] for number in range(8)]
    assert loader.recall(3, drawn[3]) == {"uid": drawn[3]} and not loader.draws.pinned
    assert not loader.ready(9) and loader.recall(9, "12") == {"uid": "12"}
    for number in range(4):
        loader.observe(number, [1.0])
    assert loader.ready(9) and loader.prompt(9)["uid"] == "12" and loader.prompt(8)["uid"] != "12"
    for number in range(4, 12):
        loader.observe(number, [1.0])
    loader.prompt(16)
    assert not np.isnan(loader.sampler.latest[6])  # the prompt that was sampled, in place of the drawn one
    assert loader.recall(17, "13")["uid"] != "13"  # not in the data: whoever compares the uid says so


def test_a_checkpoint_of_another_sampler_is_refused():
    state = loader_of("pools", sampled([50]), 4).state_dict()
    with pytest.raises(DataError, match=r"has sampler=shuffle .*, but sampler=pools .* in the checkpoint"):
        loader_of("shuffle", sampled([50]), 4).load_state_dict(state)


# ------------------------------------------------------------------ plugins
def test_a_sampler_of_a_plugin(monkeypatch):
    from skyrl_megatron.data.samplers import AdaptiveSampler
    from skyrl_megatron.plugins import SAMPLERS, register_sampler

    monkeypatch.setattr(SAMPLERS, "_classes", {})

    class Wanted(BaseConfig):
        pass

    @register_sampler("worst_first")
    class WorstFirst(AdaptiveSampler):
        answer = None

        def draw(self, number):
            return self.answer if self.answer is not None else np.argsort(np.nan_to_num(self.latest, nan=-1.0))[:4]

        def score(self, rewards):
            return rewards.max() if len(rewards) < 9 else np.nan

    loader = loader_of("worst_first", sampled([9]), 4)
    for batch in loader:
        assert len(batch) == 4
        loader.observe_batch({entry["uid"]: [float(entry["uid"])] for entry in batch})
    assert [entry["uid"] for entry in next(iter(loader))] == ["8", "0", "1", "2"]
    with pytest.raises(DataError, match=r"data.sampler: WorstFirst gave rewards .* the score nan"):
        loader.observe_batch({"8": [0.0] * 9})
    for answer, said in (
        ([0, 1, 2, 9], r"must return \[4\] positions of rows, 0 to 8; got int64 \[4\] from 0 to 9"),
        ([0, 1], r"got int64 \[2\] from 0 to 1"),
        ([0.0] * 4, r"got float64 \[4\]"),
        (["a"] * 4, r"got <U1 \[4\]"),
        ({}, "got object"),
    ):
        loader.sampler.answer = answer
        with pytest.raises(DataError, match=said):
            loader.draws.rows(loader.draws.next, waits=False)

    @register_sampler("broken")
    class Broken(AdaptiveSampler):
        def __init__(self, *args):
            raise KeyError("level")

    with pytest.raises(DataError, match=r"data.sampler=broken: the sampler cannot be made \(KeyError: 'level'"):
        sampler_of("broken", sampled([9]))
