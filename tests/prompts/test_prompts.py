"""Datasets of prompts: formats, filtering, bad rows, memory; the loader's order and resume; prepared datasets."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from skyrl_megatron.data.loader import PromptLoader
from skyrl_megatron.errors import DataError
from tests.rollout.scripted import tokenizer_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Converted files go to the test's own folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def rows_of(count, words=lambda i: i % 7):
    return [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": "the " * words(i) + f"{i}?"}],
            "env_class": "gsm8k" if i % 2 else None,
            "reward_spec": {"method": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(count)
    ]


def save(rows, path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) if path.suffix == ".jsonl" else "[" + ",".join(lines) + "]")
    return str(path)


def dataset(paths, max_prompt_length=1000, **options):
    from skyrl_megatron.data.prompts import PromptDataset

    return PromptDataset(paths, tokenizer_of("chatml"), max_prompt_length, **options)


def test_lengths_and_places_are_kept_for_later_runs(tmp_path, monkeypatch):
    """The second time neither a prompt is tokenized nor the file parsed; another template has lengths of its own."""
    from skyrl_megatron.data import prompts, row_files
    from skyrl_megatron.data.row_cache import RowCache

    rows = rows_of(5)
    rows[3]["prompt"] = [{"role": "user", "content": "long " * 99}]
    paths, cache, said = [save(rows, tmp_path / "data.jsonl")], RowCache(10**9, tmp_path / "cache"), []
    monkeypatch.setattr(row_files, "KEPT_FROM", 0)
    expected = dataset(paths, 64)
    first = dataset(paths, 64, cache=cache, say=said.append)
    assert list(first.kept) == list(expected.kept) == [0, 1, 2, 4]
    with monkeypatch.context() as patched:
        patched.setattr(prompts, "render", None)
        patched.setattr(row_files, "_CHECKED", None)
        patched.setattr(row_files.JsonRows, "_lines", None)
        again = dataset(paths, 64, cache=cache)
        assert [again[n] for n in range(4)] == [expected[n] for n in range(4)] and again.num_filtered == 1
        assert len(dataset(paths, 1000, cache=cache)) == 5
        assert again.fingerprint == expected.fingerprint
    assert len(dataset(paths, 64, cache=cache, template="{{ messages[0].content }}" * 20)) < 4
    (tmp_path / "data.jsonl").write_text("\n" + (tmp_path / "data.jsonl").read_text())
    assert list(dataset(paths, 64, cache=cache).kept) == [0, 1, 2, 4]


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    found = dataset([save(rows_of(5), tmp_path / f"data{suffix}")])
    assert [found[i] for i in range(len(found))] == [
        (
            row["prompt"],
            row["env_class"],
            {key: row[key] for key in ("data_source", "reward_spec", "extra_info")},
            str(number),
        )
        for number, row in enumerate(rows_of(5))
    ]
    assert found.collate_fn([found[1]])[0].keys() == {"prompt", "env_class", "env_extras", "uid"}
    assert found.env_classes("aime") == {"aime", "gsm8k"}


def test_long_prompts_are_left_out_and_counted(tmp_path):
    """More rows than are measured at a time, over two files; uids do not depend on the limit."""
    tokenizer = tokenizer_of("chatml")
    rows = rows_of(1500)
    paths = [save(rows[:1100], tmp_path / "a.parquet"), save(rows[1100:], tmp_path / "b.parquet")]
    lengths = [len(tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True)["input_ids"]) for r in rows]
    limit = int(np.median(lengths))
    found = dataset(paths, limit)
    short = [i for i, length in enumerate(lengths) if length <= limit]
    assert 0 < len(short) < 1500
    assert [found[i][3] for i in range(len(found))] == [str(i) for i in short]
    assert found.num_filtered == 1500 - len(short)
    assert found[len(found) - 1][0] == rows[short[-1]]["prompt"]


def test_the_generators_template_measures(tmp_path):
    path = save(rows_of(4), tmp_path / "a.jsonl")
    longer = tokenizer_of("chatml").chat_template + "{{ extra }}"
    plain = dataset([path], 40)
    assert len(plain) == 4
    with pytest.raises(DataError, match=r"none of 4 prompts has at most 40 tokens: raise trainer.max_prompt_length"):
        dataset([path], 40, template=longer, template_kwargs={"extra": "the " * 40})


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": None}, "row 3: prompt is empty"),
        ({"prompt": []}, "row 3: prompt is empty"),
        ({"prompt": [{"role": "user", "content": None}]}, "row 3: prompt holds .* no message with role and content"),
    ],
)
def test_a_row_without_a_prompt_is_named(tmp_path, row, message):
    good = save(rows_of(6), tmp_path / "good.parquet")
    rows = rows_of(5)
    rows[3] |= row
    with pytest.raises(DataError, match=f"bad.parquet, {message}"):
        dataset([good, save(rows, tmp_path / "bad.parquet")])


def test_rows_name_the_adapter_that_answers_them(tmp_path):
    def named(*names):
        rows = [row | {"adapter": name} for row, name in zip(rows_of(len(names)), names, strict=True)]
        return save(rows, tmp_path / f"{'-'.join(map(str, names))}.jsonl")

    both, plain = named("code", "math", "code"), save(rows_of(2), tmp_path / "plain.jsonl")
    found = dataset([both], adapters=("math", "code"))
    assert [found[item][2]["adapter"] for item in range(3)] == ["code", "math", "code"]
    assert found.adapters_of(["2", "1", "1"]) == ["code", "math", "math"]
    assert dataset([both])[0][2]["adapter"] == "code" and dataset([both]).adapters_of(["0"]) == []
    for path in (plain, named("math", None)):  # with one adapter there is nothing to say
        assert dataset([path], adapters=("math",)).adapters_of(["1", "0"]) == ["math", "math"]
        assert dataset([path], adapters=("math",))[1][2]["adapter"] == "math"
    for path, adapters, message in (
        (both, ("code", "poetry"), "row 1: adapter 'math' is unknown; .*adapters has code, poetry"),
        (both, ("code",), "row 1: adapter 'math' is unknown"),
        (named("math", "code", None), ("math", "code"), "row 2: no adapter is named; .*adapters has math, code"),
        (plain, ("math", "code"), "row 0: the column 'adapter' is missing"),
    ):
        with pytest.raises(DataError, match=message):
            dataset([path], adapters=adapters)


def test_files_that_do_not_serve(tmp_path):
    with pytest.raises(DataError, match=r"none.parquet: no such file"):
        dataset([str(tmp_path / "none.parquet")])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not parquet")
    with pytest.raises(DataError, match=r"broken.parquet cannot be read as parquet"):
        dataset([str(tmp_path / "broken.parquet")])
    text = [{"prompt": "What is 1 + 1?"}]
    with pytest.raises(DataError, match=r"row 0: prompt is 'What is 1 \+ 1\?', it must be a list of messages"):
        dataset([save(text, tmp_path / "text.jsonl")])
    with pytest.raises(DataError, match="row 0: no column 'prompt'; the columns are question"):
        dataset([save([{"question": "?"}], tmp_path / "column.jsonl")])
    with pytest.raises(DataError, match=r"nobody/nothing:test: HF_HUB_OFFLINE is set.* --repo-type dataset"):
        dataset(["nobody/nothing:test"])
    from skyrl_megatron.data.prompts import PromptDataset

    class Bare:
        chat_template, name_or_path = None, "bare"

    with pytest.raises(DataError, match="tokenizer 'bare' has no chat template"):
        PromptDataset([save(rows_of(1), tmp_path / "one.jsonl")], Bare(), 10)


@pytest.fixture
def in_processes(monkeypatch):
    from skyrl_megatron.data import prompts

    monkeypatch.setattr(prompts, "IN_PROCESSES_FROM", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


@pytest.mark.process
def test_all_cores_measure_what_one_measures(tmp_path, in_processes, monkeypatch):
    """Lengths, what is said, and where the parts of files end."""
    from skyrl_megatron.data import prompts

    rows, render = rows_of(2200), tokenizer_of("chatml").apply_chat_template
    limit = int(np.median([len(render(r["prompt"], add_generation_prompt=True)["input_ids"]) for r in rows[:200]]))
    for place in (7, 1900):
        rows[place]["prompt"] = [{"role": "user", "content": "1", "mood": "good"}]
    paths = [save(rows[:1300], tmp_path / "a.parquet"), save(rows[1300:], tmp_path / "b.jsonl")]
    said = []
    of_all = dataset(paths, limit, say=said.append)
    assert not any("alone" in line for line in said)
    monkeypatch.setattr(prompts, "IN_PROCESSES_FROM", 10**9)
    of_one = []
    expected = dataset(paths, limit, say=of_one.append)
    assert (of_all.kept == expected.kept).all() and 0 < len(expected) < len(rows)
    assert said == of_one and any("'mood' of messages (2 of 2200 rows)" in line for line in said)


@pytest.mark.process
def test_a_bad_row_that_another_process_reads_is_named(tmp_path, in_processes):
    rows = rows_of(5000)
    for place in (4100, 3003):
        rows[place]["prompt"] = []
    path = save(rows, tmp_path / "bad.jsonl")
    with pytest.raises(DataError) as error:
        dataset([path])
    assert str(error.value).startswith(f"{path}, row 3003: prompt is empty")


@pytest.mark.process
@pytest.mark.parametrize("fault", ["it cannot be sent", "it ends"])
def test_without_other_processes_one_measures(tmp_path, in_processes, monkeypatch, fault):
    from skyrl_megatron.data import prompts

    def refuse(self):
        raise TypeError("no pickle")

    path, said = save(rows_of(20), tmp_path / "a.jsonl"), []
    if fault == "it ends":
        monkeypatch.setattr(prompts.PromptDataset, "__reduce__", lambda self: (os._exit, (3,)), raising=False)
    else:
        monkeypatch.setattr(prompts.PromptDataset, "__reduce__", refuse, raising=False)
    assert len(dataset([path], say=said.append)) == 20
    why = {"it ends": "ended with code 3", "it cannot be sent": "cannot be sent to another process: no pickle"}[fault]
    (line,) = said
    assert line.startswith("data: prompts are tokenized by this process alone") and why in line


@pytest.mark.process
def test_a_process_that_is_killed_ends_the_others():
    from skyrl_megatron.data.row_cache import RowProcesses

    assert list(RowProcesses(abs, [-2, 1, -3]).results()) == [2, 1, 3]
    with pytest.raises(RuntimeError, match="BrokenProcessPool"):
        list(RowProcesses(os._exit, [3, 3, 3]).results())
    with pytest.raises(RuntimeError, match="TypeError"):
        list(RowProcesses(abs, ["x"]).results())


def test_lengths_of_a_file_that_is_overwritten_are_not_kept(tmp_path, monkeypatch):
    """While they are measured: its own content is not what the key says. A new file with the same name is another."""
    from skyrl_megatron.data.prompts import PromptDataset
    from skyrl_megatron.data.row_cache import RowCache

    path, cache, measured = tmp_path / "data.jsonl", RowCache(10**9, tmp_path / "cache"), PromptDataset._measured
    save(rows_of(5), path)

    def overwritten(self, first):
        path.write_text(path.read_text().replace("user", "User") + "\n")
        return measured(self, first)

    def replaced(self, first):
        (tmp_path / "new.jsonl").write_text("")
        (tmp_path / "new.jsonl").rename(path)
        return measured(self, first)

    monkeypatch.setattr(PromptDataset, "_measured", overwritten)
    with pytest.raises(DataError, match=f"^{path} has changed since the run opened it: start again"):
        dataset([str(path)], cache=cache)
    assert not list((tmp_path / "cache").glob("*/*.safetensors"))
    save(rows_of(5), path)
    monkeypatch.setattr(PromptDataset, "_measured", replaced)
    assert len(dataset([str(path)], cache=cache)) == 5 and list((tmp_path / "cache").glob("*/lengths.safetensors"))


@pytest.mark.process
def test_memory_does_not_grow_with_the_file(tmp_path):
    """30,000 prompts of 2 kB: once converted, they are measured and read in a few MB of memory."""
    code = """
