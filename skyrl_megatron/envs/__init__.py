"""Environments: the interface, the registry, and the built-in environments."""

from skyrl_megatron.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    EnvSpec,
    Message,
    ToolGroup,
    deregister,
    make,
    register,
    registered,
    spec,
    tool,
)
from skyrl_megatron.envs.env_pool import within

__all__ = [
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "ConversationType",
    "EnvSpec",
    "Message",
    "ToolGroup",
    "deregister",
    "make",
    "register",
    "registered",
    "spec",
    "tool",
    "within",
]

register("addition", "skyrl_megatron.envs.arithmetic:AdditionEnv")
register("gsm8k", "skyrl_megatron.envs.gsm8k:GSM8kEnv")
register("gsm8k_llm_judge", "skyrl_megatron.envs.gsm8k:GSM8kLLMJudgeEnv", config="llm_as_a_judge")
register("gsm8k_multi_turn", "skyrl_megatron.envs.gsm8k:GSM8kMultiTurnEnv")
register("multiply", "skyrl_megatron.envs.arithmetic:MultiplyEnv")
