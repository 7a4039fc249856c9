"""Versions of weights in a store that fails: the command says so, and what was published stays. Checkpoints of runs
there are in ``test_cells.py``."""

import pytest

from tests.faults import object_store

LASTS_S = 5.0
"""Of a store that is slow."""


@pytest.fixture
def store(tmp_path):
    if reason := object_store.why_not():
        pytest.skip(reason)
    object_store.start(tmp_path / "store.log")
    yield f"{object_store.BUCKET}{tmp_path}"
    object_store.mend()


def exported(folder, value):
    """A folder of weights, as a run exports them."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    save_file({"matrix": torch.full((300, 257), value), "bias": torch.arange(7.0)}, folder / "model.safetensors")
    return folder


@pytest.mark.process
@pytest.mark.parametrize(
    ("what", "code"),
    [("exception", 1), ("slow ×10", 0), pytest.param("cut link", 1, marks=pytest.mark.full_matrix)],
)
def test_what_was_published_stays(tmp_path, store, capsys, what, code):
    import torch
    from safetensors.torch import load_file

    from skyrl_megatron_tools.weight_versions import main

    folders = [exported(tmp_path / f"step {step}", float(step)) for step in (1, 2)]
    like = ["--like", str(folders[0])]
    assert main(["publish", str(folders[0]), store]) == 0
    capsys.readouterr()
    object_store.spoil(what, LASTS_S)
    assert main(["publish", str(folders[1]), store]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == code and all(line.startswith(store) for line in lines), lines
    object_store.mend()
    assert main(["fetch", store, str(tmp_path / "found"), *like]) == 0
    assert main(["publish", str(folders[1]), store]) == 0
    assert main(["fetch", store, str(tmp_path / "made"), *like]) == 0
    said = capsys.readouterr().out
    assert ("version 2" if code == 0 else "version 1, step 1") in said, said
    made, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "made", folders[1]))
    assert made.keys() == wanted.keys() and all(torch.equal(made[name], wanted[name]) for name in made)
