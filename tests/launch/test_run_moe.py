"""``launch/run_moe.sh`` as it is typed: recipes, models, ``--check`` with every form, paths of the user's folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from skyrl_megatron_tools.embedded import run_moe
from tests.bridges.tiny_models import tiny_config
from tests.support.whole_folder import write_sums, write_whole_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4", "trainer.logger=console"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of the embedded run, and a model."""
    folder = tmp_path_factory.mktemp("home")
    sizes = dict(hidden_size=64, head_dim=32, num_hidden_layers=2, max_position_embeddings=4096)
    write_whole_folder(folder / "moe", tiny_config("qwen3_moe", **sizes))
    return folder


@pytest.fixture
def folder(tmp_path, home, monkeypatch):
    """The user's folder, with a model, data and a YAML file, and the working directory of this process."""
    shutil.copytree(home / "moe", tmp_path / "models" / "moe")
    write_sums(tmp_path / "rows" / "gsm8k.parquet")
    (tmp_path / "mine.yaml").write_text(
        "trainer: {seed: 5, eval_interval: 7, policy: {model: {path: ./models/moe}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYRL_MEGATRON_HOME", str(home))
    return tmp_path


def run(capsys, *args):
    """Exit code, the resolved configuration as nested dicts (None: none was printed), stdout and stderr."""
    checks = any(arg.partition("=")[0] == "--check" for arg in args)
    code = run_moe.main([*args, "--show-config"] if checks else list(args))
    out, err = capsys.readouterr()
    config = out.partition("# resolved configuration")[2]
    return code, yaml.safe_load(config) if config else None, out, err


def value(config, key):
    for name in key.split("."):
        config = config[name]
    return config


DATA = ["data.train_data=[rows/gsm8k.parquet]", "data.val_data=[]"]


def test_relative_paths_are_those_of_the_folder(folder, capsys):
    template = folder / "chat.jinja"
    template.write_text("{{ messages }}")
    given = {
        "trainer.log_path": "logs",
        "trainer.ckpt_path": "../ckpts",
        "trainer.export_path": "s3://bucket/exports",
        "generator.inference_engine.http_token_path": "token",
        "environment.skyrl_gym.text2sql.db_path": "sql",
        "trainer.policy.megatron_config.torch_profiler_config.save_path": "profile",
    }
    file = ["generator.chat_template.source=file", "generator.chat_template.name_or_path=chat.jinja"]
    args = [f"{key}={path}" for key, path in given.items()]
    code, config, _, err = run(capsys, "--check", "model=models/moe", *DATA, *SMALL, *args, *file)
    assert code == 0, err
    expected = {key: path if "://" in path else os.path.abspath(folder / path) for key, path in given.items()}
    assert {key: value(config, key) for key in given} == expected
    assert value(config, "trainer.policy.model.path") == value(config, "trainer.ref.model.path")
    assert value(config, "trainer.policy.model.path") == str(folder / "models" / "moe")
    assert value(config, "data.train_data") == [str(folder / "rows" / "gsm8k.parquet")]
    assert value(config, "generator.chat_template.name_or_path") == str(template)


def test_paths_do_not_follow_a_process_that_moves(folder, monkeypatch):
    import pickle

    from skyrl_megatron.config import SkyRLTrainConfig

    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.log_path=logs", "trainer.policy.model.path=models/moe"])
    monkeypatch.chdir("/")
    moved = pickle.loads(pickle.dumps(cfg))
    assert moved.trainer.log_path == str(folder / "logs")
    assert moved.trainer.policy.model.path == str(folder / "models" / "moe")


@pytest.mark.parametrize("name", ["org/name", "gpt2", "Qwen/Qwen2.5-1.5B-Instruct"])
def test_names_that_are_no_folder_stay_names(folder, name):
    from skyrl_megatron.config import SkyRLTrainConfig

    def path():
        return SkyRLTrainConfig.from_cli_overrides([f"trainer.policy.model.path={name}"]).trainer.policy.model.path

    assert path() == name
    (folder / name).mkdir(parents=True)
    assert path() == str(folder / name), "a folder of that name is meant"


def test_data_sets_of_the_hub_stay_names(folder):
    from skyrl_megatron.config import SkyRLTrainConfig

    cfg = SkyRLTrainConfig.from_cli_overrides(["data.train_data=['openai/gsm8k:train', rows, ~/x.jsonl]"])
    assert cfg.data.train_data == ["openai/gsm8k:train", str(folder / "rows"), os.path.expanduser("~/x.jsonl")]


