"""FLOPs: the peak of a device, by its name."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_peak_is_that_of_the_part(name: str, peak: float | None) -> None:
    from skyrl_megatron.runtime.flops import peak_of

    assert peak_of(name) == peak
