"""``launch/examples/dapo.py``: the length penalty, its keys, and a step of a run."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.job import runs

EXAMPLE = Path(__file__).parents[2] / "launch" / "examples" / "dapo.py"


@pytest.fixture(scope="module")
def dapo():
    """The names of the example, as a module that has a source file."""
    specification = importlib.util.spec_from_file_location("dapo", EXAMPLE)
    sys.modules["dapo"] = module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    yield vars(module)
    del sys.modules["dapo"]


def test_the_penalty_grows_in_the_buffer(dapo):
    penalty = dapo["overlong_penalty"]
    assert [penalty(length, 100, 20, 2.0) for length in (1, 80, 85, 90, 100, 120)] == [0, 0, 0.5, 1, 2, 2]
    assert penalty(100, 100, 0, 2.0) == 0


def test_keys_and_defaults(dapo):
    from skyrl_megatron.config import make_config

    cls = make_config(algorithm_cls=dapo["DAPOAlgorithmConfig"])
    algorithm = cls.from_cli_overrides(["trainer.algorithm.overlong_buffer_len=64"]).trainer.algorithm
    assert (algorithm.overlong_buffer_len, algorithm.overlong_buffer_penalty_factor) == (64, 1.0)
    assert (algorithm.eps_clip_low, algorithm.eps_clip_high, algorithm.dynamic_sampling.type) == (0.2, 0.28, "filter")
    assert algorithm.loss_reduction == "token_mean" and not algorithm.use_kl_loss


def test_help_tells_the_keys_of_the_script(dapo, capsys):
    from dataclasses import make_dataclass

    from skyrl_megatron.config import AlgorithmConfig, make_config
    from skyrl_megatron.entrypoints.main_base import main

    assert main(["--help"], config=make_config(algorithm_cls=dapo["DAPOAlgorithmConfig"])) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-2].startswith("  trainer.algorithm.overlong_buffer_len=256  Tokens before")
    assert told[-1].startswith("  trainer.algorithm.overlong_buffer_penalty_factor=1.0  What a response")
    made = make_dataclass("Made", [("my_key", int, 3)], bases=(AlgorithmConfig,))  # has no source
    assert main(["--help"], config=make_config(algorithm_cls=made)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  trainer.algorithm.my_key=3"


def test_the_penalty_is_taken_off_the_last_token(dapo):
    """By the trainer's own conversion; the environment's rewards stay as they are for whoever holds them."""
    import numpy as np

    from skyrl_megatron.algorithms.estimator_state import estimator_state
    from skyrl_megatron.config import make_config
    from skyrl_megatron.sources.run_state import RunState
    from skyrl_megatron.trainer.recorders import Recorders

    cls = make_config(algorithm_cls=dapo["DAPOAlgorithmConfig"])
    keys = ["trainer.algorithm.overlong_buffer_len=4", "generator.sampling_params.max_generate_length=6"]
    trainer = dapo["DAPOTrainer"].__new__(dapo["DAPOTrainer"])  # without engines and ranks, which it does not ask
    trainer.cfg = cls.from_cli_overrides(keys)
    trainer.run_state = RunState(1, {}, None, print)
    trainer.estimator = estimator_state(trainer.cfg.trainer.algorithm)
    trainer.recorders = Recorders.__new__(Recorders)
    trainer.recorders._recorders = []
    lengths, total = (6, 3, 2), (-0.5, 0.25, 0.5)
    output = {
        "prompt_token_ids": [[1]] * 3,
        "response_ids": [[1] * length for length in lengths],
        "loss_masks": [[1] * length for length in lengths],
        "rewards": [[*[0.0] * (length - 1), 0.5] for length in lengths],
        "stop_reasons": ["length", "stop", "stop"],
        "rollout_metrics": {},
        "rollout_logprobs": None,
    }
    batch = trainer.convert_to_training_input(output, ["a", "a", "b"])
    assert batch.padded().rewards.sum(dim=1).tolist() == pytest.approx(total)
    assert np.count_nonzero(batch.rewards.numpy()) == 3, "one token of each response"
    assert trainer.metrics["reward/overlong_penalty"] == pytest.approx((1 + 0.25 + 0) / 3)
    assert [row[-1] for row in output["rewards"]] == [0.5] * 3


@pytest.mark.full_matrix
@pytest.mark.process
def test_a_step(tmp_path):
    """The penalty reaches what is trained on, and neither the reported rewards nor the choice of prompts."""
    runs.prepare(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from digits import Digits\nfrom skyrl_megatron.envs import register\n\nregister('digits', Digits)\n"
    )
    keys = {"trainer__plugins": "[mine]", "trainer__max_training_steps": 1}
    keys["trainer__algorithm__overlong_buffer_len"] = 4
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *runs.arguments(tmp_path, **keys)],
        env=runs.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=runs.TIMEOUT_S,
    )
    (line,) = runs.Run(done.returncode, done.stdout, done.stderr, tmp_path).check().lines
    assert 0 < line["reward/overlong_penalty"] <= 1
    rewards = line["reward/avg_raw_reward"]
    assert 0 <= rewards <= 1 and line["generate/sampled_batches"] >= 1
    assert line["loss/avg_final_rewards"] == pytest.approx(rewards - line["reward/overlong_penalty"], abs=1e-6)
