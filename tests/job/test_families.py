"""Whole runs of families whose weights take another way to the engines than the embedded model's."""

import shutil

import pytest

from tests.job import runs
from tests.job.runs import AGREE, GAP
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]


def test_gpt_oss(tmp_path):
    """Steps are large, so that weights which do not arrive would part trainer and engine at the second."""
    folder = runs.prepare(tmp_path)
    shutil.rmtree(folder / "model")
    write_tiny_model("gpt_oss", folder / "model", num_hidden_layers=2)
    lines = runs.run(folder, trainer__max_training_steps=3).check().lines
    assert len(lines) == 3
    assert all(line["policy/grad_norm"] > 0 and line[GAP] <= AGREE for line in lines)


def test_multi_token_prediction(tmp_path):
    """The layer is trained beside the policy; engines get it with every update, draft with it, and agree about what
    they sampled; exports hold it as trained."""
    from safetensors.torch import load_file

    from tests.training.draft_reference import LAYERS, PREFIX, last_as_draft

    folder = runs.prepare(tmp_path)
    shutil.rmtree(folder / "model")
    last_as_draft(write_tiny_model("deepseek_v3", folder / "model", num_hidden_layers=LAYERS + 1))
    train = {"trainer__policy__megatron_config__mtp__train": "true", "trainer__hf_save_interval": 3}
    drafts = "generator__inference_engine__engine_init_kwargs__speculative_config"
    train[drafts] = "{method: mtp, num_speculative_tokens: 1}"
    lines = runs.run(folder, trainer__max_training_steps=3, **train).check().lines
    assert len(lines) == 3
    assert all(line["policy/grad_norm"] > 0 and line[GAP] <= AGREE and line["policy/mtp_loss"] > 0 for line in lines)
    (exported,) = folder.glob("exports/global_step_3/policy")
    before = load_file(folder / "model/model.safetensors")
    after = {name: t for path in exported.glob("*.safetensors") for name, t in load_file(path).items()}
    assert before.keys() == after.keys()
    moved = {name for name in before if not before[name].equal(after[name])}
    assert f"{PREFIX}eh_proj.weight" in moved and "model.layers.0.self_attn.o_proj.weight" in moved
