"""The configuration that rows of the table change: a small run of the embedded model."""

import os
import warnings

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware

CPU, GPUS = Hardware(0, 1), Hardware(8, 1)
FOLDER = "SKYRL_TEST_SETTINGS"
"""Environment variable with the folder of model, data and outputs; ranks are given it too."""


def prepare(folder):
    """Write models, data, databases and a chat template."""
    from skyrl_megatron.data import prepare
    from skyrl_megatron.tiny_model import write_embedded_model
    from tests.training.draft_reference import save_with_draft

    write_embedded_model(folder / "model")
    for name, problems in (("train", [(a, b) for a in range(10, 14) for b in range(10, 13)]), ("more", [(20, 21)])):
        prepare.write(prepare.addition_rows(name, problems), folder / f"{name}.parquet")
    write_embedded_model(folder / "other")
    save_with_draft("deepseek_v3", folder / "drafted")
    template = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}{{ hint }}"
    (folder / "chat.jinja").write_text(template)
    (folder / "named.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1", "note": "unread"}]}\n')
    (folder / "order.txt").write_text("5\n3\n9\n1\n")
    for name in ("databases", "others"):
        place = folder / name / "spider" / "database" / "x"
        place.mkdir(parents=True)
        (place / "x.sqlite").touch()


def base(folder=None):
    """Keys of the run."""
    folder = folder or os.environ[FOLDER]
    return {
        "trainer.logger": "console",
        "trainer.policy.model.path": f"{folder}/model",
        "data.train_data": [f"{folder}/train.parquet"],
        "data.val_data": [f"{folder}/more.parquet"],
        "trainer.log_path": f"{folder}/out/logs",
        "trainer.ckpt_path": f"{folder}/out/ckpts",
        "trainer.export_path": f"{folder}/out/exports",
        "environment.skyrl_gym.text2sql.db_path": f"{folder}/databases",
        "trainer.max_prompt_length": 32,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 2,
        "trainer.eval_batch_size": 8,
        "generator.n_samples_per_prompt": 2,
        "generator.sampling_params.max_generate_length": 8,
        "generator.inference_engine.max_num_seqs": 16,
    }


def resolved(keys, hardware=GPUS):
    """Return the configuration with ``keys`` set, filled in for the machine."""
    from skyrl_megatron.config.resolve import fit_to_hardware

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cfg = SkyRLTrainConfig.from_cli_overrides(base() | keys)
        fit_to_hardware(cfg, hardware)
    return cfg
