"""The small algorithms in plain Python floats (fp64), from their papers' formulas, and the cases of recorded numbers.

``python -m tests.algorithms.plain_forms`` writes ``tests/data/small_algorithms.json``: inputs, and what these
functions make of them. The tests compare the package with the file, and the file with these functions.
"""

from __future__ import annotations

import json
import random
from math import exp, sqrt
from pathlib import Path

PATH = Path(__file__).parents[1] / "data" / "small_algorithms.json"
EPSILON = 1e-6


def mean(values):
    return sum(values) / len(values)


def std(values):
    """Unbiased; 0 for one value."""
    return sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def members(uids):
    return {uid: [row for row, other in enumerate(uids) if other == uid] for uid in uids}


def grpo(scores, uids):
    """arXiv:2402.03300, section 4.1.2; a group of one keeps its score."""
    found = [0.0] * len(scores)
    for rows in members(uids).values():
        own = [scores[row] for row in rows]
        centre, scale = (mean(own), std(own)) if len(rows) > 1 else (0.0, 1.0)
        for row in rows:
            found[row] = (scores[row] - centre) / (scale + EPSILON)
    return found


def gdpo(parts, weights, uids):
    """arXiv:2601.05242: each reward by its group, the weighted sum by its batch."""
    total = [0.0] * len(parts)
    for rows in members(uids).values():
        for place, weight in enumerate(weights):
            own = [parts[row][place] for row in rows]
            for row in rows:
                total[row] += weight * (parts[row][place] - mean(own)) / (std(own) + EPSILON)
    return [(value - mean(total)) / (std(total) + EPSILON) for value in total]


def rae(scores, roles, decay, baselines):
    """arXiv:2506.24119: the mean of each role before the score."""
    found, means = [], dict(baselines)
    for score, role in zip(scores, roles, strict=True):
        before = means.get(role, 0.0)
        found.append(score - before)
        means[role] = decay * before + (1 - decay) * score
    return found, means


def overlong(lengths, most, buffer):
    """arXiv:2503.14476, equation 13, with the sign of a penalty."""
    found = []
    for length in lengths:
        if length <= most - buffer:
            found.append(0.0)
        elif length <= most:
            found.append(-((most - buffer) - length) / buffer)
        else:
            found.append(1.0)
    return found


def relative(lengths, scores, uids):
    """arXiv:2501.12599, section 2.3.3: the length reward."""
    found = [0.0] * len(lengths)
    for rows in members(uids).values():
        longest, shortest = max(lengths[row] for row in rows), min(lengths[row] for row in rows)
        for row in rows:
            if longest != shortest:
                share = 0.5 - (lengths[row] - shortest) / (longest - shortest)
                found[row] = share if scores[row] > 0 else min(0.0, share)
    return found


def error_kept(old, rollout, mask, limit):
    """Rows whose mean of exp(|old − rollout|) over the valid tokens is at most the limit."""
    kept = []
    for p, q, valid in zip(old, rollout, mask, strict=True):
        errors = [exp(abs(a - b)) for a, b, counts in zip(p, q, valid, strict=True) if counts]
        kept.append(not errors or mean(errors) <= limit)
    return kept


def observation_loss(log_probs, mask):
    """arXiv:2605.24517: the mean cross-entropy of all tokens of the environment, and its gradient."""
    tokens = [
        p for row, valid in zip(log_probs, mask, strict=True) for p, counts in zip(row, valid, strict=True) if counts
    ]
    gradient = [[-counts / max(len(tokens), 1) for counts in valid] for valid in mask]
    return -sum(tokens) / max(len(tokens), 1), gradient


def seq_mask_tis(old, rollout, mask, low, high):
    """Kept rows (geometric mean of r within bounds), and r of each token, which weighs its loss."""
    kept, weights = [], []
    for p, q, valid in zip(old, rollout, mask, strict=True):
        logs = [a - b if counts else 0.0 for a, b, counts in zip(p, q, valid, strict=True)]
        kept.append(low <= exp(sum(logs) / max(sum(valid), 1)) <= high)
        weights.append([exp(each) for each in logs])
    return kept, weights


SCORES = {
    "mixed": lambda draw: draw.uniform(-1, 1),
    "negative": lambda draw: -draw.uniform(0.5, 2),
    "zero": lambda draw: 0.0,
    "constant": lambda draw: 0.75,
    "binary": lambda draw: float(draw.random() < 0.4),
    "large": lambda draw: draw.uniform(-1e4, 1e4),
}


def cases():
    """Inputs with negative, zero, constant and mixed rewards, and what the functions make of them."""
    made = []
    for seed, kind in enumerate(SCORES):
        draw = random.Random(seed)
        uids = [uid for uid in "abcd" for _ in range(draw.randint(1, 5))]
        rows = len(uids)
        parts = [[SCORES[kind](draw), SCORES[kind](draw) / 3] for _ in range(rows)]
        scores, weights = [sum(pair) for pair in parts], [1.0, 0.5]
        roles = [draw.choice(["first", "second"]) for _ in range(rows)]
        lengths = [draw.randint(1, 12) for _ in range(rows)]
        given = {"kind": kind, "uids": uids, "parts": parts, "scores": scores, "roles": roles, "lengths": lengths}
        advantages, means = rae(scores, roles, 0.95, {"first": 0.25})
        mask = [[int(place < length) for place in range(12)] for length in lengths]
        old = [[-round(draw.uniform(0.1, 3), 4) for _ in range(12)] for _ in range(rows)]
        spread = 10 ** -draw.uniform(0, 4)
        rollout = [[round(value + draw.gauss(0, spread), 6) for value in row] for row in old]
        kept, weights_of_tokens = seq_mask_tis(old, rollout, mask, 0.999, 1.002)
        made.append(
            given
            | {"weights": weights, "mask": mask, "old": old, "rollout": rollout}
            | {
                "expected": {
                    "grpo": grpo(scores, uids),
                    "gdpo": gdpo(parts, weights, uids),
                    "rae": advantages,
                    "rae_means": means,
                    "overlong": overlong(lengths, 10, 4),
                    "relative": relative(lengths, scores, uids),
                    "error_kept": error_kept(old, rollout, mask, 1.5),
                    "observation_loss": observation_loss(old, [[1 - each for each in row] for row in mask])[0],
                    "seq_mask_kept": kept,
                    "seq_mask_weights": weights_of_tokens,
                }
            }
        )
    return made


if __name__ == "__main__":
    PATH.write_text(json.dumps(cases()) + "\n")
