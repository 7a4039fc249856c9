"""``main_base --check``: exit codes, the report, and what it does not start."""

import os
import subprocess
import sys

import pytest

from tests.bridges.tiny_models import tiny_config
from tests.support.whole_folder import write_sums, write_whole_folder

M = "trainer.policy.megatron_config."


def command(*args, **environment):
    """Exit code, stdout and stderr of the real command."""
    run = subprocess.run(
        [sys.executable, "-m", "skyrl_megatron.entrypoints.main_base", *args],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
    )
    assert "Traceback" not in run.stderr
    return run.returncode, run.stdout, run.stderr


@pytest.fixture(scope="module")
def run_args(tmp_path_factory):
    """A model, a batch of data, and the arguments that name them."""
    folder = tmp_path_factory.mktemp("run")
    sizes = dict(hidden_size=64, head_dim=32, num_hidden_layers=4, num_key_value_heads=2, max_position_embeddings=4096)
    write_whole_folder(folder / "model", tiny_config("qwen3_moe", **sizes))
    data = write_sums(folder / "train.parquet", rows=1024)
    places = [f"trainer.{name}_path={folder}/{name}" for name in ("log", "ckpt", "export")]
    return [f"trainer.policy.model.path={folder}/model", f"data.train_data=['{data}']", "data.val_data=[]", *places]


def test_report(run_args, capsys):
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.entrypoints import check

    layout = [f"{M}pipeline_model_parallel_size=2", f"{M}expert_model_parallel_size=2", "trainer.logger=console"]
    layout.append(f"{M}moe_expert_moves=auto")
    layout += ["trainer.placement.policy_num_gpus_per_node=4", "generator.inference_engine.num_engines=4"]
    assert check.run([*run_args, *layout], Hardware(8, 1)) == 0
    out = capsys.readouterr().out
    assert out.startswith("it can run on this machine: 8 GPUs per node, 1 node(s)\n")
    for line in (
        "the run takes 4 GPUs: policy 4",
        "layout: 4 ranks = tp 1 · pp 2 · cp 1 · dp 2; experts etp 1 · ep 2 · edp 1",
        "4 of 4 layers with 4 experts",
        "  stages 0-1, ranks 0-3: layers 0-1; 2-3, 2 of 4 experts a rank",
        "layout: as the policy",
        "  moving an expert of a layer takes 0.00 ms; it pays back in 10 steps if the busiest rank gets 2,344 tokens",
        "# ref: ",
        "policy: 4 optimizer steps (1024/256 · 1 epochs), each on 1280 sequences = dp 2 · 640, in 640 micro-batches",
    ):
        assert line in out
    # bf16 weights 2 bytes, fp32 gradients 4, Adam 12 over dp 2 (dense) or edp 1 (experts)
    expert = 2 * 2 * 3 * 24 * 64
    dense = 1003 * 64 + 2 * (2 * 64 + 2 * 32 + 10 * 32 * 64 + 6 * 32 * 64 + 4 * 64)
    row = next(line for line in out.splitlines() if line.startswith("  stage 0"))
    assert row.split()[2] == f"{dense + expert:,}"
    assert row.split()[-10:-4] == [
        *f"{(dense + expert) * 2 / 1e3:.2f} kB {(dense + expert) * 4 / 1e3:.2f} kB".split(),
        *f"{(dense * 6 + expert * 12) / 1e6:.2f} MB".split(),
    ]


