"""pass@k and majority@k against all choices of k responses, one by one."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from math import prod

import pytest


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_choices(samples):
    from skyrl_megatron.algorithms.metrics import pass_at_k

    for passed, k in product(range(samples + 1), range(1, samples + 1)):
        responses = [row < passed for row in range(samples)]
        chosen = [any(choice) for choice in combinations(responses, k)]
        assert pass_at_k(samples, passed, k) == pytest.approx(sum(chosen) / len(chosen), abs=1e-15)


def test_pass_at_k_is_the_product_of_its_paper():
    """arXiv:2107.03374 computes 1 − Π (1 − k / i) over i from n−c+1 to n."""
    from skyrl_megatron.algorithms.metrics import pass_at_k

    product_ = 1 - prod(1 - Fraction(10, i) for i in range(200 - 37 + 1, 201))
    assert pass_at_k(200, 37, 10) == pytest.approx(float(product_), abs=1e-14)
    assert pass_at_k(1000, 999, 2) == 1.0 and pass_at_k(64, 0, 32) == 0.0


def enumerated(answers, credits, k):
    """The mean credit of the winner over all choices; tied answers win equally often."""
    total = Fraction(0)
    choices = list(combinations(range(len(answers)), k))
    for choice in choices:
        votes = Counter(answers[row] for row in choice)
        tied = [answer for answer, count in votes.items() if count == max(votes.values())]
        for answer in tied:
            own = [Fraction(credits[row]) for row in range(len(answers)) if answers[row] == answer]
            total += sum(own) / len(own) / len(tied)
    return float(total / len(choices))


@pytest.mark.parametrize(
    ("answers", "credits"),
    [
        ("aabbc", [1, 1, 0, 0, 0]),  # a and b tie
        ("abcdef", [1, 0, 0, 0, 0, 0]),  # all tie
        ("aaabbbcd", [0, 0, 0, 1, 1, 1, 0, 0]),
        ("aaaaaa", [1, 1, 1, 1, 1, 1]),
        ("aabbccd", [1, 0, 0, 0, 1, 1, 0]),  # the same answer was scored both ways
        ("ab", [0, 0]),
    ],
)
def test_majority_at_k_is_the_mean_over_all_choices(answers, credits):
    from skyrl_megatron.algorithms.metrics import majority_at_k

    for k in range(1, len(answers) + 1):
        assert majority_at_k(answers, credits, k) == pytest.approx(enumerated(answers, credits, k), abs=1e-14)


def test_ties_share_the_vote():
    from skyrl_megatron.algorithms.metrics import majority_at_k

    assert majority_at_k("aabb", [1, 1, 0, 0], 4) == 0.5
    assert majority_at_k("abc", [1, 0, 0], 3) == pytest.approx(1 / 3)
    assert majority_at_k("aabbb", [1, 1, 0, 0, 0], 5) == 0.0


def test_one_response_is_the_mean_credit():
    from skyrl_megatron.algorithms.metrics import majority_at_k, pass_at_k

    assert majority_at_k("abcab", [1, 0, 0, 1, 0], 1) == pytest.approx(2 / 5) == pass_at_k(5, 2, 1)


@pytest.mark.parametrize("k", [0, 4])
def test_k_that_cannot_be_drawn(k):
    from skyrl_megatron.algorithms.metrics import majority_at_k, pass_at_k

    for score in (lambda: pass_at_k(3, 1, k), lambda: majority_at_k("abc", [1, 0, 0], k)):
        with pytest.raises(ValueError, match=f"k={k} must be between 1 and the number of responses, 3"):
            score()
