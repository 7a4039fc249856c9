"""Explain differences between the log-probs of trainer and engine."""

from __future__ import annotations
