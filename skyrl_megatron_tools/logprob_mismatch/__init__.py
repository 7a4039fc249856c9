"""Find the cause of a log-prob mismatch between trainer and engine."""

from __future__ import annotations
