"""Losses, estimators, optimizers and roles: a row each, with everything that the rest of the package asks about it.

Validation, the warnings of settings without effect (:mod:`.rules.ineffective`), the documents and the functions
themselves (:mod:`skyrl_megatron.algorithms`) read these rows, so that each fact is written once. No torch is imported,
because a configuration is checked without it.

A loss or an estimator that is not in the enums below brings its row with its function, in
``skyrl_megatron/algorithms/losses.py`` or in a plugin:

>>> @dataclass
... class FlooredConfig(BaseConfig):
...     \"\"\"Loss `floored`.\"\"\"
...     floor: float = -13.8
...     \"\"\"Tokens with a smaller log-prob teach nothing.\"\"\"
>>> @register_policy_loss("floored", settings=FlooredConfig, reads=["eps_clip_low"])
... def floored(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None): ...

Its settings are ``trainer.algorithm.floored.floor``, typed and checked as all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any, Self

from skyrl_megatron.config.fields import Fraction, NonNegative, OneOf, Positive, Section
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.errors import AlgorithmError

ALGORITHM = "trainer.algorithm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveRow:
    """What is common to the rows of losses and estimators."""

    meaning: str = ""
    """One line for the documents."""
    settings: type[Section] | None = None
    """Class of its section ``trainer.algorithm.<name>``; None: it has none."""
    reads: frozenset[str] | None = frozenset()
    """Other settings of ``trainer.algorithm`` that it reads, as far as not all of its kind do. None: unknown, so none
    of them is reported as without effect."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Key → what to do, of settings that contradict it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow(ObjectiveRow):
    """A policy loss. Its ratio r is that of the current policy to the old log-probs, unless ``anchor`` says so."""

    reads_old: bool = True
    """Whether the formula reads the trainer's log-probs before the update. If not, their forward pass is skipped."""
    reads_rollout: bool = False
    """Whether it always needs the engine's log-probs."""
    corrected: bool | None = True
    """Whether ``off_policy_correction`` is applied to it. None: unknown; the loss may do it by itself."""
    anchor: str | None = None
    """Setting of ``trainer.algorithm`` which makes r relative to the engine's log-probs if it is ``rollout``."""
    depends_on_cut: bool = False
    """Whether it uses statistics of its micro-batch."""

    def is_anchored(self, algorithm: Any) -> bool:
        """Return whether r is relative to the engine's log-probs in this ``trainer.algorithm``."""
        value = algorithm
        for name in (self.anchor or "").split("."):
            value = getattr(value, name, None)
        return bool(value == "rollout")

    def uses_old(self, algorithm: Any) -> bool:
        """Return whether the formula reads the old log-probs. The off-policy correction always reads them."""
        return self.reads_old and not self.is_anchored(algorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorRow(ObjectiveRow):
    """An advantage estimator."""

    critic: bool | None = False
    """Whether it reads a critic's values. None: unknown."""
    teacher: bool = False
    """Whether its rewards are those of a teacher."""
    groups: bool = False
    """Whether it compares the responses to a prompt."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Setting of ``trainer.algorithm`` → what to do if it is empty."""
    per_group: bool = False
    """Whether a custom one is called with the responses to one prompt at a time."""


def _reads(names: str) -> frozenset[str]:
    return frozenset(names.split())


# ---------------------------------------------------------------------------------------------------- policy losses
@dataclass
class SAPOConfig(BaseConfig):
    """Soft gate of the loss `sapo` (arXiv:2511.20347)."""

    tau_pos: Positive = 1.0
    """Temperature of the gate for tokens with positive advantage."""
    tau_neg: Positive = 1.05
    """Temperature of the gate for all other tokens."""


@dataclass
class ClipCovConfig(BaseConfig):
    """Loss `clip_cov`: tokens with high covariance between log-probability and advantage are detached."""

    clip_ratio: Fraction = 0.0002
    """Share of tokens that are detached. They are drawn from tokens with a covariance between the two bounds below."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance."""
    clip_cov_ub: float = 5.0
    """Upper bound of the covariance."""


@dataclass
class KLCovConfig(BaseConfig):
    """Loss `kl_cov`: tokens with the highest covariance get a KL penalty."""

    kl_cov_frac: Fraction = 0.2
    """Share of tokens that get the penalty."""
    ppo_kl_coef: NonNegative = 1.0
    """Weight of the penalty."""


@dataclass
class CISPOConfig(BaseConfig):
    """Loss `cispo` (arXiv:2506.13585): REINFORCE weighted by a clipped importance ratio."""

    cispo_eps_clip_low: NonNegative = 0.0
    """The ratio is clipped below at 1 minus this."""
    cispo_eps_clip_high: NonNegative = 5.0
    """The ratio is clipped above at 1 plus this."""
    anchor: Annotated[str, OneOf("old", "rollout")] = "old"
    """Denominator of the ratio: `old`, the policy before the update; or `rollout`, the engine's log-probabilities.
    `rollout` already corrects for the engine, and excludes `off_policy_correction.tis_ratio_type`."""


@dataclass
class DPPOConfig(BaseConfig):
    """Loss `dppo` (arXiv:2602.04879): a token is masked if its probability has changed too much since the rollout."""

    dppo_type: Annotated[str, OneOf("binary_tv", "binary_kl")] = "binary_tv"
    """Measure of the change of the sampled token's probability: total variation or KL, both on {token, not token}."""
    delta_low: NonNegative = 0.2
    """Maximum change for tokens with negative advantage; about 0.2 for `binary_tv`, 0.05 for `binary_kl`."""
    delta_high: NonNegative = 0.2
    """Maximum change for tokens with positive advantage."""


_CLIP = "eps_clip_low eps_clip_high"
_NO_CORRECTION = {
    f"{ALGORITHM}.off_policy_correction": (
        f"this loss has no off-policy correction: use another loss, or remove {ALGORITHM}.off_policy_correction.*"
    )
}


class PolicyLossType(StrEnum):
    """Built-in losses (``trainer.algorithm.policy_loss_type``), each with its row."""

    row: LossRow

    def __new__(cls, name: str, row: LossRow) -> Self:
        """Make the member equal to its name, and keep the row in it."""
        member = str.__new__(cls, name)
        member._value_, member.row = name, row
        return member

    REGULAR = (
        "regular",
        LossRow(
            meaning="PPO: the ratio is clipped (arXiv:1707.06347)",
            reads=_reads(f"{_CLIP} ratio_anchor"),
            anchor="ratio_anchor",
        ),
    )
    DUAL_CLIP = (
        "dual_clip",
        LossRow(
            meaning="PPO, limited below for negative advantages (arXiv:1912.09729)",
            reads=_reads(f"{_CLIP} ratio_anchor clip_ratio_c"),
            anchor="ratio_anchor",
        ),
    )
    GSPO = (
        "gspo",
        LossRow(
            meaning="PPO with one ratio per sequence (arXiv:2507.18071), for `loss_reduction=sequence_mean`",
            reads=_reads(f"{_CLIP} ratio_anchor"),
            anchor="ratio_anchor",
        ),
    )
    CISPO = (
        "cispo",
        LossRow(
            meaning="REINFORCE weighted by a clipped ratio (arXiv:2506.13585)",
            settings=CISPOConfig,
            anchor="cispo.anchor",
        ),
    )
    SAPO = (
        "sapo",
        LossRow(
            meaning="a soft gate in place of the clip (arXiv:2511.20347), for `loss_reduction=sequence_mean`",
            settings=SAPOConfig,
            reads=_reads("ratio_anchor"),
            anchor="ratio_anchor",
        ),
    )
    CLIP_COV = (
        "clip_cov",
        LossRow(
            meaning="PPO without a few tokens of high covariance (arXiv:2505.22617)",
            settings=ClipCovConfig,
            reads=_reads(_CLIP),
            corrected=False,
            depends_on_cut=True,
            refuses=_NO_CORRECTION,
        ),
    )
    KL_COV = (
        "kl_cov",
        LossRow(
            meaning="a KL penalty for the tokens of highest covariance (arXiv:2505.22617)",
            settings=KLCovConfig,
            corrected=False,
            depends_on_cut=True,
            refuses=_NO_CORRECTION,
        ),
    )
    CROSS_ENTROPY = "cross_entropy", LossRow(meaning="−log p, without advantages", reads_old=False, corrected=False)
    IMPORTANCE_SAMPLING = (
        "importance_sampling",
        LossRow(meaning="the ratio times the advantage, neither clipped nor corrected", corrected=False),
    )
    ROLLOUT_IS = (
        "rollout_is",
        LossRow(
            meaning="REINFORCE weighted by the ratio to the engine, 0 outside the clip range",
            reads=_reads(_CLIP),
            reads_old=False,
            reads_rollout=True,
        ),
    )
    DPPO = (
        "dppo",
        LossRow(
            meaning="tokens too far from the engine's policy are masked (arXiv:2602.04879)",
            settings=DPPOConfig,
            reads_old=False,
            reads_rollout=True,
        ),
    )
    M2PO = (
        "m2po",
        LossRow(
            meaning="tokens beyond a second-moment budget are masked (arXiv:2510.01161)",
            reads=_reads("m2po_threshold"),
            reads_old=False,
            reads_rollout=True,
            corrected=False,
            depends_on_cut=True,
        ),
    )


# ---------------------------------------------------------------------------------------------------- estimators
@dataclass
class GAEConfig(BaseConfig):
    """Estimator `gae`: separate λ for the policy's advantages and the critic's returns."""

    critic_lambd: Fraction | None = None
    """λ of the returns that the critic learns. 1: the sum of the following rewards (arXiv:2503.01491).
    None: `lambd`."""
    length_adaptive_alpha: Positive | None = None
    """Sets the policy's λ to 1 − 1/(this · length of the response), at least 0 (arXiv:2504.05118, which uses 0.05).
    None: `lambd` for every length."""
    bootstrap_truncated: bool = False
    """Bootstrap the return of a truncated response (stop reason `length`) from the critic's value at its last token.
    False: the value after the last token is 0, as for other responses."""


STEP_WISE = "generator.step_wise_trajectories"
_WHOLE_TRAJECTORIES = {STEP_WISE: f"does not work with {STEP_WISE}=true: use grpo, rloo or maxrl"}


class AdvantageEstimator(StrEnum):
    """Built-in estimators (``trainer.algorithm.advantage_estimator``), each with its row."""

    row: EstimatorRow

    def __new__(cls, name: str, row: EstimatorRow) -> Self:
        """Make the member equal to its name, and keep the row in it."""
        member = str.__new__(cls, name)
        member._value_, member.row = name, row
        return member

    GRPO = (
        "grpo",
        EstimatorRow(
            meaning="deviation from the group's mean, by its standard deviation (arXiv:2402.03300)",
            reads=_reads("grpo_norm_by_std"),
            groups=True,
        ),
    )
    RLOO = "rloo", EstimatorRow(meaning="deviation from the mean of the group's other responses", groups=True)
    REINFORCE_PP = (
        "reinforce++",
        EstimatorRow(
            meaning="discounted returns, whitened over the batch (arXiv:2501.03262)",
            reads=_reads("gamma skip_untrained_tokens"),
            refuses=_WHOLE_TRAJECTORIES,
        ),
    )
    GAE = (
        "gae",
        EstimatorRow(
            meaning="generalised advantage estimation from a critic's values (arXiv:1506.02438)",
            settings=GAEConfig,
            reads=_reads("gamma lambd skip_untrained_tokens"),
            refuses=_WHOLE_TRAJECTORIES,
            critic=True,
        ),
    )
    MAXRL = "maxrl", EstimatorRow(meaning="deviation from the group's mean, by its mean absolute reward", groups=True)
    GDPO = (
        "gdpo",
        EstimatorRow(
            meaning="each reward of `gdpo_weights` is normalised in its group",
            reads=_reads("gdpo_weights"),
            groups=True,
            needs={
                "gdpo_weights": "advantage_estimator=gdpo needs rewards: set metrics of the environment, such as "
                "{correct: 1, short: 0.5}"
            },
        ),
    )
    RAE = (
        "rae",
        EstimatorRow(
            meaning="deviation from a running mean of each role",
            reads=_reads("rae_decay"),
            refuses={
                **_WHOLE_TRAJECTORIES,
                "trainer.policy.model.lora.adapters": (
                    "rae has one baseline for each role, not for each adapter: use grpo or rloo"
                ),
            },
        ),
    )
    DISTILLATION = (
        "distillation",
        EstimatorRow(
            meaning="the teacher's log-probs are the rewards of tokens; those of the environment do not count",
            refuses=_WHOLE_TRAJECTORIES,
            teacher=True,
        ),
    )


# ---------------------------------------------------------------------------------------------------- the tables
class ObjectiveTable[R: ObjectiveRow]:
    """Rows by name: the built-in ones, and those that a module adds together with the function.

    ``key`` is the setting that names a row. ``module`` of :mod:`skyrl_megatron.algorithms` has the functions. It needs
    torch, so it is imported only when a name is asked for that has no row yet.
    """

    def __init__(self, key: str, module: str, built_in: Mapping[str, R]) -> None:
        self.key, self.home = key, f"skyrl_megatron.algorithms.{module}"
        self.rows: dict[str, R] = {str(name): row for name, row in built_in.items()}
        self.built_in = frozenset(self.rows)

    def __getitem__(self, name: str) -> R:
        return self.rows[str(name)]

    def get(self, name: str) -> R | None:
        """Return the row of ``name``; None if it has none, as functions registered by their name alone."""
        return self.rows.get(str(name))

    def add(self, name: str, row: R) -> None:
        """Add the row of a function that is being registered, in place of an earlier one of that name.

        A function that replaces a built-in one keeps the row of that name. Raises AlgorithmError if the name has
        settings and cannot be part of a key.
        """
        if name in self.built_in:
            return
        if row.settings is not None and not name.isidentifier():
            raise AlgorithmError(
                f"{self.key}={name} has settings: use a name of letters, digits and _ for their section"
            )
        self.rows[name] = row

    def remove(self, name: str) -> None:
        """Remove the row of a function that is removed; those of built-in functions stay."""
        if name not in self.built_in:
            self.rows.pop(name, None)

    def find(self, name: str) -> R | None:
        """Return the row of ``name``, after importing the functions of the package if it is unknown; None if it has
        none."""
        if name not in self.rows:
            import_module(self.home)
        return self.get(name)

    def readers(self, setting: str) -> list[str]:
        """Return the names whose rows say that they read ``setting``."""
        return [name for name, row in self.rows.items() if setting in (row.reads or ())]

    def shared(self) -> list[str]:
        """Return the settings that some of the rows read, in a fixed order."""
        return list(dict.fromkeys(setting for row in self.rows.values() for setting in sorted(row.reads or ())))

    def sections(self) -> Iterator[tuple[str, type[Section]]]:
        """Yield (name, class) of each row with a section."""
        yield from ((name, row.settings) for name, row in self.rows.items() if row.settings is not None)


LOSSES = ObjectiveTable(
    "trainer.algorithm.policy_loss_type",
    "losses",
    {loss: loss.row for loss in PolicyLossType},
)
ESTIMATORS = ObjectiveTable(
    "trainer.algorithm.advantage_estimator",
    "advantages",
    {estimator: estimator.row for estimator in AdvantageEstimator},
)


def one_of(names: Iterable[str]) -> str:
    """Return the names as in ``a, b or c``."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


# ---------------------------------------------------------------------------------------------------- optimizers
@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer (``optimizer_config.optimizer``)."""

    meaning: str
    reads: frozenset[str] = frozenset()
    """Settings of ``optimizer_config`` that not every optimizer reads."""


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adam": Optimizer("AdamW for all parameters"),
    "muon": Optimizer("Muon for linear weights, AdamW for the rest (arXiv:2502.16982)", _reads("adam_lr")),
}


