"""Shape legend and the batches that travel between layers.

Legend (used in every docstring and comment of the project):

    B  sequences of a batch                 V  vocabulary (``V_padded`` when padded to the tp size)
    T  response tokens, right-aligned and padded at the left
    S  tokens of a padded sequence (prompt + response), padded at the left
    P  packed tokens: the sequences of a micro-batch laid end to end, no padding
    H  hidden size   E  experts   K  experts per token (top-k)   L  layers

The runtime works on packed ``[P]`` tensors with ``cu_seqlens``; algorithms see ``[B, T]``.
"""

from __future__ import annotations
