"""The algorithms as tensor maths on [B, T]: advantages, losses, KL, off-policy corrections, and their averaging.

``advantages/`` and ``losses/`` hold a file for each algorithm; ``objective`` combines them for the training engine;
``registry`` adds custom functions. Nothing here knows of processes or devices, except that registries synchronise
through Ray once it runs.
"""
