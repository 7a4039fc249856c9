"""``python -m skyrl_megatron.inference.vllm.limited_server ARGUMENTS``: vLLM's server, with the limits of
``inference/http_limits.py``.

vLLM has no option for uvicorn's protocol, and makes it of the name ``auto``.
"""

import runpy

from uvicorn import config

from skyrl_megatron.inference.http_limits import LimitedProtocol

MODULE = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Run vLLM's server with this process's arguments, until it ends."""
    config.HTTP_PROTOCOLS["auto"] = f"{LimitedProtocol.__module__}:{LimitedProtocol.__name__}"
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
