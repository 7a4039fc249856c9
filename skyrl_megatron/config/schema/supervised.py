"""Sections of the runs that train on rows of data: ``sft``, ``dpo`` and ``reward``.

The configurations that have them are in :mod:`.sft` and :mod:`.preferences`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from skyrl_megatron.config.fields import Count, NonNegative, OneOf, Positive
from skyrl_megatron.config.load import BaseConfig


@dataclass
class SFTConfig(BaseConfig):
    """Conversations of supervised training (`skyrl-megatron sft`)."""

    SECTION: ClassVar[str] = "sft"
    """Name of the section, for messages."""
    max_length: Count = 4096
    """Maximum length of a training sequence in tokens."""
    long_rows: Annotated[str | None, OneOf("error", "skip", "truncate")] = None
    """Handling of a longer row: as `invalid_rows`, or `truncate` drops what follows the first `max_length` tokens. An
    answer that is cut has no end token. None: that of `invalid_rows`."""
    turns: Annotated[str, OneOf("all", "last")] = "all"
    """Messages of the assistant that are trained."""
    invalid_rows: Annotated[str, OneOf("error", "skip")] = "error"
    """Handling of a row that cannot be trained: end the run with its file and row, or skip and count it."""
    format: Annotated[
        str, OneOf("messages", "sharegpt", "alpaca", "prompt_completion", "anthropic", "openai_functions")
    ] = "messages"
    """Form of the rows (docs/guides/sft.md): chat messages, or that of another tool, which is converted."""
    thinking: Annotated[str, OneOf("template", "content", "drop")] = "template"
    """Thinking that the chat template would not write, from whichever key: an error, or write it into the content
    (between `<think>` and `</think>`), or drop and count it."""
    strict_rows: bool = False
    """Take a row with a column or a key of messages that nothing reads as invalid. Otherwise it is named once."""

    @property
    def of_long_rows(self) -> str:
        """The handling of a row that is longer than ``max_length``."""
        return self.long_rows or self.invalid_rows

    @property
    def longest(self) -> int:
        """Tokens of the longest sequences that one micro-batch must hold."""
        return self.max_length


@dataclass
class DPOConfig(SFTConfig):
    """Preferences (`skyrl-megatron dpo`)."""

    SECTION: ClassVar[str] = "dpo"
    needs_reference: ClassVar[bool] = True
    """Whether the run starts a reference."""
    loss: Annotated[str, OneOf("sigmoid", "ipo", "kto")] = "sigmoid"
    """`sigmoid` (DPO, arXiv:2305.18290) and `ipo` (arXiv:2310.12036) compare the answers of a pair; `kto`
    (arXiv:2402.01306) takes single answers with a label."""
    beta: Positive = 0.1
    """Weight of the log-ratio of policy and reference; of `ipo` its τ."""
    desirable_weight: NonNegative = 1.0
    """`kto`: weight of the answers that are labelled good."""
    undesirable_weight: NonNegative = 1.0
    """`kto`: weight of the other answers."""
    reference_cache: str | None = None
    """Folder for the log-probs of the reference. They are computed once, before the first step; a run that finds those
    of its model and data there starts no reference. None: computed in each step."""

    @property
    def paired(self) -> bool:
        """Whether a row has two answers."""
        return self.loss != "kto"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequences that one micro-batch must hold: a pair is not split."""
        return self.max_length * (2 if self.paired else 1)


@dataclass
class CachedDPOConfig(DPOConfig):
    """Preferences of a run that found all log-probs of its reference in `reference_cache`."""

    needs_reference: ClassVar[bool] = False


@dataclass
class RewardConfig(SFTConfig):
    """Pairs that a reward model learns from (`skyrl-megatron reward`)."""

    SECTION: ClassVar[str] = "reward"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequences that one micro-batch must hold: a pair is not split."""
        return 2 * self.max_length
