"""Does a run fit? What each GPU and each node holds in every phase, and the nearest setting that fits.

Read bottom up: ``parameters.py`` counts what ranks hold of a model, ``adapters.py`` of low-rank adapters,
``optimizer.py`` what Megatron's optimizers keep of both, ``layers.py`` and ``activations.py`` what a micro-batch
takes, ``roles.py`` all of that for a role, ``engines.py`` what an engine takes. ``phases.py`` puts them together for
each GPU, ``host.py`` for each node,
``budget.py`` holds them against what there is (``limits.py``), ``nearest.py`` finds what to change. Nothing is built
and nothing started: all of it follows from ``config.json`` and the configuration.
"""