LORA_RANK = 64
EMBEDDED = {
    "trainer.policy.optimizer_config.lr": 4e-4,
    "trainer.algorithm.use_kl_loss": False,
    "environment.env_class": "addition",
}


@pytest.mark.parametrize("model", ["model=models/moe", "trainer.policy.model.path=./models/moe"])
def test_a_recipe_keeps_its_keys_with_another_model(folder, capsys, home, model):
    code, config, _, err = run(capsys, "--check", "--recipe", "embedded", model)
    assert code == 0, err
    assert {key: value(config, key) for key in EMBEDDED} == EMBEDDED
    assert value(config, "trainer.policy.model.path") == str(folder / "models" / "moe")
    assert value(config, "data.train_data")[0].endswith("sums/train.parquet")
    _, usual, _, _ = run(capsys, "--check")
    assert value(usual, "trainer.policy.model.path").startswith(str(home))
    for key in ("ckpt_path", "export_path", "log_path"):
        assert value(config, f"trainer.{key}") != value(usual, f"trainer.{key}"), "checkpoints of another model"


def test_adapters_of_the_embedded_run(folder, capsys, home):
    """By the recipe or by a rank: in folders of their own, on what the warm-up leaves once it is there."""
    recipe = ["--recipe", "embedded-lora", "trainer.seed=9"]
    code, config, _, err = run(capsys, "--check", *recipe)
    assert code == 0, err
    seed = home / "embedded" / "seed_9"
    assert value(config, "trainer.policy.model.path") == str(seed / "model")
    assert value(config, "trainer.ckpt_path") == str(seed / "adapters" / "ckpts")
    assert (
        value(config, "environment.env_class") == "addition" and value(config, "trainer.run_name") == "addition-lora"
    )
    _, by_rank, _, _ = run(capsys, "--check", f"trainer.policy.model.lora.rank={LORA_RANK}", "trainer.seed=9")
    assert by_rank == config
    shutil.copytree(seed / "model", seed / "warmed_up_model")
    _, config, _, _ = run(capsys, "--check", *recipe)
    assert value(config, "trainer.policy.model.path") == str(seed / "warmed_up_model")
    _, full, _, _ = run(capsys, "--check", "trainer.seed=9")
    assert value(full, "trainer.policy.model.path") == str(seed / "model"), "a full run warms up itself"


def test_critic_and_teacher_of_the_embedded_run(folder, capsys, home):
    """In folders of their own; the critic begins where the policy does, the teacher is what the embedded run left."""
    seed = home / "embedded" / "seed_8"
    code, config, _, err = run(capsys, "--check", "--recipe", "embedded-ppo", "trainer.seed=8")
    assert code == 0, err
    for role in ("policy", "critic"):
        assert value(config, f"trainer.{role}.model.path") == str(seed / "model")
    assert value(config, "trainer.ckpt_path") == str(seed / "critic" / "ckpts")
    assert value(config, "trainer.algorithm.advantage_estimator") == "gae"
    code, _, _, err = run(capsys, "--check", "--recipe", "embedded-distill", "trainer.seed=8")
    left = seed / "exports" / "global_step_64" / "policy"
    assert code == 2 and f"trainer.teacher.model.path={left}: " in err
    shutil.copytree(seed / "model", left)
    code, config, _, err = run(capsys, "--check", "--recipe", "embedded-distill", "trainer.seed=8")
    assert code == 0, err
    assert value(config, "trainer.teacher.model.path") == str(left)
    assert value(config, "trainer.ckpt_path") == str(seed / "teacher" / "ckpts")


def test_the_embedded_run_that_samples_ahead(folder, capsys, home):
    """By its recipe or by the key alone, in a folder of its own; it warms up itself, as a full run does."""
    (home / "embedded" / "seed_7" / "warmed_up_model").mkdir(parents=True)
    for args in (["--recipe", "embedded-async"], ["trainer.fully_async.enabled=true"]):
        code, config, _, err = run(capsys, "--check", *args, "trainer.seed=7")
        assert code == 0, err
        assert value(config, "trainer.ckpt_path") == str(home / "embedded" / "seed_7" / "async" / "ckpts")
        assert value(config, "trainer.policy.model.path") == str(home / "embedded" / "seed_7" / "model")
        assert value(config, "trainer.fully_async.max_staleness_steps") == 1
        assert value(config, "generator.batched") is False


