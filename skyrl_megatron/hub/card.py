"""The model card of an export: what the weights were trained from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_megatron.hub.names import is_commit

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig

_DATA = "datasets/"


def model_card(cfg: SkyRLTrainConfig) -> str | None:
    """Return ``README.md`` of an export with every hub name of the run and its commit; None if there is none."""
    commits = cfg.trainer.hub_commits
    if not commits:
        return None
    names = [key.rpartition("@")[0] for key in commits]
    data = [name.removeprefix(_DATA) for name in names if name.startswith(_DATA)]
    base = cfg.trainer.policy.model.path
    lines = ["---", *([f"base_model: {base}"] if base in names else [])]
    lines += ["datasets:", *(f"- {name}" for name in dict.fromkeys(data))] if data else []
    lines += ["---", "", "Trained with skyrl-megatron. What was read from the Hugging Face hub, and its commit:", ""]
    for key, commit in sorted(commits.items()):
        name, _, revision = key.rpartition("@")
        asked = "" if is_commit(revision) else f" ({revision})"
        lines.append(f"- {name}{asked}: `{commit}`")
    return "\n".join(lines) + "\n"
