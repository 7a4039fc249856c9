"""Checkpoints: complete, verified, independent of the layout, with little extra memory while they are saved.

Start with :mod:`checkpointer` (a whole save or resume), then :mod:`store` (the folder and the order of writes), then
:mod:`rank_files` (one rank's part). The format is :mod:`bridges.torch_dist`.
"""
