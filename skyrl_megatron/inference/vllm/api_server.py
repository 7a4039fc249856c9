"""``python -m skyrl_megatron.inference.vllm.api_server ARGUMENTS``: vLLM's server, whose requests are checked as
those of a run's own engines are, with the limits of ``inference/http_endpoint.py`` on those who connect.
"""

from uvicorn import config

from skyrl_megatron.inference.http_endpoint import LimitedProtocol
from skyrl_megatron.inference.vllm.admission import serve

if __name__ == "__main__":
    # vLLM has no option for uvicorn's protocol, and makes it of the name ``auto``
    config.HTTP_PROTOCOLS["auto"] = f"{LimitedProtocol.__module__}:{LimitedProtocol.__name__}"
    serve()
