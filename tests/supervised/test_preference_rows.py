"""Rows of preferences: their forms, their tokens, and what is wrong with them."""

import copy
import json

import pytest

from tests.supervised.both_ways import rows_both_ways
from tests.supervised.test_chat_rows import IMAGE, tokenizer  # noqa: F401

USER, AGAIN = {"role": "user", "content": "1+1=?"}, {"role": "user", "content": "and 2?"}
RIGHT, WRONG = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
PAIR = {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}
LABELLED = {"prompt": [USER], "completion": [RIGHT], "label": True}


def read(folder, tokenizer, lines, loss="sigmoid", **settings):  # noqa: F811
    from skyrl_megatron.config.schema.supervised import DPOConfig
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.preference_rows import rows_class

    path, said = folder / "rows.jsonl", []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = DPOConfig(loss=loss, max_length=64, **settings)
    return rows_both_ways(rows_class(made), [str(path)], ChatFormat(tokenizer), made, said.append), said


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
    "the text of prompt is in no message that chosen and rejected share": (
        "sigmoid",
        {"prompt": "Be a pirate.", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    ),
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


@pytest.mark.parametrize("files", [1, 2])
def test_kto_takes_the_nearest_answer_to_another_prompt(tokenizer, tmp_path, files):  # noqa: F811
    """Also of rows made from pairs, whose neighbours have the same prompt, and over the borders of files."""
    from skyrl_megatron.config.schema.supervised import DPOConfig
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.preference_rows import LabelledRows

    lines = [
        {
            "prompt": [{"role": "user", "content": f"{number}+{number}=?"}],
            "completion": [{"role": "assistant", "content": str(4 * number + place)}],
            "label": not place,
        }
        for number, count in enumerate((2, 1, 3, 2))
        for place in range(count)
    ]
    names = [tmp_path / f"{number}.jsonl" for number in range(files)]
    for number, name in enumerate(names):
        part = lines[number * 4 : (number + 1) * 4] if files == 2 else lines
        name.write_text("".join(json.dumps(line) + "\n" for line in part))
    rows = LabelledRows(list(map(str, names)), ChatFormat(tokenizer), DPOConfig(loss="kto", max_length=64))
    assert len(rows) == 8
    nearest = [7, 2, 1, 2, 2, 6, 5, 0]  # of two the one before; the last row is before the first
    for place, other in enumerate(nearest):
        ((prompt, response, _),) = rows[place]["others"]
        assert prompt == rows[place]["sequences"][0][0]
        answer = lines[other]["completion"][0]["content"]
        assert tokenizer.decode(response, skip_special_tokens=True).strip() == answer, place


def test_an_exchanged_answer_has_the_tokens_of_its_conversation(tmp_path):
    """Where words are remembered, and of the other tokenizers."""
    from tokenizers.pre_tokenizers import ByteLevel

    from skyrl_megatron.config.schema.supervised import DPOConfig
    from skyrl_megatron_supervised.preference_rows import LabelledRows
    from skyrl_megatron_supervised.trained_answers import trained_sequences
    from tests.support.chat_families import FAMILIES, family_format

    answers, by_words = ("2", "\n\n it's  4", "é 汉 of"), 0
    for name, family in FAMILIES.items():
        thought = {"reasoning_content": "so"} if family.thinks == "always" else {}
        lines = [
            {
                "prompt": [{"role": "user", "content": f"{number} the"}],
                "completion": [{"role": "assistant", "content": text, **thought}],
                "label": True,
            }
            for number, text in enumerate(answers)
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        chat = copy.deepcopy(family_format(name))
        if not family.spaces:  # the words of GPT-2
            chat.tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        rows = LabelledRows([str(tmp_path / "rows.jsonl")], chat, DPOConfig(loss="kto", max_length=999))
        for place, line in enumerate(lines):
            talk = rows.form.fitted([*line["prompt"], *lines[place - 1]["completion"]])
            assert rows[place]["others"] == trained_sequences(chat, talk), (name, place)
        by_words += rows._words is not None and bool(rows._words._memo)
    assert 0 < by_words < len(FAMILIES)


def test_an_exchanged_answer_has_no_sequence_beyond_the_limit(tmp_path, tokenizer):  # noqa: F811
    """A template that rewrites earlier turns makes a sequence of each answer, the second here after 60 digits."""
    from skyrl_megatron.config.schema.supervised import DPOConfig
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.preference_rows import LabelledRows

    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content.replace('2', '9') }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    answers = [("assistant", "2"), ("user", "3" * 60), ("assistant", "4")]
    completion = [{"role": role, "content": content} for role, content in answers]
    prompts = [[{"role": "user", "content": f"1+{number}=?"}] for number in (1, 5)]
    lines = [{"prompt": prompt, "completion": completion, "label": True} for prompt in prompts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = DPOConfig(loss="kto", max_length=32, long_rows="truncate")
    rows = LabelledRows([str(tmp_path / "rows.jsonl")], ChatFormat(tokenizer, template), settings)
    for row in (rows[0], rows[1]):
        ((prompt, response, mask),) = row["others"]
        assert len(prompt) + len(response) <= 32 and any(mask)


def test_nearest_others_against_a_search():
    import random

    from skyrl_megatron_supervised.preference_rows import nearest_others

    rng = random.Random(0)
    for _ in range(100):
        prompts = [rng.choice([b"a", b"b", b"c"]) for _ in range(rng.randint(2, 9))]
        n = len(prompts)
        for row, other in enumerate(nearest_others(prompts).tolist()):
            steps = [step for distance in range(1, n + 1) for step in (-distance, distance)]
            right = next((row + step for step in steps if prompts[(row + step) % n] != prompts[row]), row - 1)
            assert other == right % n, (prompts, row)


def test_kto_with_one_prompt_is_said(tokenizer, tmp_path):  # noqa: F811
    other = LABELLED | {"completion": [WRONG], "label": False}
    rows, said = read(tmp_path, tokenizer, [LABELLED, other], "kto")
    assert len(rows) == 2 and "all 2 rows have the same prompt: the KL divergence of dpo.loss=kto" in said[0]


def test_answers_that_repeat_the_prompt(tokenizer, tmp_path):  # noqa: F811
    """They lose it if it is exactly the column; else the row is an error."""
    from skyrl_megatron.errors import DataError

    repeats = {"prompt": [USER], "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}
    rows, _ = read(tmp_path, tokenizer, [PAIR, repeats, PAIR | {"chosen": [USER, RIGHT]}])
    items = [texts(tokenizer, rows[place]) for place in range(3)]
    assert items[0] == items[1] == items[2]
    for column, bad in (
        ("chosen", repeats | {"prompt": [AGAIN]}),
        ("rejected", repeats | {"rejected": [AGAIN, WRONG]}),
        ("chosen", repeats | {"prompt": [{"role": "system", "content": "Add."}, USER]}),
    ):
        with pytest.raises(
            DataError, match=rf"row 0: {column} begins with 'user', .* begins with exactly the messages"
        ):
            read(tmp_path, tokenizer, [bad])
    with pytest.raises(DataError, match="chosen has no message of the assistant after those of the prompt"):
        read(tmp_path, tokenizer, [repeats | {"chosen": [USER]}])
    other = LABELLED | {"prompt": [AGAIN]}
    rows, _ = read(tmp_path, tokenizer, [LABELLED | {"completion": [USER, RIGHT]}, LABELLED, other], "kto")
    assert rows[0]["sequences"] == rows[1]["sequences"]
    assert tokenizer.decode(rows[2]["others"][0][1]).startswith("2")


def test_flags_of_answers(tokenizer, tmp_path):  # noqa: F811
    """A message of an answer may be left out of training, but not what a reward model scores."""
    from skyrl_megatron.config.schema.supervised import RewardConfig
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.preference_rows import ScoredRows

    two = {"prompt": [USER], "chosen": [WRONG | {"weight": 0}, AGAIN, RIGHT], "rejected": [WRONG]}
    rows, _ = read(tmp_path, tokenizer, [two])
    assert "3" not in texts(tokenizer, rows[0])[0][2]
    with pytest.raises(DataError, match="row 0: no message of the assistant is trained"):
        read(tmp_path, tokenizer, [PAIR | {"rejected": [WRONG | {"loss": False}]}])
    with pytest.raises(DataError, match=r"row 0: weight is 0.5, which cannot be obeyed"):
        read(tmp_path, tokenizer, [PAIR | {"weight": 0.5}])
    (tmp_path / "scored.jsonl").write_text(json.dumps(PAIR | {"chosen": [RIGHT | {"weight": 0}]}))
    with pytest.raises(DataError, match="row 0: the last message of chosen is not trained by its flag, but"):
        ScoredRows([str(tmp_path / "scored.jsonl")], ChatFormat(tokenizer), RewardConfig(max_length=64))


@pytest.mark.parametrize("margin", [10**400, -(10**400), True, "1", [1], {}])
def test_a_margin_that_is_no_number(tokenizer, tmp_path, margin):  # noqa: F811
    from skyrl_megatron.config.schema.supervised import RewardConfig
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.preference_rows import ScoredRows

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (PAIR | {"margin": 2}, PAIR | {"margin": margin})))
    chat, given = ChatFormat(tokenizer), {"max_length": 64}
    with pytest.raises(DataError, match=r"row 1: margin is .*, it must be a finite number"):
        ScoredRows([str(path)], chat, RewardConfig(**given))
    rows = ScoredRows([str(path)], chat, RewardConfig(**given, invalid_rows="skip"))
    assert [rows[place]["margin"] for place in range(len(rows))] == [2.0]


def test_pairs_of_other_tools(tokenizer, tmp_path):  # noqa: F811
    """In the format that is named; tokens are those of the same pair as messages."""
    from skyrl_megatron.errors import DataError

    turn = [{"from": "human", "value": "1+1=?"}]
    lines = {
        "sharegpt": {
            "conversations": turn,
            "chosen": {"from": "gpt", "value": "2"},
            "rejected": {"from": "gpt", "value": "3"},
        },
        "alpaca": {"instruction": "1+1=?", "chosen": "2", "rejected": "3"},
        "prompt_completion": {"prompt": "1+1=?", "chosen": "2", "rejected": "3"},
    }
    expected = read(tmp_path, tokenizer, [PAIR])[0][0]
    for form, line in lines.items():
        assert read(tmp_path, tokenizer, [line], format=form)[0][0]["sequences"] == expected["sequences"]
        with pytest.raises(DataError, match="row 0: "):
            read(tmp_path, tokenizer, [line])


def test_kto_needs_two_rows(tokenizer, tmp_path):  # noqa: F811
    from skyrl_megatron.errors import DataError

    with pytest.raises(DataError, match=r"dpo\.loss=kto needs two rows"):
        read(tmp_path, tokenizer, [LABELLED], "kto")


def test_a_row_that_occurs_twice_in_a_step_is_two_pairs(tokenizer, tmp_path):  # noqa: F811
    from skyrl_megatron.data.splitting import mini_batches, units
    from skyrl_megatron_supervised.preference_rows import preference_batch

    rows, _ = read(tmp_path, tokenizer, [PAIR])
    batch = preference_batch([rows[0], rows[0]])
    assert batch.uids == ["0", "0", "0#1", "0#1"] and batch.preferences[:, 0].tolist() == [1, -1, 1, -1]
    assert [part.tolist() for part in units(batch)] == [[0, 1], [2, 3]]
    assert [len(part) for part in mini_batches(batch, 1)] == [2, 2]
