"""Agents that drive their own loop: gateway, sandboxes, environments of other packages.

Registers them by path, so that an import of this package loads none of them.
"""

from skyrl_megatron import envs
from skyrl_megatron.plugins import CHECKS, ENGINE_SERVICES, GENERATORS, RECORDERS, REPORTERS, SANDBOXES

ENGINE_SERVICES.register_path("enable_http_endpoint", "skyrl_megatron_agents.http_endpoint:HttpEndpoint")
GENERATORS.register_path("agent", "skyrl_megatron_agents.sandbox_agent:SandboxAgentGenerator")

SANDBOXES.register_path("namespaces", "skyrl_megatron_agents.sandboxes.namespaces:NamespaceProvider")
SANDBOXES.register_path("docker", "skyrl_megatron_agents.sandboxes.containers:ContainerProvider")

envs.register("aime", "skyrl_megatron_agents.environments.aime:AIMEEnv")
envs.register("nemo-gym:", "skyrl_megatron_agents.environments.packages.nemo_gym:NeMoGym")
envs.register("openenv:", "skyrl_megatron_agents.environments.packages.openenv:OpenEnv")
envs.register("reasoning-gym:", "skyrl_megatron_agents.environments.packages.reasoning_gym:ReasoningGym")
envs.register("search", "skyrl_megatron_agents.environments.search:SearchEnv")
envs.register("task", "skyrl_megatron_agents.environments.task_folder:TaskFolder")
envs.register("text2sql", "skyrl_megatron_agents.environments.text2sql:Text2SQLEnv")
envs.register("verifiers:", "skyrl_megatron_agents.environments.packages.verifiers:Verifiers")

CHECKS.register_path("skyrl_megatron_agents.checks:sandboxes")
REPORTERS.register_path("skyrl_megatron_agents.checks:report")
RECORDERS.register_path(f"{__name__}.trajectory_records:TrajectoryRecorder")
