"""``python -m skyrl_megatron.workers.cluster_gpus ADDRESS``: the GPUs of each node of a Ray cluster, as a JSON list.

A process of its own: whoever asks stays free of Ray, and of a connection. Exit code 1 and a message when none answers.
"""

from __future__ import annotations

import json
import sys

import ray

from skyrl_megatron.errors import LaunchError
from skyrl_megatron.workers.ray_setup import join


def main(address: str) -> int:
    """Print what the cluster at ``address`` says of its living nodes; returns the exit code."""
    try:
        join(address)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps([int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
