"""Each mistake gets one message with key, value and fix, from ``--check`` and from the run, before anything starts."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from skyrl_megatron_tools.embedded import run_moe
from tests.first_hour.mistakes import MISTAKES, M, Mistake, command_line, usual, write_files

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def folder(files, tmp_path, monkeypatch):
    for name in ("RAY_ADDRESS", "WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_without_a_mistake_there_is_nothing_to_say(folder, capsys):
    """And nothing is left behind in the folders that were tried."""
    code = run_moe.main(["--check", *usual(folder)])
    out, err = capsys.readouterr()
    assert code == 0 and err == "", err
    assert "# not checked here" not in out
    assert sorted(path.name for path in folder.iterdir()) == ["model", "rows.parquet"]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_told(mistake: Mistake, folder, capsys, monkeypatch):
    args = command_line(folder, mistake)
    for name, value in mistake.environment.items():
        monkeypatch.setenv(name, value)
    with mistake.holds():
        for form in (["--check"], []):
            code = run_moe.main([*form, *args])
            out, err = capsys.readouterr()
            assert code == 2, out[-2000:] + err
            assert "1 problem in the configuration:" in err and "Traceback" not in err, err
            assert all(words in err for words in mistake.says), err
            assert out == "", "one error, and no half of a report"
    assert not (folder / "log").exists()


def test_all_mistakes_of_a_command_are_told_at_once(folder, capsys):
    some = ("exports in /proc", "engine_init_kwargs", "a loss that knows no lag", "no tokenizer")
    wrong = [mistake for mistake in MISTAKES if mistake.name in some]
    args = [argument for mistake in wrong for argument in mistake.arguments(folder)]
    assert run_moe.main(["--check", *usual(folder), *args, "trainer.sed=1"]) == 2
    err = capsys.readouterr().err
    assert "5 problems in the configuration:" in err and "trainer.sed=1" in err
    for mistake in wrong:
        assert all(words in err for words in mistake.says), err


def test_a_check_needs_no_weights(folder, capsys):
    """``config.json`` and the data are enough to find all mistakes that they can show, for a machine elsewhere too.
    The run itself does need the other files."""
    for path in (folder / "model").iterdir():
        if path.name != "config.json":
            path.unlink()
    settings = [argument for argument in usual(folder) if not argument.startswith("trainer.train_batch")]
    assert run_moe.main(["--check=1x8", *usual(folder)]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "no *.safetensors yet" in out and "no tokenizer yet" in out and "# policy" in out
    wrong = ["trainer.train_batch_size=1024", "trainer.sed=1", f"{M}optimizer_config_kwargs.adam_ep=1e-8"]
    wrong += [f"{M}tensor_model_parallel_size=3", "environment.env_class=gsm9k"]
    assert run_moe.main(["--check=1x8", *settings, *wrong]) == 2
    err = capsys.readouterr().err
    for says in ("8 prompts do not fill one batch", "sed=1", "adam_ep", "tensor_model_parallel_size=3", "'gsm9k'"):
        assert says in err, err
    assert "safetensors" not in err and "tokenizer" not in err
    assert run_moe.main(usual(folder)) == 2
    err = capsys.readouterr().err
    assert "has no tokenizer" in err and "safetensors" in err


def test_a_key_that_is_misspelt_is_refused_before_libraries_are_loaded(folder):
    """Most commands that are refused are refused for this; torch and transformers take seconds to load."""
    script = (
        "import sys; from skyrl_megatron_tools.embedded import run_moe; code = run_moe.main(sys.argv[1:]); "
        "print(code, *[name for name in ('torch', 'transformers', 'ray', 'vllm', 'pyarrow') if name in sys.modules])"
    )
    args = [*usual(folder), "trainer.sed=1"]
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=300)
    assert done.stdout == "2\n" and "trainer.sed=1: unknown key" in done.stderr, done.stderr


def test_a_script_is_refused_what_a_command_is(folder):
    """``validate_cfg`` goes through the same list; an experiment made without it refuses what does not exist."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.utils import validate_cfg

    args = [argument.replace("model=", "trainer.policy.model.path=") for argument in usual(folder)[:1]]
    args += usual(folder)[1:]
    validate_cfg(SkyRLTrainConfig.from_cli_overrides(args))
    dots1 = shutil.copytree(folder / "model", folder / "dots1")
    config = json.loads((dots1 / "config.json").read_text())
    (dots1 / "config.json").write_text(json.dumps(config | {"model_type": "dots1"}))
    later = [*args[1:], f"trainer.policy.model.path={dots1}"]
    with pytest.raises(ConfigError, match="no engine runs dots1") as refused:
        wrong = ["trainer.resume_mode=from_path", "trainer.resume_path=/none"]
        validate_cfg(SkyRLTrainConfig.from_cli_overrides([*later, *wrong]))
    assert "trainer.resume_path=/none" in str(refused.value)
    with pytest.raises(ConfigError, match="no engine runs dots1"):
        BasePPOExp(SkyRLTrainConfig.from_cli_overrides(later))


