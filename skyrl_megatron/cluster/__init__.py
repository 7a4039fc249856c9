"""Ray over several hosts: under SLURM, on hosts reached by ssh, or on this one (``launch/ray_cluster.sh``)."""
