"""Settings of Muon: Megatron's ``muon_*`` fields in ``optimizer_config_kwargs``, and what contradicts them."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.roles import active_roles, is_frozen
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

PREFIX = "muon_"
BLOCKWISE = "blockwise"
"""Value of ``muon_tp_mode``: the shard of each tensor-parallel rank is orthogonalised as a matrix of its own."""
WINDOW = 1 << 24
"""Elements of the whole matrices that are orthogonalised together, unless one is larger."""
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""Coefficients (a, b, c) of successive Newton-Schulz steps, by Megatron's names. ``simple`` is Keller Jordan's and
Moonlight's (arXiv:2502.16982), ``quintic`` is modded-nanogpt's, ``polar_express`` is that of arXiv:2505.16932 with its
safety factor. The first two start over after the last step, the third repeats its last."""

_CHOICES = {
    "coefficient_type": tuple(COEFFICIENTS),
    "scale_mode": ("spectral", "unit_rms_norm", "shape_scaling"),
    "fp32_matmul_prec": ("highest", "high", "medium"),
    "tp_mode": ("duplicated", BLOCKWISE),
    "split_qkv": (True,),
    "scalar_optimizer": ("adam",),
}
_REASONS = {
    "tp_mode": "distributed sums over ranks in each Newton-Schulz step, which this trainer does not do: use "
    "duplicated, the update of the whole matrix, or blockwise, which updates each rank's shard by itself",
    "split_qkv": "q, k and v are always separate matrices: remove this key",
    "scalar_optimizer": "the other parameters are trained by AdamW: remove this key",
}
_NO_EFFECT_ON = ("use_precision_aware_optimizer", "optimizer_cpu_offload", "use_layer_wise_distributed_optimizer")


@dataclass(frozen=True, slots=True)
class MuonSettings:
    """Megatron's fields without their prefix. ``nesterov``, ``extra_scale_factor`` and ``tp_mode`` have other defaults
    than Megatron's: those of Moonlight, and the whole matrix's update."""

    momentum: float = 0.95
    nesterov: bool = True
    num_ns_steps: int = 5
    coefficient_type: str = "quintic"
    scale_mode: str = "spectral"
    extra_scale_factor: float = 0.2
    """With ``spectral`` the root mean square of an update is about this; AdamW's is 0.2 to 0.4."""
    fp32_matmul_prec: str | None = None
    """``medium``: Newton-Schulz in bf16. None: on GPUs, and ``highest`` (fp32) on CPU."""
    tp_mode: str = "duplicated"
    split_qkv: bool = True
    scalar_optimizer: str = "adam"

    def coefficients(self) -> list[tuple[float, float, float]]:
        """Return (a, b, c) of each of the ``num_ns_steps`` steps."""
        table, last = COEFFICIENTS[self.coefficient_type], self.coefficient_type == "polar_express"
        steps = range(self.num_ns_steps)
        return [table[min(step, len(table) - 1) if last else step % len(table)] for step in steps]


_NAMES = tuple(field.name for field in dataclasses.fields(MuonSettings))


def muon_settings(options: Mapping[str, Any]) -> MuonSettings:
    """Read the settings from valid ``optimizer_config_kwargs``."""
    return MuonSettings(**{name: options[PREFIX + name] for name in _NAMES if PREFIX + name in options})


def muon_rule(cfg: SkyRLTrainConfig, models: Mapping[str, Any]) -> Iterator[Problem | str]:
    """Yield what is wrong or questionable in the options of each trained role (``plugins.RULES``)."""
    for role in active_roles(cfg):
        if not is_frozen(role):
            settings = getattr(cfg.trainer, role)
            optimizer, options = settings.optimizer_config.optimizer, settings.megatron_config.optimizer_config_kwargs
            section = f"trainer.{role}.megatron_config.optimizer_config_kwargs."
            yield from muon_problems(optimizer, options, section)
            yield from muon_notes(optimizer, options, section)


def muon_problems(optimizer: str, options: Mapping[str, Any], section: str) -> Iterator[Problem]:
    """Yield what is wrong with the ``muon_*`` fields of ``optimizer_config_kwargs``, and what excludes them.

    ``optimizer``: ``optimizer_config.optimizer``. ``section``: the key's prefix.
    """
    if "muon" in str(options.get("optimizer")):
        yield Problem(
            f"{section}optimizer", options["optimizer"], "remove this key and set optimizer_config.optimizer=muon"
        )
    of_muon = {name: value for name, value in options.items() if name.startswith(PREFIX)}
    if optimizer != "muon":
        for name, value in of_muon.items():
            yield Problem(
                f"{section}{name}",
                value,
                f"is read with optimizer_config.optimizer=muon, not {optimizer}: set that, or remove this key",
            )
        return
    for name, value in of_muon.items():
        if fix := _wrong(name.removeprefix(PREFIX), value):
            yield Problem(f"{section}{name}", value, fix)
    for name in _NO_EFFECT_ON:
        if options.get(name):
            yield Problem(f"{section}{name}", options[name], "is not supported with optimizer=muon: remove this key")


def muon_notes(optimizer: str, options: Mapping[str, Any], section: str) -> Iterator[str]:
    """Yield what is questionable about valid ``muon_*`` fields."""
    if optimizer == "muon" and options.get(f"{PREFIX}tp_mode") == BLOCKWISE:
        yield (
            f"{section}{PREFIX}tp_mode={BLOCKWISE} is another algorithm: each tensor-parallel rank orthogonalises its "
            "shard, so results depend on the layout"
        )


def _wrong(name: str, value: Any) -> str | None:
    """Return the fix for an unknown field or value; None if it is valid."""
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, 1) or [field for field in _NAMES if field in name]
        if near:
            return f"Megatron has no such field: did you mean {PREFIX}{near[0]}?"
        return f"Megatron has no such field: use one of {', '.join(PREFIX + field for field in _NAMES)}"
    if name in _CHOICES:
        choices = _CHOICES[name]
        return None if value in choices else _REASONS.get(name) or f"must be one of {', '.join(map(str, choices))}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "nesterov":
        return None if isinstance(value, bool) else "must be true or false"
    if name == "num_ns_steps":
        return None if number and isinstance(value, int) and 1 <= value <= 100 else "must be a number from 1 to 100"
    if name == "momentum":
        return None if number and 0 <= value < 1 else "must be at least 0 and below 1"
    return None if number and 0 < value < math.inf else "must be a positive number"
