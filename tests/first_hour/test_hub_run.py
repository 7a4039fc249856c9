"""A whole run whose model, tokenizer and data have hub names, and its continuation after the branches moved."""

import json

import pytest
import yaml

from tests.job import runs
from tests.support import hub_endpoint

MODEL, DATA = "acme/tiny", "acme/sums"


@pytest.mark.process
def test_a_run_by_hub_names_and_its_continuation_after_the_branches_moved(tmp_path):
    folder = runs.prepare(tmp_path)
    files, rows = hub_endpoint.folder_files(folder / "model"), (folder / "prompts.jsonl").read_bytes()
    settings = dict(
        trainer__policy__model__path=MODEL,
        data__train_data=f"[{DATA}]",
        data__val_data=f"['{DATA}:train[:4]']",
        trainer__ckpt_interval=1,
        trainer__hf_save_interval=1,
    )
    with hub_endpoint.serve() as hub:
        model, data = hub.repository(MODEL), hub.repository(f"datasets/{DATA}")
        first, sums = model.push(files | {"pytorch_model.bin": b"unused"}), data.push({"train.jsonl": rows})
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "hf"), "HF_TOKEN": ""}

        def run(steps):
            process = runs.start(folder, variables=variables, **settings, trainer__max_training_steps=steps)
            return runs.finish(process, folder).check()

        begun = run(1)
        commits = {f"{MODEL}@main": first, f"datasets/{DATA}@main": sums}
        assert f"hub: {MODEL}@main is commit {first}" in begun.out
        assert yaml.safe_load((folder / "logs/skyrl/run/config.yaml").read_text())["trainer"]["hub_commits"] == commits
        assert json.loads((folder / "ckpts/global_step_1/MANIFEST.json").read_text())["hub_commits"] == commits
        card = (folder / "exports/global_step_1/policy/README.md").read_text()
        assert yaml.safe_load(card.split("---")[1]) == {"base_model": MODEL, "datasets": [DATA]} and first in card
        assert not hub.downloads("pytorch_model.bin")
        weights = next(name for name in files if name.endswith(".safetensors"))
        assert len(hub.downloads(weights)) == 1  # two ranks and an engine share it

        model.push({"config.json": b'{"model_type": "another"}'})
        data.push({"train.jsonl": b"not a row\n"})
        asked = len(hub.requests)
        continued = run(2)
        assert f"hub: {MODEL}@main is commit {first}, as in the checkpoint" in continued.out
        assert [line["trainer/global_step"] for line in continued.lines if "trainer/global_step" in line][-1:] == [2]
        assert json.loads((folder / "ckpts/global_step_2/MANIFEST.json").read_text())["hub_commits"] == commits
        assert not [path for _, path, _ in hub.requests[asked:] if "/resolve/" in path]
