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

register("addition", "skyrl_megatron_tools.embedded.arithmetic:AdditionEnv")
register("aime", "skyrl_megatron_agents.environments.aime:AIMEEnv")
register("gsm8k", "skyrl_megatron.envs.gsm8k:GSM8kEnv")
register("gsm8k_llm_judge", "skyrl_megatron.envs.gsm8k:GSM8kLLMJudgeEnv", config="llm_as_a_judge")
register("gsm8k_multi_turn", "skyrl_megatron.envs.gsm8k:GSM8kMultiTurnEnv")
register("multiply", "skyrl_megatron_tools.embedded.arithmetic:MultiplyEnv")
register("nemo-gym:", "skyrl_megatron_agents.environments.packages.nemo_gym:NeMoGym")
register("openenv:", "skyrl_megatron_agents.environments.packages.openenv:OpenEnv")
register("reasoning-gym:", "skyrl_megatron_agents.environments.packages.reasoning_gym:ReasoningGym")
register("search", "skyrl_megatron_agents.environments.search:SearchEnv")
register("task", "skyrl_megatron_agents.environments.task_folder:TaskFolder")
register("text2sql", "skyrl_megatron_agents.environments.text2sql:Text2SQLEnv")
register("verifiers:", "skyrl_megatron_agents.environments.packages.verifiers:Verifiers")