# ---------------------------------------------------------------------------------------------------- roles
@dataclass(frozen=True, slots=True)
class Role:
    """A model of a run, with its section ``trainer.<name>``."""

    trained: bool
    """Whether it has an optimizer."""
    absent: str = ""
    """Why a run does not have it, for the warning about settings without effect; "": every run has it."""
    keys: tuple[str, ...] = ()
    """Keys and sections (with a dot) that are read only if the run has it."""


def _placed(role: str) -> tuple[str, str]:
    return f"trainer.placement.{role}_num_nodes", f"trainer.placement.{role}_num_gpus_per_node"


ROLES: Mapping[str, Role] = {
    "policy": Role(trained=True),
    "ref": Role(
        trained=False,
        absent="the run has no separate reference model: it needs algorithm.use_kl_loss or use_kl_in_reward, and no "
        "adapters",
        keys=(
            *("trainer.ref.", "trainer.update_ref_every_epoch", "trainer.placement.colocate_policy_ref"),
            *_placed("ref"),
        ),
    ),
    "critic": Role(
        trained=True,
        absent="the run has no critic: set trainer.critic.model.path",
        keys=(
            *("trainer.critic.", f"{ALGORITHM}.value_head_prefix", f"{ALGORITHM}.value_clip"),
            *("trainer.critic_mini_batch_size", "trainer.critic_warmup_steps", *_placed("critic")),
        ),
    ),
    "teacher": Role(
        trained=False,
        absent="no teacher runs on ranks: set trainer.teacher.model.path or trainer.teacher.models",
        keys=(
            *("trainer.teacher.model.", "trainer.teacher.megatron_config.", "trainer.teacher.fsdp_config."),
            *("trainer.teacher.model_config_kwargs", "trainer.teacher.sequence_parallel_size", *_placed("teacher")),
        ),
    ),
}
OTHER_ROLES = tuple(name for name in ROLES if name != "policy")
