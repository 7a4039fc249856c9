"""The layers of a real Transformer Engine on the meta device of a machine without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

HOPPER = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H100", total_memory=80 * 10**9)
TE_LAYERS = {"transformer_impl": "transformer_engine"}


@contextlib.contextmanager
def hopper() -> Iterator[None]:
    """Answer what Transformer Engine asks of the GPU while it makes modules or chooses kernels; there is none here."""
    import torch

    answers = {
        "is_available": lambda: True,
        "current_device": lambda: torch.device("meta"),  # Megatron makes parameters there
        "get_device_properties": lambda *_: HOPPER,
        "get_device_capability": lambda *_: (HOPPER.major, HOPPER.minor),
    }
    usual = {name: getattr(torch.cuda, name) for name in answers}
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(torch.cuda, name, function)


def build_te(source: Any, groups: Any, **options: Any):
    """Build this rank's part of a model from Transformer Engine's layers, on meta, in bf16."""
    import torch

    from skyrl_megatron.runtime.model.build import build_model

    with hopper():
        return build_model(
            source,
            groups,
            dtype=torch.bfloat16,
            device=torch.device("meta"),
            transformer_config_kwargs=TE_LAYERS,
            **options,
        )
