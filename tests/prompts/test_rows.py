"""Rows reach the reward as they are written, and what cannot be kept is an error with file and row."""

import json

import pytest

from skyrl_megatron.errors import DataError, SkyRLMegatronWarning
from tests.prompts.test_prompts import cache, dataset, rows_of, save  # noqa: F401

MESSAGES = [{"role": "user", "content": "?"}]
TRICKY = [
    {"answer": 3, "day": "2024-01-01", "list": ["2024-01-01T00:00:00Z", 1, None], "deep": {"a": {"b": [1, 2.5]}}},
    {"answer": 2.5, "day": "12:00", "only_here": True, "deep": {"a": []}, "text": "\u2028 \U0001f600 \x85"},
    {"answer": 3**60, "day": 7, "list": "none", "deep": None, "zero": -0.0, "tiny": 5e-324},
    {"answer": -(2**64), "day": None, "list": {}, "deep": "1e5", "messages": [{"content": "2024-01-01"}]},
]


def exact(value):
    """Values with their types: 3 is not 3.0, nor True 1."""
    return repr(value)


def extras_of(path):
    found = dataset([path])
    return [found[number][2] for number in range(len(found))]


LARGE = [pytest.mark.slow, pytest.mark.process]  # all cores read the rows of large files


@pytest.mark.parametrize(
    "filler",
    [
        pytest.param(0, id="small"),
        pytest.param(40_000, id="larger than a block", marks=LARGE),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_values_are_as_written_whatever_the_size(tmp_path, suffix, filler):
    rows = [row | {"prompt": MESSAGES} for row in [*TRICKY, *({"filler": "x" * 50} for _ in range(filler)), *TRICKY]]
    found = extras_of(save(rows, tmp_path / f"data{suffix}"))
    assert len(found) == len(rows)
    for row in (*range(4), *range(-4, 0)):
        assert exact(found[row]) == exact({key: value for key, value in rows[row].items() if key != "prompt"})


@pytest.mark.parametrize(
    "text",
    [
        '[{"prompt": [ROW]} , {"prompt": [ROW]}]',
        '\ufeff \n[\n{"prompt": [ROW]},\n\n{"prompt": [ROW]}\n]\n',
        '\ufeff{"prompt": [ROW]}\r\n\r\n  {"prompt": [ROW]}',
    ],
)
def test_spellings_of_a_file(tmp_path, text):
    path = tmp_path / "data.json"
    path.write_bytes(text.replace("ROW", json.dumps(MESSAGES[0])).encode())
    assert [prompt for prompt, *_ in (dataset([str(path)])[n] for n in range(2))] == [MESSAGES, MESSAGES]


def test_files_of_other_columns_and_types_go_together(tmp_path):
    """A row has the columns of its own source: what was written into one file does not reach the rows of another."""
    paths = [
        save([{"prompt": MESSAGES, "answer": 3}], tmp_path / "a.jsonl"),
        save([{"prompt": MESSAGES, "answer": "2024-01-01"}], tmp_path / "b.jsonl"),
        save([{"prompt": MESSAGES, "answer": 2.5, "more": 1}], tmp_path / "c.parquet"),
    ]
    found = dataset(paths)
    assert [found[n][2] for n in range(3)] == [{"answer": 3}, {"answer": "2024-01-01"}, {"answer": 2.5, "more": 1}]


def test_a_folder_of_json_is_read_the_same_way(tmp_path):
    (tmp_path / "data").mkdir()
    rows = [{"prompt": MESSAGES, "day": "2024-01-01", "n": n} for n in (1, 2.5, 3**60)]
    save(rows, tmp_path / "data" / "train.jsonl")
    assert [extras["n"] for extras in extras_of(str(tmp_path / "data"))] == [1, 2.5, 3**60]
    assert extras_of(f"{tmp_path / 'data'}:train[1:]") == [
        {"day": "2024-01-01", "n": 2.5},
        {"day": "2024-01-01", "n": 3**60},
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize(
    "row, message",
    [
        (b'{"answer": "caf\xe9"}', "is not UTF-8"),
        (b'{"answer": }', "cannot be read as json: Expecting value"),
        (b'{"answer": 1e999}', "the number 1e999 exceeds the range of a float"),
        (b'{"answer": ' + b"9" * 5000 + b"}", "cannot be read as json: Exceeds the limit"),
        (b'{"answer": 1, "answer": 2}', "'answer' occurs twice"),
        (b'{"answer": "\\ud800"}', "half of a surrogate pair"),
        (b'{"answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "it is nested too deeply"),
        (b"null", "it is None, but must be an object with a prompt"),
        (b"[1]", r"it is \[1\], but must be an object"),
        (b'"\xff\xfe"', "is not UTF-8"),
    ],
)
def test_a_row_that_cannot_be_kept_is_named_wherever_it_is(tmp_path, suffix, row, message):
    good = json.dumps({"prompt": MESSAGES}).encode()
    lines = [good] * 1500 + [row, good]
    path = tmp_path / f"data{suffix}"
    path.write_bytes(b"\n".join(lines) if suffix == ".jsonl" else b"[" + b",".join(lines) + b"]")
    with pytest.raises(DataError, match=f"data{suffix}, row 1500: .*{message}"):
        dataset([str(path)])


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no rows"),
        (" \n \n", "has no rows"),
        ("[]", "has no rows"),
        ('[{"a": 1}', "row 1: the file ends within the array"),
        ('[{"a": 1} {"a": 2}]', "row 1: there is no comma before it"),
        ('[{"a": 1},]', "row 1: cannot be read as json"),
        ('[{"a": 1}] {"a": 2}', "text follows the array"),
        ('{\n"a": 1\n}', "row 0: cannot be read as json"),
    ],
)
def test_broken_files(tmp_path, text, message):
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(DataError, match=message):
        dataset([str(tmp_path / "data.json")])


def test_text_of_parquet_that_is_not_utf8_is_named(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = pa.array([MESSAGES] * 1200)
    texts = pa.array([b"fine"] * 1100 + [b"caf\xe9"] + [b"fine"] * 99).view(pa.string())
    pq.write_table(pa.table({"prompt": prompts, "answer": texts}), tmp_path / "data.parquet")
    found = dataset([str(tmp_path / "data.parquet")])
    for read in (lambda: found[1100], lambda: list(found.rows)):
        with pytest.raises(DataError, match=r"data.parquet, row 1100: text that is not UTF-8"):
            read()


def test_a_file_that_changes_under_a_run(tmp_path):
    path = save(rows_of(3), tmp_path / "data.jsonl")
    found = dataset([path])
    with open(path, "r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match=r"row 2: .*; the file has changed since the run opened it"):
        found[2]


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_message_that_calls_a_tool_needs_no_content(tmp_path, suffix):
    """As OpenAI writes it; the template gets ``content: null``, which templates look for."""
    prompt = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    path = save([{"prompt": prompt}], tmp_path / f"data{suffix}")
    template = "{% for m in messages %}{{ m.role }}{{ 'calls' if m.content is none else m.content }}{% endfor %}"
    found = dataset([path], template=template)
    assert found[0][0] == prompt
    with pytest.raises(DataError, match=r"row 0: the chat template cannot render prompt: .*concatenate str"):
        dataset([path], template="{% for m in messages %}{{ m.role + m.content }}{% endfor %}")


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": [{"role": {}, "content": "?"}]}, r"holds a message whose role is \{\}, it must be text"),
        ({"prompt": [{"role": [1], "content": "?"}]}, r"holds a message whose role is \[1\], it must be text"),
        ({"prompt": [{"role": "user", "content": 0}]}, "holds a message whose content is 0, it must be text"),
        ({"prompt": [{"role": "user", "content": ["?"]}]}, r"whose content is \['\?'\], it must be text"),
        ({"prompt": [{"role": "user", "content": None, "tool_calls": []}]}, "no message with role and content"),
        ({"reward_spec": "15"}, "reward_spec is '15', it must be an object"),
        ({"env_class": ["gsm8k"]}, r"env_class is \['gsm8k'\], it must be the id of an environment"),
    ],
)
def test_a_row_of_another_form_is_named(tmp_path, row, message):
    rows = rows_of(4)
    rows[2] |= row
    with pytest.raises(DataError, match=f"data.jsonl, row 2: .*{message}"):
        dataset([save(rows, tmp_path / "data.jsonl")])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_other_contents_after_a_resume_are_told(tmp_path, suffix, recwarn):
    from skyrl_megatron.data.loader import PromptLoader

    paths = [save(rows_of(6), tmp_path / f"{name}{suffix}") for name in ("same", "other")]
    saved = json.loads(json.dumps(PromptLoader(dataset(paths), 3).state_dict()))
    PromptLoader(dataset(paths), 3).load_state_dict(saved)
    save(rows_of(6, lambda i: 6 - i), tmp_path / f"other{suffix}")
    without = {key: value for key, value in saved.items() if key != "files"}
    PromptLoader(dataset(paths), 3).load_state_dict(without)  # a checkpoint from before
    assert not [each for each in recwarn if each.category is SkyRLMegatronWarning]
    with pytest.warns(SkyRLMegatronWarning, match=rf"^other{suffix} changed since the checkpoint was saved"):
        PromptLoader(dataset(paths), 3).load_state_dict(saved)
    save(rows_of(6), tmp_path / f"other{suffix}")
    with pytest.warns(SkyRLMegatronWarning, match="the order of the data files changed"):
        PromptLoader(dataset(paths[::-1]), 3).load_state_dict(saved)
