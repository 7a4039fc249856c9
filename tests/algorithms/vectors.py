"""Recorded inputs and outputs of the reference, and configurations for them."""

import json
from functools import cache
from pathlib import Path

PATH = Path(__file__).parents[1] / "data" / "algorithms.json"


@cache
def cases(kind: str) -> list[dict]:
    return [case for case in json.loads(PATH.read_text())["cases"] if case["kind"] == kind]


def tensor(values, dtype="float64"):
    import torch

    return torch.tensor(values, dtype=getattr(torch, dtype))


def algorithm_config(**changes):
    """A real AlgorithmConfig; dotted keys are spelt with ``__``: ``off_policy_correction__tis_ratio_type="token"``."""
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig

    config = AlgorithmConfig()
    for key, value in changes.items():
        *path, name = key.split("__")
        section = config
        for part in path:
            section = getattr(section, part)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return config


def case_config(case: dict):
    return algorithm_config(
        policy_loss_type=case["loss"],
        eps_clip_low=case["eps_clip_low"],
        eps_clip_high=case["eps_clip_high"],
        clip_ratio_c=case["clip_ratio_c"],
        cispo__cispo_eps_clip_low=case["cispo"]["low"],
        cispo__cispo_eps_clip_high=case["cispo"]["high"],
        kl_cov__kl_cov_frac=case["kl_cov"]["frac"],
        kl_cov__ppo_kl_coef=case["kl_cov"]["coef"],
        **{f"off_policy_correction__{key}": value for key, value in case["off_policy"].items()},
    )
