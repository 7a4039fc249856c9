"""Where the rollouts of a step come from: the one object in which synchronous and asynchronous training differ.

:class:`PromptRollouts` samples the prompts of a step when the step begins: prompts → responses → dynamic sampling.
The other sources are subclasses of it in the registry ``plugins.SOURCES``, imported only by runs that use them:
``oversampled`` starts more prompts, and ends at the first complete groups; ``streamed`` takes finished groups from a
``RolloutStream``, which samples on the event loop while the ranks train.

A source gets the state of the run and the parts of a step (``run_state.py``). The trainer calls it at fixed points of
the run: :meth:`~PromptRollouts.open` after the checkpoint is loaded,
:meth:`~PromptRollouts.start` before the first step, :meth:`~PromptRollouts.next_batch` and
:meth:`~PromptRollouts.end_step` in each step, :meth:`~PromptRollouts.advance` after each weight sync,
:meth:`~PromptRollouts.checkpoint_saved` after each checkpoint, and :meth:`~PromptRollouts.close` at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.errors import SkyRLMegatronWarning
from skyrl_megatron.rollout.dynamic_sampling import Batch, measured_rewards
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.rollout.outputs import row_uids, select_rows
from skyrl_megatron.sources.run_state import RunState, StepParts

if TYPE_CHECKING:
    from skyrl_megatron.data.loader import PromptLoader
    from skyrl_megatron.types import TrainingBatch


class PromptRollouts:
    """Samples the prompts of a step when the step begins."""

    can_rewind = True
    """Whether the run can go back to an earlier step in the same process."""

    def __init__(self, run: RunState, parts: StepParts) -> None:
        self.run, self.parts = run, parts
        self.loader: PromptLoader = parts.train_dataloader
        self.prompts = _all_epochs(self.loader)
        """Batches of prompts from the loader's position on."""
        self._warned_of_filtering = False

    # ------------------------------------------------------------------ a step
    def next_batch(self) -> TrainingBatch:
        """Sample until dynamic sampling has a full batch, and return its tensors with a reward for each token."""
        run, parts, selected = self.run, self.parts, None
        while selected is None:
            output, uids = parts.sample_batch()
            parts.sampler.refused = self.observe(output, uids)
            with run.phases("postprocess_generator_output"):
                output = parts.postprocess_generator_output(output, uids)
            selected = parts.handle_dynamic_sampling(output, uids)
            self.filtered(whole_batch=selected is None)
            if selected is None:
                self._warn_of_filtering(parts.sampler.sampled_batches)
        parts.note_rows(selected[0])
        with run.phases("convert_to_training_input"):
            return self.to_batch(*selected)

    def sample(self) -> Batch:
        """Return the rows of the next batch of prompts and the uid of each row."""
        generator_input, uids = self.parts.prepare_generator_input(next(self.prompts), "train")
        with self.run.phases("generate"):
            output = self.parts.generate(generator_input)
        return output, row_uids(output, uids)

    def _warn_of_filtering(self, batches: int) -> None:
        """Warn once if ``batches`` of prompts did not fill a step."""
        if batches < 3 or self._warned_of_filtering:
            return
        self._warned_of_filtering = True
        warnings.warn(
            f"step {self.run.step + 1}: {batches} batches of prompts did not fill one step, because dynamic sampling "
            "removes prompts whose samples all got the same reward. Use other prompts, or raise "
            "generator.n_samples_per_prompt; trainer.algorithm.dynamic_sampling.max_sample_batches is the limit",
            SkyRLMegatronWarning,
            stacklevel=3,
        )

    def observe(self, output: GeneratorOutput, uids: list[str]) -> set[str]:
        """Give the sampler of the prompts the rewards of the batch that was sampled last, and return the uids that a
        gate refused."""
        gates, metrics = self.parts.gates, self.run.metrics
        rewards, refused = measured_rewards(output, uids), set[str]()
        if gates.gates:
            names = row_uids(output, uids)
            counted = dict.fromkeys((f"generate/refused_by_{name}" for name in gates.gates), 0.0)
            for uid in rewards:
                rows = [row for row, name in enumerate(names) if name == uid]
                if (gate := gates.refusal(select_rows(output, rows), self.run.step)) is not None:
                    counted[f"generate/refused_by_{gate}"] += 1
                    refused.add(uid)
                    if not gates.observed(gate):
                        rewards[uid] = []
            for name, count in counted.items():
                metrics[name] = metrics.get(name, 0.0) + count
        self.observe_rewards(rewards)
        return refused

    def observe_rewards(self, rewards: Mapping[str, list[float]]) -> None:
        """Give the sampler of the prompts the rewards, by uid, of the batch that was sampled last."""
        self.loader.observe_batch(rewards)

    def filtered(self, *, whole_batch: bool) -> None:
        """Record the groups that dynamic sampling removed from the last sample; ``whole_batch``: all of them."""

    def to_batch(self, output: GeneratorOutput, uids: list[str]) -> TrainingBatch:
        """Return the tensors of the selected rows."""
        return self.parts.convert_to_training_input(output, uids)

    def staleness_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        """Return metrics by the age of the tokens of the last batch, once its log-probs are known."""
        return {}

    def end_step(self) -> None:
        """Mark the groups of the step as trained. Called before the trainer counts the step."""

    def advance(self, version: int, pause_seconds: float) -> None:
        """Note that engines serve ``version`` now. They were paused for ``pause_seconds``."""

    # ------------------------------------------------------------------ a run
    def open(self) -> None:
        """Continue from the loader's position, after a checkpoint was loaded or none was found."""
        self.prompts = _all_epochs(self.loader)

    def start(self) -> None:
        """Begin to sample ahead."""

    def checkpoint_saved(self, complete_steps: Callable[[], list[int]]) -> None:
        """Free what only earlier checkpoints needed. ``complete_steps``: lists the steps of the complete checkpoints,
        some of which another run may have left."""

    def close(self) -> None:
        """Stop sampling."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as plain values."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned, in this run or in one with another source."""

    def unfinished(self) -> bytes | None:
        """Return the unfinished rollouts for a checkpoint, None if there are never any."""
        return None

    def load_unfinished(self, data: bytes | None) -> None:
        """Restore what :meth:`unfinished` returned, after the state."""


def _all_epochs(loader: PromptLoader) -> Iterator[list[Any]]:
    """Yield batches of prompts, epoch after epoch."""
    while True:
        yield from loader
