"""Log-probs of a reference on disk: those of the rows that are asked for, and never those of another run."""

import os

import numpy as np
import pytest

from tests.supervised.test_chat_rows import tokenizer  # noqa: F401
from tests.supervised.test_preference_rows import LABELLED, PAIR, WRONG, read

OF = {"model": "weights a1", "configuration": "{}"}


def pair(number):
    return PAIR | {"prompt": [{"role": "user", "content": f"{number}+1=?"}]}


def computed(rows):
    """What a reference might say: numbers that depend on every token of a sequence."""

    def of(sequence):
        prompt, response, _ = sequence
        return -float(np.dot([*prompt, *response], np.arange(1, len(prompt) + len(response) + 1)))

    others = [sum(map(of, row.get("others", ()))) for row in rows]
    return np.array([of(sequence) for row in rows for sequence in row["sequences"]]), np.array(others, float)


@pytest.fixture
def cache(tokenizer, tmp_path):  # noqa: F811
    """Return a new cache of some rows, and what it said."""
    from skyrl_megatron_supervised.reference_cache import ReferenceCache

    def make(lines, loss="sigmoid", of=OF):
        rows, _ = read(tmp_path, tokenizer, lines, loss, invalid_rows="skip")
        said = []
        return ReferenceCache(tmp_path / "cache", "train", rows, of, said.append), said

    return make


INVALID = PAIR | {"rejected": PAIR["chosen"]}
ROWS = {
    "sigmoid": [pair(0), INVALID, pair(1), pair(2), INVALID, pair(3)],
    "kto": [LABELLED, LABELLED | {"label": 1}, LABELLED | {"completion": [WRONG]}, LABELLED | {"label": False}],
}


@pytest.mark.parametrize("loss", ROWS)
def test_rows_get_their_own_log_probs(cache, loss):
    """In any order, also where rows were skipped, and from the file of an earlier run."""
    first, said = cache(ROWS[loss], loss)
    assert not first.is_complete
    first.fill(computed, size=2)
    assert said == [f"reference: log-probs of {len(first.rows)} rows are in {first.path}"]
    again, said = cache(ROWS[loss], loss)
    assert again.is_complete and not said
    for found in (first, again):
        items = [found.rows[place] for place in (2, 0, 1, 2)]
        sums, others = computed(items)
        assert found.sums(items).tolist() == sums.tolist() and found.others(items).tolist() == others.tolist()


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


OTHERS = {
    "is of another data": dict(lines=[*ROWS["sigmoid"], pair(4)]),
    "is of another model": dict(of=OF | {"model": "weights b2"}),
    "is of another model and another configuration": dict(of={"model": "b", "configuration": "[]"}),
    "is damaged": dict(change=damage),
    "cannot be read": dict(change=lambda path: path.write_bytes(path.read_bytes()[:40])),
}


@pytest.mark.parametrize("why", OTHERS)
def test_those_of_another_run_are_computed_again(cache, why):
    how = dict(OTHERS[why])
    first, _ = cache(ROWS["sigmoid"])
    first.fill(computed, size=4)
    how.pop("change", lambda path: None)(first.path)
    second, said = cache(how.pop("lines", ROWS["sigmoid"]), **how)
    assert not second.is_complete
    (line,) = said
    assert why in line and line.startswith(f"dpo.reference_cache: {first.path} ")
    assert line.endswith(": the log-probs of the reference are computed again")


def test_a_full_disk_is_one_sentence(cache, tmp_path):
    from skyrl_megatron.errors import ConfigError

    first, _ = cache(ROWS["sigmoid"])
    first.path.parent.mkdir()
    first.path.with_suffix(f".partial-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(ConfigError) as failed:
        first.fill(computed, size=4)
    (problem,) = failed.value.problems
    assert (problem.key, problem.value) == ("dpo.reference_cache", str(first.path.parent))
    assert problem.fix == "cannot be written (No space left on device): free disk space, or set another folder"
    assert not list(first.path.parent.iterdir())


def test_a_full_disk_at_a_dumped_batch_names_the_file(tmp_path):
    import torch

    from skyrl_megatron.types import PaddedBatch
    from skyrl_megatron_observe.dump import dump_batch

    fields = ("sequences", "attention_mask", "response_mask", "loss_mask")
    batch = PaddedBatch(**{name: torch.ones(1, 2) for name in fields}, uids=["a"]).flat()
    (tmp_path / ".step.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as failed:
        dump_batch(batch, tmp_path / "step.safetensors")
    assert failed.value.filename == str(tmp_path / ".step.safetensors")


def test_a_run_with_all_log_probs_starts_no_reference(cache, tmp_path, monkeypatch):
    """It goes on with a configuration of its own; the one that was given stays as it was."""
    from skyrl_megatron.config.roles import active_roles
    from skyrl_megatron.config.schema.preferences import DPOTrainConfig
    from skyrl_megatron_supervised import reference_cache

    monkeypatch.setattr(reference_cache, "reference_identity", lambda cfg: OF)
    cfg = DPOTrainConfig.from_cli_overrides([f"dpo.reference_cache={tmp_path / 'cache'}", "dpo.beta=0.3"])
    first, said = cache(ROWS["sigmoid"])
    same, caches = reference_cache.open_caches(cfg, {"train": first.rows, "eval": None}, said.append)
    assert same is cfg and list(caches) == ["train"] and active_roles(cfg) == ("policy", "ref")
    first.fill(computed, size=2)
    after, caches = reference_cache.open_caches(cfg, {"train": first.rows}, said.append)
    assert caches["train"].is_complete and active_roles(after) == ("policy",) and after.dpo.beta == 0.3
    assert active_roles(cfg) == ("policy", "ref") and after.trainer is cfg.trainer
