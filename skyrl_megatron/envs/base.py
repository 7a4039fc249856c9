"""The interface of environments: they read the policy's text and answer with messages and a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NotRequired, TypedDict

from skyrl_megatron.envs.tools import ToolGroup

Message = dict[str, Any]
"""One chat message: ``role`` and ``content``."""
ConversationType = list[Message]


class BaseTextEnvStepOutput(TypedDict):
    """Answer to one turn of the policy."""

    observations: ConversationType
    """Messages that the conversation continues with; empty when done."""
    reward: float
    """Reward of this turn; put on its last token."""
    done: bool
    """Whether the episode is over."""
    metadata: dict[str, Any]
    """Anything worth keeping; not read by training."""
    postprocessed_action: NotRequired[str | None]
    """The turn's text as it is to stand in the conversation, where that is not what the policy said. Its tokens were
    not sampled and are not trained on."""


class BaseTextEnv:
    """One episode. Subclasses override :meth:`step`, and the rest where they need it.

    ``env_config``: the environment's section of ``environment.skyrl_gym``. ``extras``: the other columns of the
    dataset row, and ``max_turns``. The attribute ``ground_truth`` is ``extras["reward_spec"]["ground_truth"]``, None
    where the row has none. An instance serves one trajectory; its methods are called one at a time, in threads.
    """

    replayable: bool = True
    """Whether the same actions lead to the same state, so that an interrupted trajectory can go on in a new instance
    that is stepped through its recorded turns. False where a step has effects outside or answers by chance: such
    trajectories start anew. An answer that differs from the recorded one is noticed either way."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        self.env_config = env_config
        self.extras = dict(extras or {})
        self.ground_truth: Any = (self.extras.get("reward_spec") or {}).get("ground_truth")
        self.turns = 0
        self.max_turns: int = self.extras.get("max_turns", 1)
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return (conversation to start from, metadata), before the first turn."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Answer the turn ``action``."""
        raise NotImplementedError(f"{type(self).__name__} has no step()")

    def close(self) -> None:
        """Release what the episode holds. Called once, also when the trajectory ends early."""

    def get_metrics(self) -> dict[str, Any]:
        """Return metrics of the episode; called once, at its end."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Reduce the metrics of a batch of episodes to one number a name: the mean."""
        values: dict[str, list[float]] = {}
        for episode in metrics:
            for name, value in episode.items():
                if isinstance(value, int | float):
                    values.setdefault(name, []).append(float(value))
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """Set the tools of this environment."""
        self.tool_groups = list(tool_groups)
        self.tool_to_toolgroup = {}
        for group in self.tool_groups:
            self.tool_to_toolgroup.update(group.get_tool_to_group_mapping())

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        """Call a tool with the positional arguments ``tool_input``. Raises ValueError if it is unknown."""
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        raise ValueError(f"no tool group {tool_group_name!r}; there are {[group.name for group in self.tool_groups]}")


def require_ground_truth(env: BaseTextEnv) -> Any:
    """Return the row's ground truth. Raises ValueError where there is none to compare with."""
    if env.ground_truth is None:
        raise ValueError(f"{type(env).__name__} compares with a known answer: the row has no reward_spec.ground_truth")
    return env.ground_truth


def answer_text(env: BaseTextEnv, answer: Any) -> str:
    """Return an answer that responses are compared with as text. Raises ValueError for one that is no text or
    number: what ``str`` makes of it, such as "True", is no right answer to any question."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
        raise ValueError(f"{type(env).__name__} compares with text or a number: the row's answer is {answer!r:.80}")
    return str(answer)
