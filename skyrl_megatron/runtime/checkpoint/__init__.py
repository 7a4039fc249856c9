"""Checkpoints: complete, verified, free of topology, and small in memory while they are made.

Start with :mod:`checkpointer` (a save and a resume as a whole), then :mod:`store` (the folder and the order of things
on disk), then :mod:`rank_writer` and :mod:`rank_reader` (one rank's share). The format is :mod:`bridges.torch_dist`.
"""
