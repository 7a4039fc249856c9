"""Checkpoints: complete, verified, free of topology, and small in memory while they are made.

Start with :mod:`store` (the folder and the order of things on disk), then :mod:`rank_writer` and :mod:`rank_reader`
(one rank's share), then :mod:`checkpointer` (all of it for ranks in one process group).
"""
