"""What SkyRL's documents show, as scripts of our own: the same imports but for the root, names, signatures and calls.

``scripts/`` has one for each subject: algorithms, their registry, the registry with Ray, data set and environment,
configuration, trainer. The command of the overview is parsed here.
"""

import functools
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.job import runs

SCRIPTS = Path(__file__).with_name("scripts")


@pytest.fixture(autouse=True)
def registries():
    """The registries of estimators and losses, as they were afterwards."""
    from skyrl_megatron.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry

    yield
    AdvantageEstimatorRegistry.repopulate()
    PolicyLossRegistry.repopulate()


def script(name):
    """The names of a script that ran in this process."""
    return runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


def test_algorithms():
    """An estimator gives what it computes; a loss that returns a scalar counts, with and without the last argument."""
    import torch

    from skyrl_megatron.algorithms.objective import PolicyObjective, _warned
    from skyrl_megatron.algorithms.reduction import StepTotals
    from skyrl_megatron.config import AlgorithmConfig
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.utils.ppo_utils import AdvantageEstimatorRegistry, compute_advantages_and_returns

    names = script("algorithms")
    assert "registered_directly" in AdvantageEstimatorRegistry.list_available()
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 4.0]]), torch.ones(3, 2)
    advantages, returns = compute_advantages_and_returns(rewards, mask, [0, 0, 1], "above_median", AlgorithmConfig())
    assert advantages.tolist() == returns.tolist() == [[-2, -2], [0, 0], [1, 1]]
    log_probs = torch.full((2, 2), -0.5, requires_grad=True)
    for name in ("log_prob_times_advantage", "without_engine_log_probs"):
        _warned.clear()
        config = AlgorithmConfig(policy_loss_type=name, use_kl_loss=False)
        with pytest.warns(SkyRLMegatronWarning, match="returns a scalar"):
            loss, _ = PolicyObjective(config)(
                StepTotals(tokens=4, rows=2, prompt_tokens={"a": 4}),
                log_probs,
                torch.tensor([[1.0, 2], [3, 4]]),
                torch.ones(2, 2),
                old_log_probs=log_probs.detach(),
                rollout_log_probs=log_probs.detach(),
                uids=["a", "a"],
            )
        assert loss.item() == pytest.approx(0.5 * 2.5)
    assert names["loss_of_the_registry"].__name__ == "compute_plain_loss"


def test_the_registry():
    from skyrl_megatron.config.schema.algorithm import AdvantageEstimator, PolicyLossType

    names = script("registry")
    ours = {*AdvantageEstimator, *PolicyLossType}
    assert {*names["estimators"], *names["losses"]} <= ours
    assert names["schedules"] == ["linear"]
    assert [function.__name__ for function in names["found"]] == ["compute_mine", "compute_mine_too"]
    assert set(names["names_left"]) == set(names["names_again"]) == set(names["names_at_last"]) == ours
    assert names["names_after_reset"] == []
    assert all(map(callable, names["built_in"]))


@pytest.mark.process
def test_the_registry_with_ray(session_ray, monkeypatch):
    """``ray.init()`` joins the session's Ray; the rest is as a user starts it."""
    import ray

    monkeypatch.setattr(ray, "init", functools.partial(ray.init, session_ray.address))
    try:
        names = script("registry_with_ray")
    finally:
        ray.shutdown()
    assert {"of_the_driver", "grpo", "gae"} <= set(names["names"])
    assert names["answer"] == "the driver's" and names["held"] == ["of_the_driver"]
    assert names["stored"] == names["taken"] == b"bytes" and names["left"] == []


def test_rows_and_their_environment(tmp_path):
    import json

    from skyrl_megatron import envs
    from skyrl_megatron.data.prompts import PromptDataset
    from tests.rollout.scripted import tokenizer_of

    names = script("multiply")
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in names["rows"](20, "train")))
    messages, env_class, extras, _ = PromptDataset(str(file), tokenizer_of("chatml"), 512)[3]
    assert [message["role"] for message in messages] == ["system", "user"] and env_class == "multiply"
    ours = envs.spec("multiply")
    try:
        envs.register(id="multiply", entry_point=names["MultiplyEnv"], override=True)
        first, second = map(int, messages[1]["content"].split(" * "))
        env = envs.make("multiply", extras=extras)
        assert env.init(messages) == (messages, {})
        step = env.step(rf"It is \boxed{{ {first * second} }}.")
        assert step["reward"] == 1.0 and step["done"] and step["metadata"]["parsed_answer"].strip() == env.ground_truth
        assert envs.make("multiply", extras=extras).step(rf"\boxed{{{first}}}")["reward"] == 0.0
    finally:
        envs.register(ours.id, ours.entry_point, override=True)


