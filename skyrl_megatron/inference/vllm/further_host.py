"""``python -m skyrl_megatron.inference.vllm.further_host ARGUMENTS``: an engine's workers on a host that is not its
first, with the arguments of vLLM's server."""

import sys

from skyrl_megatron.inference.vllm.compat import run_further_host

if __name__ == "__main__":
    run_further_host(sys.argv[1:])