def test_a_script_may_register_its_environment_later(folder):
    from skyrl_megatron.checks import PlannedRun, run_checks
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import local_hardware
    from tests.support.whole_folder import write_sums

    rows = write_sums(folder / "rows.parquet", env_class=["mine_to_come"] * 8)
    args = [f"trainer.policy.model.path={folder}/model", f"data.train_data=[{rows}]", "data.val_data=[]"]
    args += ["trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4", "trainer.logger=console"]
    cfg = SkyRLTrainConfig.from_cli_overrides(args)
    found = run_checks(PlannedRun(cfg, local_hardware(), scripted=True))
    assert found.problems == [] and any("mine_to_come" in str(each) for each in found.not_checked)
    refused = run_checks(PlannedRun(cfg, local_hardware()))
    assert ["no environment 'mine_to_come'" in problem.fix for problem in refused.problems] == [True]


def test_an_environment_that_no_row_takes_is_told(folder, capsys):
    assert run_moe.main(["--check", *usual(folder), "environment.env_class=multiply"]) == 0
    err = capsys.readouterr().err
    assert "environment.env_class=multiply has no effect: every row names its own environment (gsm8k)" in err


def test_rows_without_an_answer_for_an_environment_of_ones_own_are_told(folder, capsys):
    from skyrl_megatron.envs import BaseTextEnv, deregister, register
    from tests.support.whole_folder import write_sums

    rows = write_sums(folder / "train.parquet", env_class=["mine"] * 8, reward_spec=None)
    register("mine", type("Mine", (BaseTextEnv,), {"__module__": __name__}))
    try:
        args = [*usual(folder), f"data.train_data=[{rows}]", "data.val_data=[]"]
        assert run_moe.main(["--check", *args]) == 0
    finally:
        deregister("mine")
    assert (
        "8 of 8 rows have no reward_spec, so environment mine cannot compute their reward" in capsys.readouterr().err
    )


def test_what_only_the_run_can_tell_is_listed(folder, capsys):
    args = [*usual(folder), "trainer.ckpt_path=memory://x"]
    args += ["trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=false"]
    assert run_moe.main(["--check=1x8", *args]) == 0
    listed = capsys.readouterr().out.partition("# not checked here\n")[2].partition("\n\n")[0]
    for what in ("trainer.ckpt_path=memory://x: ", "GPUs: ", "GPU memory: "):
        assert what in listed


def test_an_argument_that_the_template_does_not_read_is_told(folder, capsys):
    args = ["generator.chat_template_kwargs.enable_thinkin=false"]
    assert run_moe.main(["--check", *usual(folder), *args]) == 0
    assert "enable_thinkin=False: the chat template does not use it" in capsys.readouterr().err


@pytest.mark.process
def test_as_it_is_typed(folder):
    """By the command itself; neither Ray nor an engine was begun."""
    (mistake,) = [mistake for mistake in MISTAKES if mistake.name == "weights cut off"]
    args = command_line(folder, mistake)
    command = [sys.executable, "-m", "skyrl_megatron_tools.embedded.run_moe", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 2 and done.stdout == ""
    assert "Traceback" not in done.stderr and all(words in done.stderr for words in mistake.says)
