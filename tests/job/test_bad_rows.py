"""What ``sft``, ``dpo`` and ``reward`` say of data that cannot be trained, as users see it: one error with file and
row, and nothing is left running. ``tests/rollout`` has every kind of row."""

import json
import re
import tempfile

import pytest

from tests.job import row_runs, runs
from tests.support.processes import given_the_folder, left_behind

pytestmark = pytest.mark.process
USER, ANSWER = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}
IMAGE = {"role": "user", "content": [{"type": "image", "url": "a.png"}, {"type": "text", "text": "what?"}]}
LONG = {"role": "assistant", "content": "2" * 600}


def pair(prompt=USER, chosen=ANSWER, rejected=LONG | {"content": "3"}, **more):
    return {"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]} | more


ROWS = {
    "no answer": ("sft", {"messages": [USER]}, "no message of the assistant"),
    "an image": ("sft", {"messages": [IMAGE, ANSWER]}, "messages has an image"),
    "roles": ("dpo", pair(chosen=USER), "chosen: the roles are out of order: 'user' comes after 'user'"),
    "equal": ("dpo", pair(rejected=ANSWER), "chosen and rejected are equal"),
    "long": ("reward", pair(chosen=LONG), "longer than reward.max_length=256"),
    "a margin": ("reward", pair(margin="much"), "margin is 'much', it must be a finite number"),
}
PLAIN = ("no answer",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return row_runs.prepare(tmp_path_factory.mktemp("bad"))


def ends(verb, folder, place, *, code=2, **keys):
    """What a run that cannot start says, with exit code ``code``. It leaves no process, and no checkpoint."""
    with tempfile.TemporaryDirectory() as short:  # Ray makes sockets in it
        process = row_runs.start(verb, folder, place, {"TMPDIR": short}, **keys)
        out, err = process.communicate(timeout=runs.TIMEOUT_S)
        assert process.returncode == code, (out, err)
        assert left_behind(given_the_folder(short), within_s=30) == []
    assert not (place / "ckpt").exists() and "Traceback" not in out + err
    return err


@pytest.mark.parametrize(
    "kind", [kind if kind in PLAIN else pytest.param(kind, marks=pytest.mark.full_matrix) for kind in ROWS]
)
def test_a_row_that_cannot_be_trained(folder, tmp_path, kind):
    """Every row is checked before the run starts, its length when it is tokenized."""
    verb, row, problem = ROWS[kind]
    name = row_runs.DATA[verb]
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    (folder / "bad.jsonl").write_text("\n".join([*lines[:40], json.dumps(row), *lines[40:]]) + "\n")
    err = ends(verb, folder, tmp_path, data="bad", code=1 if kind == "long" else 2)
    assert re.search(
        rf"{folder}/bad\.jsonl[,:] row 40: {re.escape(problem)}.*: correct or remove the row, or set", err
    )
    assert err.count("row 40") == 1 and f"{verb}.invalid_rows=skip" in err


@pytest.mark.full_matrix
@pytest.mark.parametrize("verb", row_runs.DATA)
def test_a_weight_of_zero_and_a_missing_file(folder, tmp_path, verb):
    rows = folder / f"{row_runs.DATA[verb]}.jsonl"
    mixed = {"data.train_data": f"[{rows},{rows}]", "data.sampler": "mixture"}
    for name, keys, problem in (
        ("weight", mixed | {"data.sampler_options.weights": "[1,0]"}, "a weight must be above 0, 0.0 is not"),
        ("file", {"data.train_data": f"[{folder}/nowhere.jsonl]"}, "nowhere.jsonl"),
    ):
        (tmp_path / name).mkdir()
        assert problem in ends(verb, folder, tmp_path / name, **keys)
