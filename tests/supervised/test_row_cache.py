"""The cache of tokens: rows are those without it, whatever happens to its files and to the processes that make
them."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime

import pytest

from tests.supervised.both_ways import items_of

USER, ANSWER = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}
LONG = {"role": "assistant", "content": "2" * 70}
MANY = 2500
"""Rows of three shards, which other processes make."""
SCRIPT = """
import sys
from pathlib import Path
from skyrl_megatron.config.schema.supervised import SFTConfig
from skyrl_megatron.data.row_cache import RowCache
from skyrl_megatron.data.tokenizer import load_tokenizer
from skyrl_megatron.rollout.templates import ChatFormat
from skyrl_megatron_supervised.chat_rows import ChatRows
from skyrl_megatron_supervised.row_tokens import cached_rows

folder, model = Path(sys.argv[1]), sys.argv[2]
say = lambda line: print(line, flush=True)
cache = RowCache(10**9, folder / "cache")
chat, names = ChatFormat(load_tokenizer(model)), [str(folder / "rows.jsonl")]
rows = cached_rows(ChatRows, names, chat, SFTConfig(), cache=cache, say=say)
rows.tokens.wait()
say("complete")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from skyrl_megatron.tiny_model import write_embedded_model

    return write_embedded_model(tmp_path_factory.mktemp("model") / "model")


def chat_of(model, template=None, **kwargs):
    from skyrl_megatron.data.tokenizer import load_tokenizer
    from skyrl_megatron.rollout.templates import ChatFormat

    return ChatFormat(load_tokenizer(model), template, kwargs)


def talks(count):
    draw = random.Random(0)
    answers = ({"role": "assistant", "content": str(draw.randint(0, 10**9))} for _ in range(count))
    return [{"messages": [{"role": "user", "content": f"{n}+1=?"}, answer]} for n, answer in enumerate(answers)]


def write(folder, lines):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read(folder, model, chat=None, *, most=10**9, kind=None, say=None, name="cache", **settings):
    """The rows of ``rows.jsonl``, with the cache in a folder there."""
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.data.row_cache import RowCache
    from skyrl_megatron_supervised.chat_rows import ChatRows
    from skyrl_megatron_supervised.row_tokens import cached_rows

    chosen = SFTConfig(max_length=64, **settings)
    cache, say = RowCache(most, folder / name), say or (lambda line: None)
    names = [str(folder / "rows.jsonl")]
    return cached_rows(kind or ChatRows, names, chat or chat_of(model), chosen, cache=cache, say=say)


def plain(folder, model, **settings):
    """The same rows without a cache."""
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron_supervised.chat_rows import ChatRows

    return ChatRows([str(folder / "rows.jsonl")], chat_of(model), SFTConfig(max_length=64, **settings))


def shards(folder, name="cache"):
    """The files of tokens."""
    return sorted(path for path in (folder / name).glob("*/*.safetensors") if path.stem.isdigit())


def keys(folder):
    return {path.name for path in (folder / "cache").iterdir() if path.is_dir()}


# ------------------------------------------------------------------ what is in it
def test_a_batch_of_rows_has_the_tokens_of_each_row(tmp_path):
    """Of every family: with and without thinking, calls and several turns."""
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.chat_rows import ChatRows
    from skyrl_megatron_supervised.trained_answers import trained_sequences
    from tests.support.chat_families import FAMILIES, family_tokenizer

    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "f:0", "type": "function", "function": {}}]}
    call["tool_calls"][0]["function"] = {"name": "f", "arguments": {"a": 1}}
    result = {"role": "tool", "tool_call_id": "f:0", "content": "it's 3\n\n  or ſo"}
    texts = ["2", "I'LL say:\n\n   two  ", "é 汉 🙂", "x" * 200]
    rows = [[USER, {"role": "assistant", "content": text}] for text in texts]
    rows += [[*row, USER, ANSWER] for row in rows] + [[USER, call, result, ANSWER]]
    write(tmp_path, [{"messages": row} for row in rows])
    compared = 0
    for name, family in FAMILIES.items():
        chat = ChatFormat(family_tokenizer(name), family.template)
        made = ChatRows.to_make([str(tmp_path / "rows.jsonl")], chat, SFTConfig(thinking="drop"))
        for row, batched in zip(rows, made.make(range(len(rows)), list(made.rows)), strict=True):
            if not batched.kind:
                assert batched.groups == [trained_sequences(chat, made.form.fitted(row))], (name, row)
                compared += 1
    assert compared > 5 * len(FAMILIES)


