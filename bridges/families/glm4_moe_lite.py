"""GLM-4.7-Flash: DeepSeek-V3's model; its config lists the dense layers (``mlp_layer_types``)."""

from __future__ import annotations

from dataclasses import replace

from bridges.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, model_type="glm4_moe_lite", aliases=(), architecture="Glm4MoeLiteForCausalLM")