import sys
import datasets
datasets.config.HF_DATASETS_CACHE = sys.argv[2]
datasets.disable_progress_bars()
from skyrl_megatron.data import prompts
from skyrl_megatron.data.prompts import PromptDataset
from skyrl_megatron.data.loader import PromptLoader
from tests.rollout.scripted import tokenizer_of
tokenizer = tokenizer_of("chatml")
tokenizer.__class__.__call__ = lambda self, texts, **_: {"input_ids": [[0]] * len(texts)}  # not what is measured
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
before = anonymous()
prompts.IN_PROCESSES_FROM = 10**9  # where the tokenizer is another one
found = PromptDataset([sys.argv[1]], tokenizer, 10)
for batch in PromptLoader(found, 64):
    pass
print(len(found), anonymous() - before)
"""
    from skyrl_megatron.data.row_files import load_source

    rows = [{"prompt": [{"role": "user", "content": f"{i} " + "x" * 2000}]} for i in range(30_000)]
    path = save(rows, tmp_path / "large.parquet")
    load_source(path, 1)  # converts it
    command = [sys.executable, "-c", code, path, str(tmp_path / "cache")]
    count, used = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(count) == 30_000 and int(used) < 20_000  # kB; the file holds 60,000


def test_loader_resumes_exactly():
    def epochs(loader, batches):
        made = []
        while len(made) < batches:
            for batch in loader:
                made.append(batch)
                if len(made) == batches:
                    break
        return made

    whole = epochs(PromptLoader(range(23), 5, seed=3), 14)
    for stop in (0, 1, 4, 5, 9):
        loader = PromptLoader(range(23), 5, seed=3)
        first = epochs(loader, stop) if stop else []
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = PromptLoader(range(23), 5, seed=3)
        resumed.load_state_dict(state)
        assert first + epochs(resumed, 14 - stop) == whole, stop
    for epoch in range(3):
        seen = {row for batch in whole[4 * epoch : 4 * epoch + 4] for row in batch}
        assert len(seen) == 20
    assert whole[:4] != whole[4:8]
    assert whole != epochs(PromptLoader(range(23), 5, seed=4), 14)


def test_loader_edges():
    from skyrl_megatron.data.samplers import InOrder

    def in_order(rows):
        return PromptLoader(range(rows), 3, sampler=InOrder(range(rows), 3, 0, None), name="in_order", drop_last=False)

    loader = in_order(7)
    assert len(loader) == 3 and list(loader) == [[0, 1, 2], [3, 4, 5], [6]]
    with pytest.raises(DataError, match=r"7 prompts do not fill one batch of 8: lower trainer.train_batch_size"):
        PromptLoader(range(7), 8)
    with pytest.raises(DataError, match="the data loader has rows=8, but rows=7 in the checkpoint"):
        in_order(8).load_state_dict(loader.state_dict())


# ------------------------------------------------------- prepared datasets
def prepare(*argv):
    from skyrl_megatron.data.prepare import main

    return main([str(arg) for arg in argv])


def read(path):
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("name, digits", [("addition", 2), ("multiply", 3)])
def test_arithmetic_is_right_distinct_and_held_out(tmp_path, name, digits):
    from skyrl_megatron.envs import make

    assert prepare(name, "--output-dir", tmp_path, "--num-digits", digits, "--train-size", 2500) == 0
    train, held_out = read(tmp_path / "train.parquet"), read(tmp_path / "validation.parquet")
    assert (len(train), len(held_out)) == (2500, 600)

    def operands(row):
        text = row["prompt"][-1]["content"].rstrip("=").replace("*", "+")
        return tuple(sorted(int(part) for part in text.split("+")))

    problems = [operands(row) for row in train + held_out]
    assert len(set(problems)) == len(problems)  # so no pair is in both, in either order
    for row in train[:50]:
        a, b = operands(row)
        answer = row["reward_spec"]["ground_truth"]
        assert int(answer) == (a + b if name == "addition" else a * b) and len(answer) >= 2
        env = make(row["env_class"], extras={**row, "max_turns": 1})
        said = answer if name == "addition" else f"It is \\boxed{{{answer}}}."
        assert env.step(said)["reward"] == 1.0 and env.step(said + "0")["reward"] == float(name == "multiply")
    assert dataset([str(tmp_path / "train.parquet")])[0][1] == name


def test_too_many_problems_are_refused(tmp_path, capsys):
    assert prepare("addition", "--output-dir", tmp_path, "--num-digits", 1) == 1
    assert "there are only 45 pairs of numbers with 1 digits, not 3600" in capsys.readouterr().err
    assert prepare("addition", "--output-dir", tmp_path, "--num-digits", 1, "--train-size", 30, "--test-size", 15) == 0
    assert len(read(tmp_path / "train.parquet")) == 30


def test_gsm8k_from_its_files(tmp_path):
    records = [{"question": f"{i} + 1000?", "answer": f"It is {i + 1000}.\n#### 1,00{i}"} for i in range(3)]
    for split in ("train", "test"):
        save(records, tmp_path / f"{split}.jsonl")
    folder = tmp_path / "out"
    assert prepare("gsm8k_multi_turn", "--source", tmp_path, "--output-dir", folder, "--max-turns", 3) == 0
    row = read(folder / "validation.parquet")[1]
    assert row["reward_spec"]["ground_truth"] == "1001" and row["env_class"] == "gsm8k_multi_turn"
    assert row["extra_info"]["max_turns"] == 3 and row["prompt"][0]["content"].startswith("1 + 1000?")
    assert prepare("gsm8k", "--source", tmp_path / "nowhere", "--output-dir", folder) == 1
