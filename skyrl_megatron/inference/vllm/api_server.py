"""``python -m skyrl_megatron.inference.vllm.api_server ARGUMENTS``: vLLM's server with this package's request checks
(``admission.py``) and connection limits (``inference/http_endpoint.py``)."""

from uvicorn import config

from skyrl_megatron.inference.http_endpoint import LimitedProtocol
from skyrl_megatron.inference.vllm.admission import serve

if __name__ == "__main__":
    # vLLM has no option for uvicorn's protocol class and uses the one named ``auto``
    config.HTTP_PROTOCOLS["auto"] = f"{LimitedProtocol.__module__}:{LimitedProtocol.__name__}"
    serve()
