"""Faults in real runs: what is promised of each, and the tests that hold it to that."""