@pytest.mark.parametrize("pattern", range(4))
def test_words_have_the_tokens_of_their_text(pattern):
    """Random texts, by words and by the tokenizer; also where an answer may begin or end."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from skyrl_megatron_supervised.word_memo import PATTERNS, WordMemo

    inner = Tokenizer(models.BPE())
    cutter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cut = pre_tokenizers.Split(Regex(sorted(PATTERNS)[pattern - 1]), "isolated")
        cutter = pre_tokenizers.Sequence([cut, whole])
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = cutter
    special = ["<|end|>", "<|end", "<|start|>"]
    draw = random.Random(pattern)
    pieces = [
        *special,
        *"abAB019'_-.,\t\n\r {}\"\\|<>",
        "'ll",
        "'RE",
        "  ",
        "\n\n",
        "the",
        " answer",
        "é",
        "汉",
        "\x1c",
    ]
    texts = ["".join(draw.choices(pieces, k=draw.randint(0, 40))) for _ in range(600)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<|end|>")
    memo = WordMemo.of(tokenizer)
    for _ in range(2):  # of new words, and of those that are remembered
        for text, words in zip(texts, memo.encodings(texts), strict=True):
            expected = inner.encode(text, add_special_tokens=False)
            assert words.ids == expected.ids, text
            assert [words.char_to_token(place) for place in range(len(text))] == [
                expected.char_to_token(place) for place in range(len(text))
            ], text
    assert len(memo._memo) > 100
    for change in ({"padding": True}, {"truncation": True, "max_length": 3}):  # settings of another call
        tokenizer(texts[:9], **change)
        assert memo.encodings(texts[:9]) == [None] * 9
        tokenizer(texts[:1])
    inner = tokenizer.backend_tokenizer
    inner.encode_special_tokens = True
    assert memo.encodings(texts[:9]) == [None] * 9


def test_tokenizers_whose_words_depend_on_others_are_asked_for_each_text(model):
    from transformers import AddedToken

    from skyrl_megatron_supervised.word_memo import WordMemo
    from tests.support.chat_families import FAMILIES, family_tokenizer

    spaces = next(name for name, family in FAMILIES.items() if family.spaces)
    assert WordMemo.of(family_tokenizer(spaces)) is None
    tokenizer = chat_of(model).tokenizer
    tokenizer.add_tokens([AddedToken("<x>", lstrip=True)])
    assert WordMemo.of(tokenizer) is None


# ------------------------------------------------------------------ long rows
def test_a_long_row_is_an_error_or_left_out_or_cut(tmp_path, model):
    """With and without a cache: the same rows; a cut answer has no end token, which is said and counted."""
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_supervised.chat_rows import ChatRows
    from tests.supervised.both_ways import rows_both_ways

    turns = [USER, ANSWER, {"role": "user", "content": "3" * 70}, ANSWER]
    write(tmp_path, [{"messages": [USER, ANSWER]}, {"messages": [USER, LONG]}, {"messages": turns}])
    names, chat = [str(tmp_path / "rows.jsonl")], chat_of(model)
    said = []

    def rows(**settings):
        said.clear()
        return rows_both_ways(ChatRows, names, chat, SFTConfig(max_length=64, **settings), said.append)

    for settings in ({}, {"long_rows": "error"}, {"long_rows": "error", "invalid_rows": "skip"}):
        with pytest.raises(
            DataError, match=r"row 1: longer than sft\.max_length=64 \(\d+ tokens\): .*long_rows=truncate"
        ):
            rows(**settings)
    for settings in ({"long_rows": "skip"}, {"invalid_rows": "skip"}):
        assert [item["uid"] for item in items_of(rows(**settings))] == ["0"]
        assert said == ["data: skipped 2 of 3 rows: longer than sft.max_length=64"]
    first, second, third = (item["sequences"][0] for item in items_of(rows(long_rows="truncate")))
    assert [len(prompt) + len(response) for prompt, response, _ in (second, third)] == [64, 64]
    whole = ChatRows(names, chat, SFTConfig(max_length=999))[1]["sequences"][0]
    assert second[0] == whole[0] and second[1] == whole[1][: len(second[1])] and set(second[2]) == {1}
    assert chat.end_token not in second[1] and first[1][-1] == chat.end_token == third[1][third[2].index(0) - 1]
    assert said == [
        "data: sft.long_rows=truncate cuts rows at 64 tokens (2 of 3 rows)",
        "data: sft.long_rows=truncate cuts within an answer, which is trained without its end (1 of 3 rows)",
    ]


def test_a_cut_row_without_an_answer_is_no_row(tmp_path, model):
    from skyrl_megatron.errors import DataError

    asked = {"role": "user", "content": "3" * 70}
    write(tmp_path, [{"messages": [USER, ANSWER]}, {"messages": [asked, ANSWER]}])
    with pytest.raises(DataError, match=r"row 1: no trained token within sft\.max_length=64"):
        read(tmp_path, model, long_rows="truncate")
    assert len(read(tmp_path, model, long_rows="truncate", invalid_rows="skip")) == 1


# ------------------------------------------------------------------ who reads it
def test_a_resume_tokenizes_nothing(tmp_path, model):
    from skyrl_megatron_supervised.chat_rows import ChatRows

    class Reader(ChatRows):
        def make(self, numbers, rows):
            raise AssertionError(f"rows {numbers} are tokenized")

        def shape_of(self, number, row):
            raise AssertionError(f"row {number} is read")

    Reader.__name__ = "ChatRows"
    write(tmp_path, talks(40))
    first = items_of(read(tmp_path, model))
    assert items_of(read(tmp_path, model, kind=Reader)) == first == items_of(plain(tmp_path, model))


def test_limits_of_a_run_need_no_other_tokens(tmp_path, model):
    write(tmp_path, [*talks(20), {"messages": [USER, LONG]}])
    skipping = read(tmp_path, model, invalid_rows="skip")
    (file,) = shards(tmp_path)
    before = file.stat().st_mtime_ns
    cutting = read(tmp_path, model, long_rows="truncate")
    assert (
        (len(skipping), len(cutting)) == (20, 21) and shards(tmp_path) == [file] and file.stat().st_mtime_ns == before
    )


def test_what_changes_a_row_is_in_the_key(tmp_path, model):
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}<|end|>{% endfor %}"
    write(tmp_path, talks(4))
    read(tmp_path, model)
    assert len(keys(tmp_path)) == 1
    other = chat_of(model)
    other.tokenizer.add_tokens(["+1"])
    begins = chat_of(model)  # the same tokens, another one that a template writes as bos_token
    begins.tokenizer.bos_token = "<|user|>"
    for number, (chat, settings) in enumerate(
        (
            (chat_of(model, template), {}),
            (other, {}),
            (begins, {}),
            (chat_of(model, None, unknown=1), {}),
            (None, {"turns": "last"}),
            (None, {"strict_rows": True}),
        ),
        2,
    ):
        read(tmp_path, model, chat, **settings)
        assert len(keys(tmp_path)) == number
    write(tmp_path, talks(5))
    read(tmp_path, model)
    assert len(keys(tmp_path)) == number + 1


# ------------------------------------------------------------------ damage and size
@pytest.mark.parametrize("damage", ["cut", "another byte", "removed", "no such file", "the index"])
def test_a_damaged_file_is_made_again(tmp_path, model, damage):
    from safetensors.numpy import load

    write(tmp_path, talks(40))
    expected = items_of(read(tmp_path, model))
    (file,) = shards(tmp_path)
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "another byte":
        file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "no such file":
        file.write_bytes(b"what is this?")
    elif damage == "removed":
        file.unlink()
    else:
        file.with_stem("index").write_bytes(b"")
    rows = read(tmp_path, model)
    assert items_of(rows) == expected
    rows.tokens.wait()
    again = load(file.read_bytes())
    assert all((again[name] == array).all() for name, array in load(content).items())


def test_entries_that_were_not_used_for_longest_are_removed(tmp_path):
    import numpy as np

    from skyrl_megatron.data.row_cache import RowCache

    cache = RowCache(10_000, tmp_path)
    entries = {}
    for number, key in enumerate("abc"):
        entries[key] = cache.entry(key)
        assert entries[key].write("x", {"x": np.zeros(3000, np.uint8)})
        os.utime(tmp_path / f"{key}.use", (number, number))
    for key in "ab":
        entries[key].close()
    os.utime(tmp_path / "a.use", (9, 9))
    assert cache.make_room(3000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.use", "c", "c.use"]
    assert not cache.make_room(8000)  # c is in use
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c.use"]
    assert cache.entry("a").read("x") is None


def test_rows_without_room_are_tokenized_when_they_are_drawn(tmp_path, model):
    write(tmp_path, [*talks(40), {"messages": [USER, LONG]}])
    rows = read(tmp_path, model, most=1000, invalid_rows="skip")
    assert items_of(rows) == items_of(plain(tmp_path, model, invalid_rows="skip")) and len(rows) == 40
    assert rows.tokens.is_complete and rows.tokens.made(0) is None
    again = read(tmp_path, model, most=1000, invalid_rows="skip")
    assert len(again) == 40 and sum(path.stat().st_size for path in shards(tmp_path)) < 3000


def test_shards_without_tokens_get_them_when_there_is_room(tmp_path, model):
    write(tmp_path, talks(40))
    read(tmp_path, model, most=1000).tokens.close()
    rows = read(tmp_path, model)
    assert rows[0] == plain(tmp_path, model)[0]  # also while they are made
    rows.tokens.wait()
    assert rows.tokens.made(0) is not None and items_of(rows) == items_of(plain(tmp_path, model))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*/*.safetensors")}
    again = read(tmp_path, model)
    again.tokens.wait()
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_shard_is_hashed_once_and_when_it_has_changed(tmp_path, model, monkeypatch):
    """However often it is opened: a run keeps some shards open only."""
    from skyrl_megatron.data.row_cache import ArrayFile
    from skyrl_megatron_supervised import row_shards, row_tokens

    monkeypatch.setattr(row_tokens, "SHARD_ROWS", 10)
    monkeypatch.setattr(row_shards, "SHARD_ROWS", 10)
    monkeypatch.setattr(row_tokens, "OPEN_SHARDS", 2)
    hashed, is_whole = [], ArrayFile.is_whole
    write(tmp_path, talks(40))
    read(tmp_path, model).tokens.close()
    monkeypatch.setattr(ArrayFile, "is_whole", property(lambda file: hashed.append(file.path) or is_whole.fget(file)))
    rows, expected = read(tmp_path, model), items_of(plain(tmp_path, model))
    for _ in range(3):
        assert items_of(rows) == expected
    files = shards(tmp_path)
    assert len(files) == 4 and sorted(path for path in hashed if path in files) == files
    content = bytearray(files[0].read_bytes())
    content[-5] ^= 1
    files[0].write_bytes(content)
    assert items_of(rows) == expected
    rows.tokens.wait()
    assert files[0].read_bytes() != content and items_of(rows) == expected


def test_two_threads_that_make_rows_keep_their_notes_apart(tmp_path, model):
    """The one of the run and the one that completes the cache."""
    noted = {"messages": [USER | {"mood": "good"}, ANSWER]}
    path = write(tmp_path, [noted, {"messages": [USER, ANSWER]}])
    rows = plain(tmp_path, model)
    fitted, others = rows.form.fitted, []

    def interrupted(messages, said):
        result = fitted(messages, said)
        if not others:
            others.append(None)
            other = threading.Thread(target=lambda: others.append(rows.make_one(1, rows.rows[1])))
            other.start()
            other.join()
        return result

    rows.form.fitted = interrupted
    assert rows.make_one(0, rows.rows[0]).notes == ["nothing reads the key 'mood' of messages"], path
    assert others[1].notes == []


# ------------------------------------------------------------------ time
DATED = (
    "{% for m in messages %}{% if loop.first %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.process
def test_rows_with_the_day_are_those_of_the_day_of_the_run(tmp_path, model, monkeypatch):
    """Also those that other processes make; each day has an entry of its own."""
    from skyrl_megatron.data import tokenizer

    write(tmp_path, talks(1100))
    of_days = []
    for number, day in enumerate((7, 8, 8), 1):
        monkeypatch.setattr(tokenizer, "_time_of_run", datetime(2001, 2, day))
        rows = read(tmp_path, model, chat_of(model, DATED))
        rows.tokens.wait()
        items = items_of(rows)
        assert [item["sequences"] for item in items[::90]] == [
            rows.make_one(n, rows.rows[n]).groups[0] for n in range(0, 1100, 90)
        ]
        of_days.append(items)
        assert len(keys(tmp_path)) == min(number, 2)
        rows.tokens.close()
    assert of_days[0][0] != of_days[1][0] and of_days[1] == of_days[2]


def test_what_of_a_template_changes_with_the_time(monkeypatch):
    from skyrl_megatron.data import tokenizer

    monkeypatch.setattr(tokenizer, "_time_of_run", datetime(2001, 2, 3, 4, 5))
    whole = "2001-02-03T04:05:00"
    for template, expected in (
        ("strftime_now {# strftime_now('%Y') #} {{ 'strftime_now' }}", []),
        ("{% if strftime_now is defined %}{% set day = strftime_now('%d %b') %}{% endif %}{{ day }}", ["03 Feb"]),
        ("{{ strftime_now('%d') ~ strftime_now('%H:%M') }}", ["03", "04:05"]),
        ("{{ strftime_now(format) }}", [whole]),
        ("{% set now = strftime_now %}{{ now('%d') }}", [whole]),
        ("{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}", ["2001"]),
        ("{% if %}", []),
    ):
        assert tokenizer.times_in(template) == expected, template


def test_a_folder_that_cannot_be_written_is_said(tmp_path, model):
    (tmp_path / "cache").write_text("a file")
    write(tmp_path, talks(3))
    said = []
    assert items_of(read(tmp_path, model, say=said.append)) == items_of(plain(tmp_path, model))
    assert len(said) == 1 and "not cached" in said[0] and "SKYRL_MEGATRON_HOME" in said[0]


# ------------------------------------------------------------------ other processes
@pytest.fixture(scope="module")
def many(tmp_path_factory, model):
    """A folder with many rows, and their items."""
    folder = tmp_path_factory.mktemp("many")
    write(folder, talks(MANY))
    return folder, items_of(plain(folder, model))


@pytest.mark.process
def test_rows_are_there_before_their_shard_and_after(many, model):
    folder, expected = many
    said = []
    rows = read(folder, model, say=said.append, name="first")
    assert len(rows) == MANY
    early = [rows[place] for place in range(0, MANY, 97)]
    rows.tokens.wait()
    assert rows.tokens.is_complete and early == expected[::97] and items_of(rows) == expected
    assert len(shards(folder, "first")) == 3 and any("processes tokenize 3 shards" in line for line in said)
    rows.tokens.close()


@pytest.mark.process
@pytest.mark.parametrize("place", ["in the middle", "at the end"])
def test_a_bad_row_ends_the_run_when_its_shard_is_made(tmp_path, model, place):
    from skyrl_megatron.errors import DataError

    lines, number = talks(1500), {"in the middle": 700, "at the end": 1499}[place]
    lines[number] = {"messages": [USER, LONG]}
    path = write(tmp_path, lines)
    rows = read(tmp_path, model)
    with pytest.raises(DataError) as error:
        rows.tokens.wait()
    assert str(error.value).startswith(f"{path}, row {number}: longer than sft.max_length=64")
    with pytest.raises(DataError):
        rows[0]
    rows.tokens.close()
    assert len(read(tmp_path, model, invalid_rows="skip")) == 1499


def test_a_row_of_the_wrong_form_is_an_error_before_the_start(tmp_path, model):
    from skyrl_megatron.errors import DataError

    path = write(tmp_path, [*talks(1500), {"messages": [USER]}])
    with pytest.raises(DataError) as error:
        read(tmp_path, model)
    assert str(error.value).startswith(f"{path}, row 1500: no message of the assistant")


def opened(folder, model):
    """The cached rows of ``rows.jsonl`` before any is made."""
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.data.row_cache import RowCache
    from skyrl_megatron_supervised.chat_rows import ChatRows
    from skyrl_megatron_supervised.row_tokens import RowTokens

    rows = ChatRows.to_make([str(folder / "rows.jsonl")], chat_of(model), SFTConfig(max_length=64))
    return RowTokens(rows, RowCache(10**9, folder / "cache"), lambda line: None)


@pytest.mark.process
def test_rows_of_a_file_that_was_replaced_are_those_of_the_open_one(many, tmp_path, model):
    write(tmp_path, talks(MANY))
    tokens = opened(tmp_path, model)
    (tmp_path / "rows.jsonl").rename(tmp_path / "before.jsonl")
    write(tmp_path, talks(MANY)[::-1])
    tokens.rows.kept, tokens.rows.tokens = tokens.kept_rows(), tokens
    tokens.wait()
    assert tokens.is_complete
    assert [item["sequences"] for item in items_of(tokens.rows)] == [item["sequences"] for item in many[1]]
    tokens.close()
    assert read(tmp_path, model, name="new")[0]["sequences"] == many[1][-1]["sequences"]


@pytest.mark.process
def test_a_file_that_is_overwritten_while_rows_are_made_ends_the_run(tmp_path, model):
    """Its rows still have the same places and the right form."""
    from skyrl_megatron.errors import DataError

    path = write(tmp_path, talks(MANY))
    tokens = opened(tmp_path, model)
    assert tokens.check(1) == 1
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text.replace("+1=?", "+2=?"))
    tokens.make_meanwhile()
    with pytest.raises(DataError, match=f"^{path} has changed since the run opened it: start again; [^\n]*rename it$"):
        tokens.wait()
    assert shards(tmp_path) == []
    tokens.close()


@pytest.mark.process
def test_rows_of_parquet_are_those_of_its_content_when_it_was_opened(many, tmp_path, model, monkeypatch):
    """An Arrow table does not change with its file, which must be the one that is hashed."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.data.row_cache import RowCache
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_supervised.chat_rows import ChatRows
    from skyrl_megatron_supervised.row_tokens import RowTokens

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "tables"))
    path, cache = str(tmp_path / "rows.parquet"), RowCache(10**9, tmp_path / "cache")
    pq.write_table(pa.Table.from_pylist(talks(MANY)), path)
    rows = ChatRows.to_make([path], chat_of(model), SFTConfig(max_length=64))
    tokens = RowTokens(rows, cache, lambda line: None)
    pq.write_table(pa.Table.from_pylist(talks(MANY)[::-1]), path)
    rows.kept, rows.tokens = tokens.kept_rows(), tokens
    tokens.wait()
    assert tokens.is_complete
    assert [item["sequences"] for item in items_of(rows)] == [item["sequences"] for item in many[1]]
    tokens.close()
    rows = ChatRows.to_make([path], chat_of(model), SFTConfig(max_length=64))
    pq.write_table(pa.Table.from_pylist(talks(MANY)), path)
    with pytest.raises(DataError, match=f"^{path} has changed since the run opened it"):
        RowTokens(rows, cache, lambda line: None)


