"""Predict step times, utilisation and staleness."""

from __future__ import annotations