def test_the_embedded_run_with_muon(folder, capsys, home):
    """By its recipe or by the key alone, in a folder of its own; it warms up itself, with Muon."""
    (home / "embedded" / "seed_5" / "warmed_up_model").mkdir(parents=True)
    for args in (["--recipe", "embedded-muon"], ["trainer.policy.optimizer_config.optimizer=muon"]):
        code, config, _, err = run(capsys, "--check", *args, "trainer.seed=5")
        assert code == 0, err
        assert value(config, "trainer.ckpt_path") == str(home / "embedded" / "seed_5" / "muon" / "ckpts")
        assert value(config, "trainer.policy.model.path") == str(home / "embedded" / "seed_5" / "model")
        assert value(config, "trainer.policy.optimizer_config.adam_lr") == 4e-4
        assert value(config, "trainer.run_name") == "addition-muon"


def test_the_miniature_of_a_benchmark(folder, capsys, home):
    """Held-out tasks, learning rate and clip by the batch size; the curriculum once its file exists."""
    seed, recipe = home / "embedded" / "seed_6", ["--recipe", "embedded-mlperf", "trainer.seed=6"]
    code, config, _, err = run(capsys, "--check", *recipe)
    assert code == 0, err
    assert value(config, "trainer.ckpt_path") == str(seed / "mlperf" / "ckpts")
    assert value(config, "data.sampler") == "shuffle"
    assert value(config, "data.eval_sets")["held_out"]["data"] == [str(seed / "sums" / "held_out.parquet")]
    assert value(config, "trainer.policy.optimizer_config.lr") == 3e-4
    assert value(config, "trainer.policy.optimizer_config.max_grad_norm") == 0.08839
    (seed / "mlperf").mkdir(parents=True, exist_ok=True)
    (seed / "mlperf" / "curriculum.txt").write_text("".join(f"{row}\n" for row in range(256)))
    code, config, _, err = run(capsys, "--check", *recipe, "generator.n_samples_per_prompt=2")
    assert code == 0, err
    assert value(config, "data.sampler") == "list"
    assert value(config, "trainer.policy.optimizer_config.lr") == 1.5e-4
    assert value(config, "trainer.policy.optimizer_config.max_grad_norm") == 0.1768


def test_a_model_alone_takes_no_recipe(folder, capsys):
    _, config, _, _ = run(capsys, "--check", "model=models/moe", *DATA, *SMALL)
    assert value(config, "environment.env_class") == "gsm8k"
    assert value(config, "trainer.policy.optimizer_config.lr") == 1e-6


def test_files_are_recipes_too(folder, capsys):
    for form in (["--recipe", "./mine.yaml"], ["--recipe=mine.yaml"], ["--config", "mine.yaml"]):
        code, config, _, err = run(capsys, "--check", *form, *DATA, *SMALL)
        assert code == 0, err
        assert value(config, "trainer.eval_interval") == 7
        assert value(config, "trainer.policy.model.path") == str(folder / "models" / "moe")
    shutil.copytree(folder / "models" / "moe", folder / "other")
    _, config, _, _ = run(capsys, "--check", "--recipe", "./mine.yaml", "model=other", *DATA, *SMALL)
    assert value(config, "trainer.policy.model.path") == str(folder / "other")
    assert value(config, "trainer.seed") == 5


FORMS = {
    "embedded": [],
    "adapters": ["--recipe=embedded-lora"],
    "critic": ["--recipe=embedded-ppo"],
    "recipe": ["--recipe", "embedded"],
    "file": ["--recipe", "./mine.yaml", *DATA, *SMALL],
    "model": ["model=models/moe", *DATA, *SMALL],
}


@pytest.mark.parametrize("form", FORMS)
def test_check_for_another_machine_with_every_form(folder, capsys, form):
    apart = ["trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=false"]
    code, _, out, err = run(capsys, "--check=2x8", *FORMS[form], *apart)
    assert code == 0, err
    assert "8 GPUs per node, 2 node(s)" in out


