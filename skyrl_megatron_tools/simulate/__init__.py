"""Simulate a run to predict its step time, utilisation and staleness."""

from __future__ import annotations
