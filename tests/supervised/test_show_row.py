"""``--show-row``: a row as it is trained, from tokenizer, data and settings alone."""

import json

import pytest


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder without weights, and one data set of each kind."""
    from skyrl_megatron.tiny_model import write_embedded_model

    folder = tmp_path_factory.mktemp("rows")
    for weights in write_embedded_model(folder / "model").glob("*.safetensors*"):
        weights.unlink()
    rows = {
        "sft": {"messages": [user("1+1="), answer("2"), user("and 2?"), answer("4")]},
        "pair": {"prompt": [user("1+1=")], "chosen": [answer("2")], "rejected": [answer("33")]},
        "label": {"prompt": [user("1+1=")], "completion": [answer("2")], "label": False},
        "prompt": {"prompt": [user("1+1=")], "reward_spec": {"method": "rule", "ground_truth": "2"}},
    }
    for name, row in rows.items():
        other = json.loads(json.dumps(row).replace("1+1=", "3+3="))
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (other, row)))
    return folder


def shown(folder, capsys, verb, data, *arguments):
    """Return (exit code, standard output, standard error) of the command for row 1."""
    from skyrl_megatron.cli import main

    settings = [f"trainer.policy.model.path={folder / 'model'}", f"data.train_data=[{folder / data}.jsonl]"]
    code = main([verb, "--show-row", "1", *settings, *arguments])
    return code, *capsys.readouterr()


def sequences(folder, capsys, verb, data, *arguments):
    code, out, err = shown(folder, capsys, verb, data, "--json", *arguments)
    assert code == 0, err
    return json.loads(out)["sequences"]


def test_the_object_has_every_token_and_what_is_trained(folder, capsys):
    from skyrl_megatron.data.tokenizer import load_tokenizer

    (sequence,) = sequences(folder, capsys, "sft", "sft")
    assert sequence["text"] == "<|user|>1+1=<|end|><|assistant|>2<|end|><|user|>and 2?<|end|><|assistant|>4<|end|>"
    assert sequence["trained_text"] == ["2<|end|>", "4<|end|>"]
    tokenizer = load_tokenizer(folder / "model")
    assert tokenizer.decode(sequence["ids"]) == sequence["text"]
    marked = [token for token, one in zip(sequence["ids"], sequence["trained"], strict=True) if one]
    assert tokenizer.decode(marked) == "2<|end|>4<|end|>"
    (last,) = sequences(folder, capsys, "sft", "sft", "sft.turns=last")
    assert last["trained_text"] == ["4<|end|>"]


def test_the_text_marks_what_is_trained(folder, capsys, monkeypatch):
    code, out, _ = shown(folder, capsys, "sft", "sft")
    place, count, text = out.splitlines()
    assert code == 0 and place.endswith("sft.jsonl, row 1: 1 sequence") and count == "--- answer: 20 tokens, 4 trained"
    assert "<|assistant|>⟦2<|end|>⟧<|user|>and 2?<|end|><|assistant|>⟦4<|end|>⟧" in text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "<|assistant|>\x1b[1;32m2<|end|>\x1b[0m<|user|>" in shown(folder, capsys, "sft", "sft")[1]


@pytest.mark.parametrize(
    ("verb", "data", "settings", "expected"),
    [
        ("dpo", "pair", [], [("chosen", ["2<|end|>"]), ("rejected", ["33<|end|>"])]),
        ("reward", "pair", [], [("chosen", ["<|end|>"]), ("rejected", ["<|end|>"])]),
        ("dpo", "label", ["dpo.loss=kto"], [("bad answer", ["2<|end|>"])]),
        ("train", "prompt", [], [("prompt", [])]),
    ],
)
def test_every_verb(folder, capsys, verb, data, settings, expected):
    """Answers are named as in the row; a scored answer is marked where it is scored; a prompt has nothing trained."""
    rendered = sequences(folder, capsys, verb, data, *settings)
    assert [(sequence["answer"], sequence["trained_text"]) for sequence in rendered] == expected
    assert all(sequence["text"].startswith("<|user|>1+1=<|end|><|assistant|>") for sequence in rendered)
    assert all("<|end|><|end|>" not in sequence["text"] for sequence in rendered)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--show-row", "2"], 1, "row 2: the data have 2 rows, numbered from 0 to 1"),
        (["--show-row=-1"], 2, "--show-row=-1: write the number of a row"),
        (["--show-row"], 2, "--show-row=: write the number of a row"),
        (["--show-row", "0", "data.train_data=[]"], 2, "data.train_data=[]: name the data set"),
        (["--show-row", "0", "data.traindata=[]"], 2, "closest: data.train_data"),
        (["--show-row", "0", "sft.max_length=3"], 1, "sft.jsonl, row 0: longer than sft.max_length=3"),
        (["--shw-row", "0"], 2, "did you mean --show-row?"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, arguments, code, message):
    from skyrl_megatron.cli import main

    settings = [f"trainer.policy.model.path={folder / 'model'}", f"data.train_data=[{folder}/sft.jsonl]"]
    kept = [setting for setting in settings if setting.partition("=")[0] not in " ".join(arguments)]
    assert main(["sft", *kept, *arguments]) == code
    out, err = capsys.readouterr()
    assert message in err and not out and "Traceback" not in err


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"weight": 0}, "the row is not trained (weight is 0)"),
        ({"messages": [user("1+1="), answer("2") | {"loss": False}]}, "the flags of the messages leave out all"),
    ],
)
def test_a_row_that_is_left_out_needs_no_correction(folder, capsys, tmp_path, row, kind):
    line = json.dumps({"messages": [user("1+1="), answer("2")]} | row)
    (tmp_path / "own.jsonl").write_text(f"{line}\n{line}\n")
    code, out, err = shown(folder, capsys, "sft", tmp_path / "own")
    assert code == 1 and not out and "correct" not in err
    assert f"{kind}: its own flag says so, and training leaves it out" in err
