"""Typed, strict configuration. Importing it loads neither torch nor ray.

>>> cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.policy.megatron_config.expert_model_parallel_size=8"])
"""

from skyrl_megatron.config.schema.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DistillationConfig,
    DPPOConfig,
    DynamicSamplingConfig,
    GAEConfig,
    KLCovConfig,
    KLCtrlConfig,
    OffPolicyCorrectionConfig,
    SAPOConfig,
)
from skyrl_megatron.config.schema.base import BaseConfig
from skyrl_megatron.config.schema.data import DataConfig
from skyrl_megatron.config.schema.environment import (
    EnvironmentConfig,
    GSM8kLLMJudgeEnvConfig,
    SearchEnvConfig,
    SkyRLGymConfig,
    Text2SQLEnvConfig,
)
from skyrl_megatron.config.schema.generator import ChatTemplateConfig, GeneratorConfig, SamplingParams
from skyrl_megatron.config.schema.inference import InferenceEngineConfig
from skyrl_megatron.config.schema.megatron import (
    DEFAULT_MEGATRON_OPTIMIZER_KWARGS,
    DEFAULT_TRANSFORMER_CONFIG_KWARGS,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronLoraConfig,
    MegatronTorchProfilerConfig,
    MTPConfig,
)
from skyrl_megatron.config.schema.model import ModelConfig, SkyRLLoraConfig
from skyrl_megatron.config.schema.optimizer import FSDPConfig, MixedPrecisionConfig, OptimizerConfig
from skyrl_megatron.config.schema.roles import CriticConfig, PlacementConfig, PolicyConfig, RefConfig, TeacherConfig
from skyrl_megatron.config.schema.root import SkyRLTrainConfig, get_config_as_dict, get_config_as_yaml_str, make_config
from skyrl_megatron.config.schema.trainer import FullyAsyncConfig, HealingConfig, TrainerConfig

__all__ = [
    "DEFAULT_MEGATRON_OPTIMIZER_KWARGS",
    "DEFAULT_TRANSFORMER_CONFIG_KWARGS",
    "AlgorithmConfig",
    "BaseConfig",
    "CISPOConfig",
    "ChatTemplateConfig",
    "ClipCovConfig",
    "CriticConfig",
    "DPPOConfig",
    "DataConfig",
    "DistillationConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "FSDPConfig",
    "FullyAsyncConfig",
    "GAEConfig",
    "GSM8kLLMJudgeEnvConfig",
    "GeneratorConfig",
    "HealingConfig",
    "InferenceEngineConfig",
    "KLCovConfig",
    "KLCtrlConfig",
    "MTPConfig",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronLoraConfig",
    "MegatronTorchProfilerConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "OffPolicyCorrectionConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PolicyConfig",
    "RefConfig",
    "SAPOConfig",
    "SamplingParams",
    "SearchEnvConfig",
    "SkyRLGymConfig",
    "SkyRLLoraConfig",
    "SkyRLTrainConfig",
    "TeacherConfig",
    "Text2SQLEnvConfig",
    "TrainerConfig",
    "get_config_as_dict",
    "get_config_as_yaml_str",
    "make_config",
]
