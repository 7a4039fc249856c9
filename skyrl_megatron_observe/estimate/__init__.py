"""Estimates of memory and time of a planned run."""
