"""Mistakes that were silent in other trainers, planted to show that the checks see them."""

import contextlib
from unittest import mock


@contextlib.contextmanager
def planted(fault, engine):
    """The named fault for the enclosed block; None plants nothing."""
    with contextlib.ExitStack() as stack:
        if fault is not None:
            stack.enter_context(FAULTS[fault](engine))
        yield


def kl_counts_twice(engine):
    from skyrl_megatron.algorithms import objective

    right = objective.compute_approx_kl
    return mock.patch.object(objective, "compute_approx_kl", lambda *args: 2 * right(*args))


def one_micro_batch_dropped(engine):
    right = engine._micro_batches
    return mock.patch.object(engine, "_micro_batches", lambda *args: right(*args)[:-1])


def gradient_times_cp(engine):
    """Every cp rank computes the same loss: summing their gradients counts it cp times."""
    from skyrl_megatron.runtime import packed_inputs

    right = packed_inputs.gather_tokens
    return mock.patch.object(
        packed_inputs,
        "gather_tokens",
        lambda local, lengths, group, **_: right(local, lengths, group, shared_loss=False),
    )


def softmax_over_the_local_vocabulary(engine):
    """The sums over the vocabulary are not added up over tp."""
    from skyrl_megatron.runtime import vocab_parallel

    return mock.patch.object(vocab_parallel.dist, "all_reduce", lambda *args, **kwargs: None)


FAULTS = {
    "KL counts twice": kl_counts_twice,
    "one micro-batch dropped": one_micro_batch_dropped,
    "gradient times cp": gradient_times_cp,
    "softmax over the local vocabulary": softmax_over_the_local_vocabulary,
}
