"""A model family as a user would write it: Mistral, which has the tensors of Llama."""

import os
from dataclasses import replace
from pathlib import Path

from bridges.families import register
from bridges.families.llama import FAMILY as LLAMA
from bridges.family import MegatronModelConfig, rotary_arguments
from bridges.hf_config import attention_fields, base_transformer, dense_shape, model_arguments, require


def mark(kind):
    """Leave a line with this process's id in ``$SKYRL_TEST_MARKS/<kind>``."""
    with Path(os.environ["SKYRL_TEST_MARKS"], kind).open("a") as file:
        file.write(f"{os.getpid()}\n")


def read_mistral(config):
    mark("family")
    require(config, "sliding_window", (None,), "Megatron's window differs: use a model without one")
    rotary, attributes = rotary_arguments(config)
    transformer = {
        **base_transformer(config),
        **attention_fields(config),
        "ffn_hidden_size": config.intermediate_size,
        "add_bias_linear": False,
    }
    return MegatronModelConfig(transformer, model_arguments(config, **rotary), attributes)


MISTRAL = register(
    replace(
        LLAMA,
        model_type="mistral",
        architecture="MistralForCausalLM",
        read_shape=dense_shape,
        read_megatron=read_mistral,
    )
)