def test_names_of_held_out_data_are_checked(run_args, tmp_path, capsys):
    """Where only the data says which scores there are, and which would overwrite others."""
    import json

    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.entrypoints import check

    def said(*sources, **keys):
        rows = [
            {
                "prompt": [{"role": "user", "content": "1+1=?"}],
                "env_class": "gsm8k",
                "reward_spec": {"method": "rule", "ground_truth": "2"},
                "data_source": source,
            }
            for source in sources
        ]
        (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = [f"data.val_data=[{tmp_path}/held.jsonl]", "trainer.logger=console"]
        given += [f"trainer.{name}={value}" for name, value in keys.items()]
        code = check.run([*run_args, *given], Hardware(1, 1))
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    assert said("math", "code", best_metric="eval/math/avg_score")[0] == 0
    code, text = said("math", "code", best_metric="eval/maths/avg_score")
    assert code == 2 and "no metric eval/maths/avg_score: did you mean eval/math/avg_score?" in text
    code, text = said("math", "all")
    assert code == 2 and "eval/all/… are those of all rows: rename it in the column data_source" in text


def test_the_configuration_is_printed_when_it_is_asked_for(run_args, capsys):
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.entrypoints import check

    args = [*run_args, "trainer.logger=console"]
    assert check.run(args, Hardware(1, 1)) == 0
    short = capsys.readouterr().out
    assert check.run(["--show-config", *args], Hardware(1, 1)) == 0
    out = capsys.readouterr().out
    assert out.startswith(short) and "resolved configuration" not in short and len(short.splitlines()) < 80
    assert "weight_sync_backend: " in out.partition("# resolved configuration")[2]


def test_the_cost_of_exact_rollouts(run_args, capsys):
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.entrypoints import check

    args = [*run_args, "trainer.logger=console", "trainer.exact_rollouts=true", "trainer.placement.colocate_all=false"]
    args += ["trainer.placement.policy_num_gpus_per_node=1", "trainer.algorithm.use_kl_loss=false"]
    assert check.run(args, Hardware(0, 1)) == 0
    assert "exact rollouts: generation takes " in capsys.readouterr().out
    args += ["trainer.max_rollout_gap=0.01", f"{M}transformer_config_kwargs.transformer_impl=local"]
    assert check.run(["--check=1x8", *args]) == 0
    assert "remaining gap are not measured on a GPU" in capsys.readouterr().out


def test_what_does_not_fit_is_shown_after_the_problems(run_args, capsys):
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.entrypoints import check

    assert check.run([*run_args, "trainer.logger=console", "--gpu", "1GiB"], Hardware(1, 1)) == 2
    out, err = capsys.readouterr()
    assert "in the configuration:" in err and "GPU memory=" in err and "it can run" not in out
    assert "# memory" in out and "# one step" in out


def test_without_data_the_rest_is_shown(run_args, capsys):
    """Layout, memory and time need no data; the steps of the run do, and say so. On this machine it is a mistake."""
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.entrypoints import check

    args = [*run_args, "trainer.logger=console", "data.train_data=[/nowhere/rows.parquet]", "--gpu", "h100"]
    assert check.run(["--check=1x1", *args]) == 0
    out = capsys.readouterr().out
    assert "data.train_data=/nowhere/rows.parquet: no such file here: rows, lengths and steps are not checked" in out
    assert "steps: known once data.train_data can be read, or with trainer.max_training_steps; 100 of them: " in out
    assert check.run(["--check=1x1", *args, "trainer.max_training_steps=7"]) == 0
    assert "steps: 7 (trainer.max_training_steps=7, if the data is enough): " in capsys.readouterr().out
    assert check.run(args, Hardware(1, 1)) == 2
    assert "data.train_data=/nowhere/rows.parquet: no such file" in capsys.readouterr().err


def test_memory_of_the_tightest_phase_alone(run_args, capsys):
    """``--show-config`` adds the others."""
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.entrypoints import check

    args = ["trainer.logger=console", "--gpu", "80GB", "--host-memory", "1TB", *run_args]
    assert check.run(args, Hardware(1, 1)) == 0
    short = capsys.readouterr().out
    assert check.run(["--show-config", *args], Hardware(1, 1)) == 0
    shown, _, more = capsys.readouterr().out.partition("# memory of the other phases")
    assert sum(" free" in line for line in shown.splitlines()) == 1 and shown.startswith(short)
    assert sum(" free" in line for line in more.splitlines()) >= 5


@pytest.mark.process
def test_options_of_the_check_alone_are_refused_without_it(run_args):
    code, out, err = command(*run_args, "--show-config")
    assert code == 2 and out == "" and "--show-config=: this option needs --check" in err


@pytest.mark.process
def test_check_starts_neither_ray_nor_cuda(run_args):
    code = (
        "import sys; from skyrl_megatron.entrypoints.main_base import main; code = main(sys.argv[1:]); import torch; "
        "assert 'ray' not in sys.modules and not torch.cuda.is_initialized(); sys.exit(code)"
    )
    args = ["--check", "--show-config", *run_args, "trainer.logger=console"]
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if not line.startswith("…")]  # of a wait on a busy machine
    assert "weight_sync_backend: " in run.stdout and said == []


