"""Names that scripts, command lines and other programs rely on: none of them goes or changes its meaning."""

import importlib
import subprocess
import sys

import pytest

from tests.structure import source

NAMES = {
    "skyrl_megatron.config": (
        "AlgorithmConfig BaseConfig CISPOConfig ChatTemplateConfig ClipCovConfig CriticConfig DPPOConfig DataConfig "
        "DynamicSamplingConfig EnvironmentConfig FSDPConfig FullyAsyncConfig GSM8kLLMJudgeEnvConfig GeneratorConfig "
        "InferenceEngineConfig KLCovConfig KLCtrlConfig MegatronConfig MegatronDDPConfig MegatronLoraConfig "
        "MegatronTorchProfilerConfig MixedPrecisionConfig ModelConfig OffPolicyCorrectionConfig OptimizerConfig "
        "PlacementConfig PolicyConfig RefConfig SAPOConfig SamplingParams SearchEnvConfig SkyRLGymConfig "
        "SkyRLLoraConfig SkyRLTrainConfig Text2SQLEnvConfig TrainerConfig get_config_as_dict get_config_as_yaml_str "
        "make_config"
    ),
    "skyrl_megatron.config.config": "SkyRLTrainConfig make_config get_config_as_dict",
    "skyrl_megatron.utils": "validate_cfg initialize_ray",
    "skyrl_megatron.utils.utils": "validate_cfg initialize_ray",
    "skyrl_megatron.utils.ppo_utils": (
        "BaseFunctionRegistry AdvantageEstimatorRegistry PolicyLossRegistry RegistryActor "
        "register_advantage_estimator register_policy_loss sync_registries repopulate_all_registries "
        "AdvantageEstimator PolicyLossType "
        "AdaptiveKLController FixedKLController get_kl_controller masked_mean masked_var masked_whiten "
        "masked_token_mean compute_advantages_and_returns compute_approx_kl ppo_critic_loss "
        "compute_grpo_outcome_advantage compute_gae_advantage_return compute_rloo_outcome_advantage "
        "compute_reinforce_plus_plus_outcome_advantage ppo_policy_loss gspo_policy_loss sapo_policy_loss "
        "cross_entropy_loss importance_sampling_loss compute_policy_loss_cispo compute_policy_loss_clip_cov "
        "compute_policy_loss_kl_cov"
    ),
    "skyrl_megatron.generators.base": (
        "BatchMetadata ConversationType GeneratorInput GeneratorInterface GeneratorOutput MetricsOutput TrainingPhase "
        "TrajectoryID"
    ),
    "skyrl_megatron.generators.skyrl_gym_generator": (
        "SkyRLGymGenerator TrajectoryOutput concatenate_generator_outputs get_metrics_from_generator_output "
        "get_rollout_metrics prepare_generator_input"
    ),
    "skyrl_megatron.trainer": "FullyAsyncRayPPOTrainer RayPPOTrainer",
    "skyrl_megatron.envs": "BaseTextEnv BaseTextEnvStepOutput register make",
    "skyrl_megatron.entrypoints.main_base": "BasePPOExp skyrl_entrypoint main config_dir",
    "skyrl_megatron.entrypoints.main_generate": "main",
    "bridges.__main__": "main",
}
METHODS = {
    ("skyrl_megatron.config", "SkyRLTrainConfig"): "from_cli_overrides",
    ("skyrl_megatron.config", "BaseConfig"): "from_dict_config",
    ("skyrl_megatron.entrypoints.main_base", "BasePPOExp"): (
        "get_tokenizer get_train_dataset get_eval_dataset get_generator get_trainer get_tracker get_inference_client "
        "run"
    ),
    ("skyrl_megatron.utils.ppo_utils", "BaseFunctionRegistry"): "get register list_available unregister",
}
SIGNATURES = {
    "compute_advantages_and_returns": (
        "token_level_rewards response_mask index adv_estimator config values=None grpo_norm_by_std=True gamma=1.0 "
        "lambd=1.0 **kwargs"
    ),
    "compute_approx_kl": "log_probs log_probs_base loss_mask=None kl_estimator_type='k3'",
    "ppo_critic_loss": "values old_values returns config loss_mask=None",
}
POLICY_LOSS = "log_probs old_log_probs advantages config loss_mask=None rollout_log_probs=None"