def test_an_environment_by_an_id_of_ours_is_one_problem_with_its_fix(tmp_path, monkeypatch, capsys):
    """As the overview's ``multiply`` is, registered without a word about ours."""
    from skyrl_megatron.entrypoints.main_base import main

    shutil.copy(SCRIPTS / "multiply.py", tmp_path / "of_the_overview.py")
    register = "from of_the_overview import MultiplyEnv\nfrom skyrl_megatron.envs import register\n\n"
    (tmp_path / "taken.py").write_text(f"{register}register(id='multiply', entry_point=MultiplyEnv)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--check", "trainer.plugins=[taken]"]) == 2
    told = capsys.readouterr().err
    assert "1 problem" in told and "environment 'multiply' is built in" in told
    assert "register('multiply', ..., override=True)" in told and "Traceback" not in told


COMMAND = """
-m skyrl_megatron.entrypoints.main_base
data.train_data="['$HOME/data/gsm8k/train.parquet']" data.val_data="['$HOME/data/gsm8k/validation.parquet']"
trainer.algorithm.advantage_estimator="grpo" trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct"
trainer.strategy=fsdp2 trainer.placement.colocate_all=true trainer.placement.policy_num_gpus_per_node=4
trainer.eval_batch_size=1024 trainer.eval_before_train=true trainer.eval_interval=5 trainer.ckpt_interval=10
generator.backend=vllm generator.num_inference_engines=4 generator.inference_engine_tensor_parallel_size=1
generator.weight_sync_backend=nccl environment.env_class=gsm8k
trainer.logger="wandb" trainer.project_name="gsm8k" trainer.run_name="gsm8k_test"
"""


def test_the_command_of_the_overview():
    """Every key is known, the flat ones of older scripts by one warning, and says what it says there."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.validate import find_problems
    from skyrl_megatron.errors import SkyRLMegatronWarning

    _, module, *arguments = shlex.split(COMMAND.replace("$HOME", "/home/me"))
    assert (SCRIPTS.parents[2] / module.replace(".", "/")).with_suffix(".py").is_file()
    with pytest.warns(DeprecationWarning, match=r"generator\.num_inference_engines"):
        cfg = SkyRLTrainConfig.from_cli_overrides(arguments)
    assert cfg.data.val_data == ["/home/me/data/gsm8k/validation.parquet"]
    engine = cfg.generator.inference_engine
    assert (engine.backend, engine.num_engines, engine.tensor_parallel_size) == ("vllm", 4, 1)
    assert (engine.weight_sync_backend, cfg.environment.env_class, cfg.trainer.eval_batch_size) == (
        "nccl",
        "gsm8k",
        1024,
    )
    with pytest.warns(SkyRLMegatronWarning):  # no WANDB_API_KEY, another strategy
        assert find_problems(cfg, Hardware(gpus_per_node=4, nodes=1)) == []


def test_configurations():
    from skyrl_megatron.config import AlgorithmConfig, SkyRLTrainConfig

    names = script("configuration")
    assert names["by_list"] == names["by_dict"] == names["by_node"]
    assert names["by_list"].trainer.policy.model.path == "acme/model" and names["by_list"].trainer.seed == 123
    assert Path(names["by_parts"].data.train_data[0]).name == "rows.parquet" and names["by_parts"].trainer.seed == 3
    mine = names["mine"]
    assert isinstance(mine, SkyRLTrainConfig) and isinstance(mine.trainer.algorithm, AlgorithmConfig)
    assert (mine.trainer.algorithm.my_param, mine.generator.tries) == (7, 3)
    assert names["plain"]["trainer"]["algorithm"]["my_param"] == 7 and "my_param: 7" in names["text"]
    with pytest.raises(ValueError, match="'\\+' adds or removes keys in Hydra"):
        SkyRLTrainConfig.from_cli_overrides(["+trainer.algorithm.my_param=7"])


@pytest.mark.parametrize("name", ["DataConfig", "MegatronConfig", "AlgorithmConfig", "GeneratorConfig", "RefConfig"])
def test_sections_by_themselves(name):
    """Each class can be made without arguments and from a DictConfig, which names wrong keys."""
    from omegaconf import OmegaConf

    from skyrl_megatron import config

    cls = getattr(config, name)
    plain = config.get_config_as_dict(cls())
    assert cls.from_dict_config(OmegaConf.create(plain)) == cls() == cls.from_dict_config(OmegaConf.create({}))
    with pytest.raises(ValueError, match="none_such"):
        cls.from_dict_config(OmegaConf.create({"none_such": 1}))


@pytest.mark.process
def test_a_trainer_runs(tmp_path):
    """The whole script: a ``DictConfig`` from start to end, registered functions, a remote entry point."""
    for name in ("algorithms", "trainer"):
        shutil.copy(SCRIPTS / f"{name}.py", tmp_path)
    runs.prepare(tmp_path)
    keys = {"trainer__algorithm__advantage_estimator": "above_median", "trainer__max_training_steps": 1}
    keys["trainer__algorithm__policy_loss_type"] = "log_prob_times_advantage"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "trainer.py"), *runs.arguments(tmp_path, **keys)],
        env=runs.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=runs.TIMEOUT_S,
    )
    (line,) = runs.Run(done.returncode, done.stdout, done.stderr, tmp_path).check().lines
    assert -0.25 <= line["reward/avg_raw_reward"] < 0.75
    assert line["policy/grad_norm"] > 0
    assert "step 1/1 · reward" in done.stdout, "the remote entry point's lines reach the terminal"