@pytest.mark.process  # a command starts its fork server first
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--recipe", "embeded"], ["--recipe=embeded", "did you mean embedded?"]),
        (["--recipe"], ["--recipe=", "give a name"]),
        (["--recipe", "./none.yaml"], ["none.yaml", "no such file"]),
        (["--recipe", "embedded", "--recipe=./mine.yaml"], ["give one", "--config"]),
        (["--chek"], ["--chek", "did you mean --check?"]),
        (["--chek=2x8", "model=models/moe"], ["did you mean --check?"]),
        (["--confg", "mine.yaml", "model=models/moe"], ["did you mean --config?"]),
        (["--check", "2x8"], ["2x8", "--check=2x8"]),
        (["--check=8"], ["--check=8", "NODESxGPUS"]),
        (["--check=0x8"], ["--check=0x8", "NODESxGPUS"]),
    ],
)
def test_mistyped_options_get_a_close_match(folder, capsys, args, words):
    code, config, _, err = run(capsys, *args)
    assert code == 2 and config is None
    assert all(word in err for word in words) and "Traceback" not in err, err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["trainer.epochs=3", "trainer.epochs=4"], "trainer.epochs=3, then trainer.epochs=4"),
        (["model=models/moe", "model=other"], "trainer.policy.model.path=models/moe, then"),
        (["trainer={epochs: 3}", "trainer.epochs=4"], "trainer.epochs=3, then trainer.epochs=4"),
        (
            ["generator.chat_template_kwargs.a=1", "generator.chat_template_kwargs.a=2"],
            "chat_template_kwargs.a=1, then",
        ),
        (
            ["trainer.epochs=3", "trainer.seed=1", "trainer.epochs=4", "trainer.seed=2"],  # as a script's "$@"
            "counts: trainer.epochs=3, then trainer.epochs=4; trainer.seed=1, then trainer.seed=2\n",
        ),
        (["trainer.epochs=3", "trainer.epochs=3"], None),
        (["--config=mine.yaml", "trainer.seed=6"], None),
        (["generator.chat_template_kwargs.a=1", "generator.chat_template_kwargs.b=2"], None),
    ],
)
def test_a_key_given_twice_is_told(folder, capsys, args, told):
    """Also where the run ends with an error; a file and a key that overrides it are no mistake."""
    shutil.copytree(folder / "models" / "moe", folder / "other")
    model = [] if any("model" in arg for arg in args) else ["model=models/moe"]
    _, _, _, err = run(capsys, "--check", *model, *args, *DATA, *SMALL)
    assert err.count("given twice") == (told is not None)
    assert told is None or told in err


def test_the_embedded_run_s_own_keys_are_given_once(folder, capsys):
    code, config, _, err = run(capsys, "--check", "trainer.seed=3", "trainer.log_path=logs")
    assert code == 0 and "given twice" not in err
    assert value(config, "trainer.log_path") == str(folder / "logs") and value(config, "trainer.seed") == 3


def test_plugins_lie_in_the_folder(folder, capsys, monkeypatch):
    """Also for a process that runs elsewhere, as the actor of a joined cluster does."""
    from skyrl_megatron import plugins

    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    monkeypatch.delenv(plugins.FOLDERS, raising=False)
    monkeypatch.setenv(plugins.VARIABLE, "")
    (folder / "beside.py").write_text("")
    code, _, _, err = run(capsys, "--check", "model=models/moe", *DATA, *SMALL, "trainer.plugins=[beside]")
    assert code == 0, err
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(folder)])
    del sys.modules["beside"]
    plugins.load_plugins()
    assert sys.modules.pop("beside").__file__ == str(folder / "beside.py")


# --- the script itself ----------------------------------------------------------------------------------------------


def script(folder, *args, link=None):
    command = link or ROOT / "launch" / "run_moe.sh"
    return subprocess.run([command, *args], cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.process
def test_help_is_true(folder):
    """Before anything is installed; every option that it names is one."""
    shown = script(folder, "--check", "--help")
    assert shown.returncode == 0 and shown.stderr == ""
    for option in ("--recipe NAME", "--config FILE.yaml", "--check", "--check=2x8", "model=PATH_OR_NAME"):
        assert option in shown.stdout
    assert all(line and not line.startswith(("#", "set ")) for line in shown.stdout.splitlines())


@pytest.mark.process
def test_the_script_stays_in_the_folder_it_is_typed_in(folder):
    """Through a link too; a file of the folder that is called like a package hides none. The set-up is left out."""
    checkout = folder / "checkout"
    (checkout / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "run_moe.sh", checkout / "launch")
    (checkout / "launch" / "setup.sh").write_text("#!/bin/sh\n")
    (checkout / "launch" / "setup.sh").chmod(0o755)
    for name in (*(path.name for path in ROOT.glob("skyrl_megatron*/") if path.name.isidentifier()), "bridges"):
        (checkout / name).symlink_to(ROOT / name)
    (checkout / ".venv").symlink_to(sys.prefix)
    link = folder / "run"
    link.symlink_to(checkout / "launch" / "run_moe.sh")
    (folder / "yaml.py").write_text("raise RuntimeError('mine')\n")
    done = script(folder, "--check", "--show-config", "model=models/moe", *DATA, *SMALL, link=link)
    assert done.returncode == 0, done.stderr
    assert f"path: {folder}/models/moe" in done.stdout and f"- {folder}/rows/gsm8k.parquet" in done.stdout
