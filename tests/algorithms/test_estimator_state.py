"""What estimators remember over the steps of a run, and what of it is in a checkpoint."""

import pytest


def state_of(name, **settings):
    from skyrl_megatron.algorithms.estimator_state import estimator_state
    from skyrl_megatron.config import SkyRLTrainConfig

    keys = [f"trainer.algorithm.{key}={value}" for key, value in {"advantage_estimator": name, **settings}.items()]
    return estimator_state(SkyRLTrainConfig.from_cli_overrides(keys).trainer.algorithm)


def test_most_estimators_need_nothing_more():
    state = state_of("grpo")
    assert state.arguments(lambda: pytest.fail("asked for roles")) == {} == state.state() and state.reward_names == ()
    state.load_state({"global_step": 3})


def test_separate_rewards_are_columns():
    assert state_of("gdpo", gdpo_weights="{right: 1.0, short: 0.5}").reward_names == ("right", "short")


def test_baselines_of_roles_are_in_a_checkpoint_once_there_are_some():
    """Under the key that checkpoints of earlier versions have; what a step changes later is not in it."""
    state = state_of("rae")
    assert state.state() == {}
    given = state.arguments(lambda: ["first", "second"])
    assert given["roles"] == ["first", "second"]
    given["baselines"]["first"] = 0.5
    saved = state.state()
    given["baselines"]["first"] = 0.7
    assert saved == {"role_baselines": {"first": 0.5}}
    state.load_state({"global_step": 3, **saved})
    assert state.arguments(list)["baselines"] == {"first": 0.5}
    state.load_state({"global_step": 3})
    assert state.state() == {}


def test_an_estimator_of_ones_own_may_have_a_state():
    from skyrl_megatron.algorithms.estimator_state import ESTIMATOR_STATES, EstimatorState, register_estimator_state
    from skyrl_megatron.config import AlgorithmConfig

    class Steps(EstimatorState):
        pass

    try:
        register_estimator_state("counting")(Steps)
        assert isinstance(ESTIMATOR_STATES.find("counting")(AlgorithmConfig()), Steps)
    finally:
        ESTIMATOR_STATES._classes.pop("counting")
