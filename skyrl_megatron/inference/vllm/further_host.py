"""``python -m skyrl_megatron.inference.vllm.further_host ARGUMENTS``: run an engine's workers on a host other than
host 0. The arguments are those of vLLM's server."""

import sys

from skyrl_megatron.inference.vllm.compat import run_other_host

if __name__ == "__main__":
    run_other_host(sys.argv[1:])
