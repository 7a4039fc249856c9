"""The experts of a sequence's tokens, put together from what each layer's router recorded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

PREFIX = "routes."


def recorded_name(layer: int) -> str:
    """Return the name that the routes of a layer are recorded under (``runtime/recording.py``)."""
    return f"{PREFIX}{layer}"


def recorded_layers(found: Mapping[str, np.ndarray]) -> list[int]:
    """Return the layers that routes were recorded of."""
    return sorted(int(name.removeprefix(PREFIX)) for name in found if name.startswith(PREFIX))


def routes_of(found: Mapping[str, np.ndarray], layers: int) -> np.ndarray | None:
    """Return [n, ``layers``, K] uint8/uint16 of a row, 0 in layers that have no router; None: none was recorded."""
    routed = recorded_layers(found)
    if not routed:
        return None
    each = np.stack([found[recorded_name(layer)] for layer in routed], 1)
    whole = np.zeros((len(each), layers, each.shape[2]), np.min_scalar_type(max(int(each.max(initial=0)), 0)))
    whole[:, routed] = each
    return whole
