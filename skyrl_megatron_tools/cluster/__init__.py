"""Start Ray on several hosts: under SLURM, over ssh, or on this host (``launch/ray_cluster.sh``)."""

from __future__ import annotations
