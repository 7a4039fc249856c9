"""Seeing a run: checks and estimates before it, recorders during it, reports and comparisons after it."""
