"""Rows of preferences: their forms, their tokens, and what is wrong with them."""

import json

import pytest

from tests.rollout.test_chat_rows import IMAGE, tokenizer  # noqa: F401

USER, AGAIN = {"role": "user", "content": "1+1=?"}, {"role": "user", "content": "and 2?"}
RIGHT, WRONG = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
PAIR = {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}
LABELLED = {"prompt": [USER], "completion": [RIGHT], "label": True}


def read(folder, tokenizer, lines, loss="sigmoid", **settings):  # noqa: F811
    from skyrl_megatron.config.schema.generator import DPOConfig
    from skyrl_megatron.rollout.preference_rows import rows_class
    from skyrl_megatron.rollout.templates import ChatFormat

    path, said = folder / "rows.jsonl", []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = DPOConfig(loss=loss, max_length=64, **settings)
    return rows_class(made)([str(path)], ChatFormat(tokenizer), made, say=said.append), said


def texts(tokenizer, item):  # noqa: F811
    """(side, prompt, trained text) of each sequence."""
    found = []
    for (prompt, response, mask), side in zip(item["sequences"], item["sides"], strict=True):
        trained = [token for token, one in zip(response, mask, strict=True) if one]
        found.append((side, tokenizer.decode(prompt), tokenizer.decode(trained)))
    return found


def test_a_prompt_may_be_a_column_or_what_both_conversations_begin_with(tokenizer, tmp_path):  # noqa: F811
    whole = {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}
    rows, _ = read(tmp_path, tokenizer, [PAIR, whole, whole | {"prompt": "1+1=?"}])
    items = [texts(tokenizer, rows[place]) for place in range(3)]
    assert items[0] == items[1] == items[2]
    (side, prompt, better), (other_side, same_prompt, worse) = items[0]
    assert (side, other_side) == (1, -1) and prompt == same_prompt and "1+1=?" in prompt
    assert better.startswith("2") and worse.startswith("3")


def test_only_the_answers_are_trained_and_not_those_of_the_prompt(tokenizer, tmp_path):  # noqa: F811
    begin = [USER, WRONG, AGAIN]
    rows, _ = read(tmp_path, tokenizer, [{"chosen": [*begin, RIGHT], "rejected": [*begin, WRONG]}])
    better, worse = texts(tokenizer, rows[0])
    assert better[2].startswith("2") and worse[2].startswith("3") and worse[2].count("3") == 1


def test_an_answer_of_another_row_belongs_to_kto(tokenizer, tmp_path):  # noqa: F811
    """The answer of the row before, of the last row for the first one, is cut at max_length."""
    long = {"prompt": [AGAIN], "completion": [{"role": "assistant", "content": "4" * 30}], "label": False}
    far = {"prompt": [{"role": "user", "content": "x" * 40}], "completion": [WRONG], "label": True}
    rows, _ = read(tmp_path, tokenizer, [LABELLED, long, far], "kto")
    assert [rows[place]["sides"] for place in range(3)] == [[1], [-1], [1]]
    ((prompt, response, mask),) = rows[0]["others"]
    assert "1+1=?" in tokenizer.decode(prompt) and tokenizer.decode(response).startswith("3") and set(mask) == {1}
    ((prompt, response, mask),) = rows[2]["others"]
    assert len(prompt) + len(response) == 64 and len(mask) == len(response) and "4" in tokenizer.decode(response)


BAD = {
    "no 'chosen'; the columns are prompt, rejected": ("sigmoid", {"prompt": [USER], "rejected": [WRONG]}),
    "chosen and rejected are equal": ("sigmoid", PAIR | {"rejected": [RIGHT]}),
    "rejected is '3', it must be a list": ("sigmoid", PAIR | {"rejected": "3"}),
    "rejected has no message of the assistant after": (
        "sigmoid",
        {"chosen": [USER, RIGHT, AGAIN, RIGHT], "rejected": [USER, RIGHT]},
    ),
    "rejected: the conversation ends with 'user'": ("sigmoid", PAIR | {"rejected": [WRONG, AGAIN]}),
    "chosen: the roles are out of order: 'assistant' comes after": ("sigmoid", PAIR | {"chosen": [RIGHT, RIGHT]}),
    "prompt has an image, but only text is trained": ("sigmoid", PAIR | {"prompt": [IMAGE]}),
    "longer than dpo.max_length=64": ("sigmoid", PAIR | {"rejected": [WRONG | {"content": "3" * 70}]}),
    "no 'completion'; the columns are": ("kto", PAIR),
    "label is 'good', it must be true or false": ("kto", LABELLED | {"label": "good"}),
    "completion begins with 'user', not": ("kto", LABELLED | {"completion": [AGAIN, RIGHT]}),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_row_that_cannot_be_trained(tokenizer, tmp_path, problem):  # noqa: F811
    """One error with file and row; or it is skipped and counted."""
    from skyrl_megatron.errors import DataError

    loss, bad = BAD[problem]
    good = PAIR if loss == "sigmoid" else LABELLED
    with pytest.raises(DataError) as error:
        read(tmp_path, tokenizer, [good, bad, good], loss)
    assert str(error.value).startswith(f"{tmp_path}/rows.jsonl, row 1: {problem}"), error.value
    assert "dpo.invalid_rows=skip" in str(error.value)
    rows, said = read(tmp_path, tokenizer, [good, bad, good], loss, invalid_rows="skip")
    assert [rows[place]["uid"] for place in range(len(rows))] == ["0", "2"]
    assert said[0].startswith(f"data: skipped 1 of 3 rows: {problem}"[:60])


def test_answers_whose_tokens_are_equal(tokenizer, tmp_path):  # noqa: F811
    from skyrl_megatron.errors import DataError

    same = PAIR | {"rejected": [RIGHT | {"note": "the template does not read it"}]}
    with pytest.raises(DataError, match="row 0: the tokens of chosen and rejected are equal"):
        read(tmp_path, tokenizer, [same])


def test_kto_needs_two_rows(tokenizer, tmp_path):  # noqa: F811
    from skyrl_megatron.errors import DataError

    with pytest.raises(DataError, match=r"dpo\.loss=kto needs two rows"):
        read(tmp_path, tokenizer, [LABELLED], "kto")


def test_a_row_that_occurs_twice_in_a_step_is_two_pairs(tokenizer, tmp_path):  # noqa: F811
    from skyrl_megatron.data.packing import mini_batches, units
    from skyrl_megatron.rollout.preference_rows import preference_batch

    rows, _ = read(tmp_path, tokenizer, [PAIR])
    batch = preference_batch([rows[0], rows[0]])
    assert batch.uids == ["0", "0", "0#1", "0#1"] and batch.preferences[:, 0].tolist() == [1, -1, 1, -1]
    assert [part.tolist() for part in units(batch)] == [[0, 1], [2, 3]]
    assert [len(part) for part in mini_batches(batch, 1)] == [2, 2]
