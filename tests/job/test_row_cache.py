"""Runs with tokens that are made while they train, that an earlier run made, and without the cache: the same model."""

import json

import pytest

from tests.job import row_runs, runs

pytestmark = [pytest.mark.process, pytest.mark.full_matrix]
ROWS = 1200
"""More than are made before the start."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = row_runs.prepare(tmp_path_factory.mktemp("cached"))
    talks = (folder / "talks.jsonl").read_text().splitlines()
    (folder / "many.jsonl").write_text("".join(talks[n % len(talks)] + "\n" for n in range(ROWS)))
    long = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "2" * 600}]}
    (folder / "bad.jsonl").write_text((folder / "many.jsonl").read_text() + json.dumps(long) + "\n")
    return folder


def test_a_run_does_not_depend_on_the_cache(folder, tmp_path):
    """Nor do its losses. A second run makes no tokens, and says where they are."""
    exports, losses, outputs = [], [], []
    variables = {"SKYRL_MEGATRON_HOME": str(tmp_path / "home")}
    for name, keys in (("without", {"data.row_cache_gb": 0}), ("cold", {}), ("warm", {})):
        place = tmp_path / name
        place.mkdir()
        limits = {"trainer.max_training_steps": 4, "trainer.eval_interval": -1} | keys
        outputs.append(row_runs.finish(row_runs.start("sft", folder, place, variables, data="many", **limits)))
        exports.append(row_runs.exported(place))
        losses.append([line["sft/loss"] for line in row_runs.steps_of(place)])
    assert exports[0] == exports[1] == exports[2] and losses[0] == losses[1] == losses[2] and len(losses[0]) == 4
    assert [f"cached in {tmp_path}/home/rows" in output for output in outputs] == [False, True, True]
    assert ["processes tokenize 2 shards" in output for output in outputs] == [False, True, False]


def test_a_bad_row_at_the_end_of_many(folder, tmp_path):
    process = row_runs.start("sft", folder, tmp_path, data="bad")
    out, err = process.communicate(timeout=runs.TIMEOUT_S)
    assert process.returncode == 1 and "Traceback" not in out + err
    assert f"{folder}/bad.jsonl, row {ROWS}: longer than sft.max_length=256" in err
