"""Low-rank adapters (LoRA): trained in place of a policy's weights, and sent to engines alone or merged."""

from skyrl_megatron.plugins import ADAPTERS

ADAPTERS.register_path("trained", "skyrl_megatron_lora.configured:configured_adapter")
ADAPTERS.register_path("saved", "skyrl_megatron_lora.folder:save_adapter")
ADAPTERS.register_path("source", "skyrl_megatron_lora.source:AdapterSource")
ADAPTERS.register_path("merged_source", "skyrl_megatron_lora.source:MergedWeightSource")
ADAPTERS.register_path("sent", "skyrl_megatron_lora.tensors:sent_adapters")
ADAPTERS.register_path("served", "skyrl_megatron_lora.tensors:served_adapters")