@pytest.mark.parametrize("module", NAMES)
def test_names_are_there(module):
    found = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert not missing, f"{module} lacks {missing}"


@pytest.mark.parametrize(("module", "owner"), METHODS)
def test_methods_are_there(module, owner):
    cls = getattr(importlib.import_module(module), owner)
    missing = [name for name in METHODS[module, owner].split() if not callable(getattr(cls, name, None))]
    assert not missing, f"{module}.{owner} lacks {missing}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_keywords_stay(name):
    from skyrl_megatron.utils import ppo_utils

    assert source.parameters(getattr(ppo_utils, name)) == SIGNATURES[name]


def test_built_in_losses_have_the_signature_of_custom_ones():
    from skyrl_megatron.utils.ppo_utils import PolicyLossRegistry

    for name in PolicyLossRegistry.list_available():
        assert source.parameters(PolicyLossRegistry.get(name)) == POLICY_LOSS, name


def test_estimators_take_rewards_and_mask_first_and_any_keyword():
    from skyrl_megatron.utils.ppo_utils import AdvantageEstimatorRegistry

    for name in AdvantageEstimatorRegistry.list_available():
        taken = source.parameters(AdvantageEstimatorRegistry.get(name)).split()
        assert taken[:2] == ["token_level_rewards", "response_mask"] and taken[-1].startswith("**"), name


def test_files_of_a_run(tmp_path):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.resolve import run_folder

    keys = {"trainer.log_path": str(tmp_path), "trainer.project_name": "p", "trainer.run_name": "r"}
    assert run_folder(SkyRLTrainConfig.from_cli_overrides(keys)) == tmp_path / "p" / "r"


FILES = {
    "run": "config.yaml metrics.jsonl report.html console.log tensorboard",
    "checkpoint": "latest_ckpt_global_step.txt global_step_ data.json trainer_state.json rollouts.bin MANIFEST.json",
}


def test_file_names_are_spelled_in_the_package():
    """Whole runs are compared with these names elsewhere; here a renamed file shows at once."""
    from tests.structure import source
    from tests.structure.test_names import strings

    spelled = {node.value for tree in source.modules().values() for node in strings(tree)}
    names = [name for names in FILES.values() for name in names.split()]
    missing = [name for name in names if not any(name in text for text in spelled)]
    assert not missing, missing


COMMANDS = ("launch/run_moe.sh", "launch/run_tests.sh", "launch/setup.sh", ".ci/run")


def test_scripts_are_executable():
    from tests.structure.source import ROOT

    assert not [script for script in COMMANDS if not (ROOT / script).stat().st_mode & 0o111]


def test_commands_are_installed_under_their_names():
    import tomllib

    from tests.structure.source import ROOT

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {
        "skyrl-convert": "bridges.__main__:main",
        "skyrl-megatron": "skyrl_megatron.cli:main",
    }


def test_every_public_name_resolves():
    from skyrl_megatron import api

    assert all(callable(getattr(api, name)) for name in api.NAMES) and sorted(api.NAMES) == dir(api)
    with pytest.raises(AttributeError, match="no attribute 'trian'; its names are train, "):
        _ = api.trian


@pytest.mark.process
def test_the_public_names_cost_nothing_before_they_are_used():
    code = "import sys, skyrl_megatron.api; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.split(".")[0] in ("skyrl_megatron", "bridges", "omegaconf")}
    assert loaded == {"skyrl_megatron", "skyrl_megatron.api"}
