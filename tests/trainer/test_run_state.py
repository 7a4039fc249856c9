"""What a part of a step changes of a run, and how a repeated part begins from what was before it."""

from contextlib import nullcontext


def run_state():
    from skyrl_megatron.sources.run_state import RunState

    return RunState(total_steps=9, position={}, phases=lambda name: nullcontext(), say=print, step=4)


def test_a_part_is_undone_as_often_as_it_fails():
    run = run_state()
    run.metrics = {"reward": 1.0}
    before = run.snapshot()
    for _ in range(2):
        run.metrics |= {"loss": 2.0}
        run.metrics["reward"] = 3.0
        run.step, run.epochs, run.finite = 5, 1, False
        run.restore(before)
        assert (run.step, run.epochs, run.finite, run.metrics) == (4, 0, True, {"reward": 1.0})


def test_a_trainer_and_its_sources_share_the_state():
    """Scripts read and set the trainer's attributes."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from tests.config.settings.loop import trainer_of

    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4"])
    trainer = trainer_of(cfg)
    assert trainer.rollouts.run is trainer.run_state is trainer.recovery.state
    trainer.global_step, trainer.total_steps, trainer.metrics = 2, 7, {}
    trainer.metrics["own"] = 1.0
    trainer.metrics |= {"more": 2.0}
    run = trainer.run_state
    assert (run.step, run.total_steps, run.metrics) == (2, 7, {"own": 1.0, "more": 2.0})


def test_what_the_algorithm_remembers_is_restored():
    """The KL coefficient and the baselines of roles, under the keys of a checkpoint."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from tests.config.settings.loop import trainer_of

    keys = {"use_kl_in_reward": "true", "kl_ctrl.type": "adaptive", "advantage_estimator": "rae"}
    given = [f"trainer.algorithm.{key}={value}" for key, value in keys.items()]
    trainer = trainer_of(SkyRLTrainConfig.from_cli_overrides([*given, "trainer.train_batch_size=4"]))
    trainer.estimator.means["first"] = 0.25
    before = trainer.algorithm_state()
    trainer.kl_controller.update(current=9.0, n_steps=64)
    trainer.estimator.means["first"] = 0.5
    assert trainer.algorithm_state() != before
    trainer.load_algorithm_state(before)
    assert trainer.algorithm_state() == before and before.keys() == {"kl_coef", "role_baselines"}
