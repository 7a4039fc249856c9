"""Mistakes that were silent in other trainers, planted to show that the checks see them."""

import contextlib
from unittest import mock

import numpy as np


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
    from skyrl_megatron.runtime import logprobs as vocab_parallel

    return mock.patch.object(vocab_parallel.dist, "all_reduce", lambda *args, **kwargs: None)


def scores_are_those_of_the_choice(engine):
    """Scores of experts that the router did not choose are 0, and have no gradient."""
    import torch

    def zeroed(choose):
        def get_replay_topk(self, scores, *rest):
            _, natural = rest[-1](scores, *rest[:-1])
            return choose(self, torch.zeros_like(scores).scatter(1, natural, scores.gather(1, natural)), *rest)

        return get_replay_topk

    return _in_replay("get_replay_topk", zeroed)


def routes_of_the_next_layer(engine):
    from skyrl_megatron.runtime import packed_inputs

    def shifted(batch, *rest):
        batch.rollout_routes = [None if each is None else np.roll(each, 1, axis=1) for each in batch.rollout_routes]
        return right(batch, *rest)

    right = packed_inputs._routes
    return mock.patch.object(packed_inputs, "_routes", shifted)


def newest_routes_recomputed(engine):
    """Several micro-batches wait for their backward pass: the last one's routes are taken for the first one's."""

    def swapped(right):
        def routes(self):
            if not self.in_pass and self.queue:
                return self.queue.pop()
            return right(self)

        return routes

    return _in_replay("take", swapped)


def recomputed_without_routes(engine):
    return _in_replay("take", lambda right: lambda self: right(self) if self.in_pass else None)


def routes_of_another_row(engine):
    from skyrl_megatron.runtime import engine as module

    def pack(part, *rest, **options):
        part.rollout_routes = part.rollout_routes[::-1]
        return right(part, *rest, **options)

    right = module.pack
    return mock.patch.object(module, "pack", pack)


def _in_replay(name, change):
    from skyrl_megatron.runtime.model.pass_inputs import RoutingReplay

    return mock.patch.object(RoutingReplay, name, change(getattr(RoutingReplay, name)))


FAULTS = {
    "scores are those of the choice": scores_are_those_of_the_choice,
    "routes of the next layer": routes_of_the_next_layer,
    "newest routes recomputed": newest_routes_recomputed,
    "recomputed without routes": recomputed_without_routes,
    "routes of another row": routes_of_another_row,
    "KL counts twice": kl_counts_twice,
    "one micro-batch dropped": one_micro_batch_dropped,
    "gradient times cp": gradient_times_cp,
    "softmax over the local vocabulary": softmax_over_the_local_vocabulary,
}
