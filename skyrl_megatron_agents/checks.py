"""What is checked and reported of agents before a run."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_megatron.checks import NotChecked, PlannedRun
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.errors import Problem
from skyrl_megatron.plugins import GENERATORS, SANDBOXES


def sandboxes(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield why this machine cannot start the sandboxes of the run's agents."""
    if run.cfg.generator.name != "agent":
        return
    sandbox, key = run.cfg.generator.agent.sandbox, "generator.agent.sandbox"
    if run.hardware.elsewhere:
        yield NotChecked(key, f"whether the machine of the driver can start sandboxes of {sandbox}")
        return
    from skyrl_megatron_agents.sandboxes.sandbox_queue import why_not_here

    # The rules of the configuration report a name that is not registered.
    registered = sandbox in SANDBOXES.built_in or SANDBOXES.find(sandbox)
    if registered and (reason := why_not_here(sandbox)):
        yield Problem(key, sandbox, reason)


def report(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[str]:
    """Yield how agents and their sandboxes run, and what ends the run; nothing without agents."""
    runs_commands = cfg.generator.name == "agent"
    if not runs_commands and not hasattr(GENERATORS.find(cfg.generator.name), "log_folder"):  # of an AgentGenerator
        return
    yield "# agents"
    if runs_commands:
        from skyrl_megatron_agents.sandboxes.sandbox import Limits
        from skyrl_megatron_agents.sandboxes.sandbox_queue import default_at_once

        agent = cfg.generator.agent
        at_once = agent.at_once or default_at_once(Limits())
        yield f"agent: {' '.join(agent.command)}; in {agent.sandbox} sandboxes, {at_once} at once"
    share = cfg.generator.min_token_in_rate
    yield (
        f"agents: the run stops if less than {share:.2%} of their calls have every earlier answer as the tokens"
        " that were sampled (generator.min_token_in_rate; 0: never)"
    )
    yield ""