def started(folder, model):
    command = [sys.executable, "-c", SCRIPT, str(folder), str(model)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.process
def test_two_runs_at_once_make_each_shard_once(tmp_path, model):
    write(tmp_path, talks(MANY))
    outputs = [process.communicate(timeout=300)[0] for process in (started(tmp_path, model), started(tmp_path, model))]
    assert all(output.splitlines()[-1] == "complete" for output in outputs)
    assert sum(output.count("tokenize 3 shards") for output in outputs) == 1
    assert items_of(read(tmp_path, model)) == items_of(plain(tmp_path, model))


@pytest.mark.process
def test_kill_9_leaves_whole_shards_that_the_next_run_keeps(tmp_path, model):
    from tests.support.processes import given_the_folder, left_behind

    write(tmp_path, talks(12_000))
    process = started(tmp_path, model)
    deadline = time.monotonic() + 300
    while len(shards(tmp_path)) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert left_behind(given_the_folder(tmp_path), within_s=30) == []
    before = {path: path.stat().st_mtime_ns for path in shards(tmp_path)}
    assert 2 <= len(before) < 12
    output, _ = started(tmp_path, model).communicate(timeout=300)
    assert output.splitlines()[-1] == "complete" and f"tokenize {12 - len(before)} shards" in output
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(tmp_path.glob("cache/*/.0*"))
    rows, expected = read(tmp_path, model), plain(tmp_path, model)
    assert all(rows[place] == expected[place] for place in range(0, 12_000, 101))
