"""Some trajectories of agents as graphs, in files for the dashboard: calls, forks, what is trained on, the outcome.

A step has a file ``step_N.jsonl`` with a line for each trajectory. Text is decoded from the tokens, so it is what the
policy saw and what it sampled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.resolve import private_folder, run_folder
from skyrl_megatron.rollout.interface import TrajectoryID
from skyrl_megatron.trainer.recorders import (
    TRAJECTORIES,
    RecordedRun,
    RunRecorder,
    remove_later_steps,
    sample_interval,
)
from skyrl_megatron_agents.graph import Graph, SampledCall
from skyrl_megatron_agents.rows import Outcome, Rule, targets_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CALLS = 300
"""Calls of a trajectory that are written."""
MOST_TOKENS = 1000
"""Tokens of a prompt or an answer whose text is written: as many first as last ones."""


class TrajectoryRecorder(RunRecorder):
    """Lets the run's generator write some trajectories, in the steps of the samples, if agents make them."""

    ends_run = True

    def __init__(self, run: RecordedRun) -> None:
        super().__init__(run)
        cfg, self._folder = run.cfg, run_folder(run.cfg) / TRAJECTORIES
        if hasattr(run.generator, "records"):
            interval = sample_interval(cfg, run.total_steps)
            run.generator.records = TrajectoryRecords(
                self._folder, run.tokenizer, cfg.trainer.samples_per_step, interval
            )

    def on_load(self, resumed_from: int | None) -> None:
        remove_later_steps(self._folder, resumed_from)


class TrajectoryRecords:
    """Writes trajectories into ``folder``: at most ``most`` of a step, of every ``interval``-th step from 1 on; 0:
    none."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, most: int, interval: int) -> None:
        self.folder, self.tokenizer, self.most, self.interval = folder, tokenizer, most, interval
        self._written: Counter[int] = Counter()

    def chosen(self, step: int, ids: Sequence[TrajectoryID]) -> list[TrajectoryID]:
        """Return the trajectories to write: the first prompts', half of :attr:`most` of each at most."""
        if self.interval <= 0 or (step - 1) % self.interval:
            return []
        of_prompt: Counter[str] = Counter()
        written = []
        for id in ids:
            of_prompt[id.instance_id] += 1
            if of_prompt[id.instance_id] <= max(self.most // 2, 1) and self._written[step] < self.most:
                self._written[step] += 1
                written.append(id)
        return written

    def write(
        self, step: int, id: TrajectoryID, graph: Graph, outcome: Outcome, rule: str | Rule, difference: str
    ) -> None:
        """Append a trajectory to the file of a step. ``difference``: where a request first differed from what was
        sampled."""
        paths = targets_of(graph, rule) if outcome.error is None else []
        row_of: dict[int, int] = {}
        for row, (path, first) in enumerate(paths):
            row_of |= {call.number: row for call in path[first:]}
        record = {
            "uid": id.instance_id,
            "sample": id.repetition_id,
            "outcome": outcome.kind.value,
            "why": outcome.why,
            "reward": outcome.reward,
            "rows": len(paths),
            "forks": graph.forks(),
            "difference": difference,
            "count": len(graph.calls),
            "calls": [self._call(call, row_of.get(call.number)) for call in graph.calls[:MOST_CALLS]],
        }
        private_folder(self.folder)
        with (self.folder / f"step_{step}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _call(self, call: SampledCall, row: int | None) -> dict[str, Any]:
        sampled = call.generation
        return {
            "number": call.number,
            "parent": None if call.parent is None else call.parent.number,
            "start": call.start,
            "new": len(call.rest),
            "sampled": len(sampled.token_ids),
            "row": row,
            "unmatched": call.text_only,
            "ended": sampled.finish_reason,
            "prompt": self._text(call.rest.tolist()),
            "answer": self._text(sampled.token_ids),
        }

    def _text(self, tokens: Sequence[int]) -> str:
        if len(tokens) <= MOST_TOKENS:
            return str(self.tokenizer.decode(tokens))
        first, last = tokens[: MOST_TOKENS // 2], tokens[-MOST_TOKENS // 2 :]
        left_out = f"\n… {len(tokens) - MOST_TOKENS} tokens …\n"
        return f"{self.tokenizer.decode(first)}{left_out}{self.tokenizer.decode(last)}"
