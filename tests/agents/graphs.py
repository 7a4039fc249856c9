"""Random trajectories: agents that continue, fork, edit and compact their history."""

from __future__ import annotations

import random

import numpy as np

from skyrl_megatron.inference.protocol import Generation

VOCABULARY = 23


def generation(rng: random.Random, *, routes: int | None = None) -> Generation:
    ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
    logprobs = [-rng.random() for _ in ids]
    return Generation(ids, logprobs, rng.choice(["stop", "length"]), [("7", 0, len(ids))], routes)


def random_graph(seed: int, calls: int):
    """A graph whose calls continue random earlier ones, or none."""
    from skyrl_megatron_agents.graph import Graph, SampledCall

    rng, graph = random.Random(seed), Graph()
    for number in range(calls):
        parent = rng.choice([None, *graph.calls]) if graph.calls else None
        length = rng.randint(1, 3) if parent is None else rng.randint(0, 3)
        rest = np.asarray([rng.randrange(VOCABULARY) for _ in range(length)], np.int32)
        graph.restore(SampledCall(number, parent, rest, generation(rng), b"%d" % number))
    return graph