@pytest.mark.process
def test_every_problem_is_listed_with_exit_code_2(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: x\n  epochs: 0\n")
    code, out, err = command("--check", f"--config={file}", "trainer.lr=1", f"{M}expert_model_parallel_size=3")
    assert code == 2 and out == ""
    for key in (
        "trainer.seed=x",
        "trainer.epochs=0",
        "trainer.lr=1",
        f"{M}expert_model_parallel_size=3",
        "data.train_data",
    ):
        assert f"  - {key}" in err
    assert "warning: trainer.logger=wandb" in err


@pytest.mark.process
def test_yaml_syntax_names_the_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: 1\n  run_name: [a\n")
    code, _, err = command("--check", "--config", str(file))
    assert code == 2 and "line 4" in err


def test_unsupported_model(tmp_path, capsys):
    from skyrl_megatron.entrypoints import check

    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_mo", "num_hidden_layers": 2, "num_attention_heads": 2}'
    )
    args = [
        f"trainer.policy.model.path={tmp_path}",
        "data.val_data=[]",
        f"data.train_data=['{tmp_path}/config.json']",
        "trainer.logger=console",
    ]
    assert check.run(args) == 2
    assert "nearest: qwen3_moe" in capsys.readouterr().err


@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
def test_a_table_that_does_not_tell_its_matrices_is_refused(tmp_path, monkeypatch, critic):
    """A plugin's conversion without ``blocks`` is named before anything starts; AdamW trains it."""
    import dataclasses

    from bridges import families
    from bridges.conversions import Conversion
    from bridges.families.llama import FAMILY
    from bridges.rows import Row
    from skyrl_megatron.checks import PlannedRun
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron_observe.preflight.model_checks import model_files
    from tests.bridges.tiny_models import save_tiny

    class Folded(Conversion):
        pass

    class FoldedRow(Row):
        def conversion(self, dims):
            return Folded()

    rows = [
        FoldedRow(row.megatron, row.hf, row.shape, row.split) if row.megatron.endswith("linear_proj.weight") else row
        for row in FAMILY.layer
    ]
    families.supported()  # loads the tables
    monkeypatch.setitem(families._families, "llama", dataclasses.replace(FAMILY, layer=tuple(rows)))
    model = str(save_tiny("llama", tmp_path / "model", num_hidden_layers=2))
    keys = {"trainer.policy.model.path": model}
    if critic:
        keys |= {"trainer.critic.model.path": model, "trainer.algorithm.advantage_estimator": "gae"}

    def problems(optimizer):
        given = keys | {f"trainer.{'critic' if critic else 'policy'}.optimizer_config.optimizer": optimizer}
        run = PlannedRun(SkyRLTrainConfig.from_cli_overrides(given), Hardware(0))
        return [str(each) for each in model_files(run) if "matrices" in str(each)]

    assert problems("adam") == []
    (problem,) = problems("muon")
    assert f"{'critic' if critic else 'policy'}.optimizer_config.optimizer=muon: decoder.layers." in problem
    assert (
        "the table does not say which matrices Folded fuses" in problem and "or train with optimizer=adam" in problem
    )


def test_check_for_another_machine(run_args, capsys, monkeypatch, tmp_path):
    from skyrl_megatron.entrypoints import check
    from tests.support.shared_folder import share

    share(tmp_path.parent, monkeypatch)

    args = [*run_args, "trainer.logger=console", "trainer.placement.policy_num_nodes=2"]
    args += ["trainer.placement.policy_num_gpus_per_node=8", "generator.inference_engine.num_engines=16"]
    assert check.run(["--check=2x8", *args]) == 0
    assert "the run takes 16 GPUs" in capsys.readouterr().out
    assert check.run(["--check=1x8", *args]) == 2 and "there are 8" in capsys.readouterr().err
    assert check.run(["--check=8", *args]) == 2 and "NODESxGPUS" in capsys.readouterr().err


@pytest.mark.process
def test_help():
    code, out, _ = command("--help")
    assert code == 0 and "--check" in out
