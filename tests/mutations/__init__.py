"""Faults of one line, and the tests that are to notice each: a suite that is made faster must not become blind.

``python -m tests.mutations`` plants them one by one on a copy of the tree; in the matrix they take turns.
"""

from tests.mutations import of_runs, of_training

MUTATIONS = (*of_training.MUTATIONS, *of_runs.MUTATIONS)
