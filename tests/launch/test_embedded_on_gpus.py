"""The README's command on machines with GPUs: what it comes to, and that it is a run that can start."""

import pytest
import yaml

from skyrl_megatron_tools.embedded import run_moe

PLACE = "trainer.placement.policy_num_gpus_per_node"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def check(capsys, monkeypatch, home, *args):
    """Exit code, resolved configuration and stderr of ``--check --show-config``."""
    monkeypatch.setenv("SKYRL_MEGATRON_HOME", str(home))
    code = run_moe.main([*args, "--show-config"])
    out, err = capsys.readouterr()
    text = out.partition("# resolved configuration")[2]
    return code, yaml.safe_load(text) if text else None, err


def layout(config):
    """(ranks, experts split over, engines, whether they share the GPUs)."""
    placement = config["trainer"]["placement"]
    return (
        placement["policy_num_gpus_per_node"],
        config["trainer"]["policy"]["megatron_config"]["expert_model_parallel_size"],
        config["generator"]["inference_engine"]["num_engines"],
        placement["colocate_all"],
    )


@pytest.mark.parametrize(
    ("gpus", "expected"), [(1, (1, 1, 1, True)), (2, (2, 2, 2, True)), (4, (2, 2, 2, True)), (8, (2, 2, 2, True))]
)
def test_any_number_of_gpus(capsys, monkeypatch, home, gpus, expected):
    code, config, err = check(capsys, monkeypatch, home, f"--check=1x{gpus}")
    assert code == 0, err
    assert layout(config) == expected


@pytest.mark.parametrize(("asked", "expected"), [(4, (4, 2, 4, True)), (3, (3, 1, 3, True))])
def test_as_many_as_the_user_says(capsys, monkeypatch, home, asked, expected):
    sizes = ["trainer.policy_mini_batch_size=384", "trainer.train_batch_size=384"]  # 3 ranks divide it
    code, config, err = check(capsys, monkeypatch, home, "--check=1x8", f"{PLACE}={asked}", *sizes)
    assert code == 0, err
    assert layout(config) == expected


def test_more_ranks_than_gpus_are_refused(capsys, monkeypatch, home):
    code, _, err = check(capsys, monkeypatch, home, "--check=1x2", f"{PLACE}=4")
    assert code == 2 and f"{PLACE}=4" in err and "a node has 2 GPUs" in err


def test_on_cpu_as_on_two_gpus(capsys, monkeypatch, home):
    code, config, err = check(capsys, monkeypatch, home, "--check=1x0")
    assert code == 0, err
    assert layout(config) == (2, 2, 2, True)
