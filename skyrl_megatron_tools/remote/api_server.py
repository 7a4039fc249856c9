"""``python -m skyrl_megatron_tools.remote.api_server ARGUMENTS``: vLLM's server with this package's request checks
(``admission.py``) and connection limits (``http_endpoint.py``). With ``--headless`` as first argument it runs an
engine's workers on a host other than host 0, which serves nothing.
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["--headless"]:
        from skyrl_megatron.inference.vllm.compat import run_other_host

        run_other_host(sys.argv[1:])
    else:
        from uvicorn import config

        from skyrl_megatron.inference.vllm.admission import serve
        from skyrl_megatron_agents.http_endpoint import LimitedProtocol

        # vLLM has no option for uvicorn's protocol class and uses the one named ``auto``
        config.HTTP_PROTOCOLS["auto"] = f"{LimitedProtocol.__module__}:{LimitedProtocol.__name__}"
        serve()
