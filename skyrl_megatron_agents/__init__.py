"""Agents that drive their own loop: gateway, sandboxes, environments of other packages."""

from skyrl_megatron.plugins import CHECKS, GENERATORS, REPORTERS

GENERATORS.register_path("agent", "skyrl_megatron_agents.sandbox_agent:SandboxAgentGenerator")
CHECKS.register_path("skyrl_megatron_agents.checks:sandboxes")
REPORTERS.register_path("skyrl_megatron_agents.checks:report")
