"""Train on what a generator of one's own samples: every other sample of a prompt is asked with a hint before it.

    python launch/examples/own_generator.py [key=value …]

takes the keys of ``skyrl_megatron.entrypoints.main_base``. A generator turns prompts into trajectories; this one
changes the prompts and leaves the sampling to the one that comes with the package. All samples of a prompt stay one
group, so GRPO compares those with the hint and those without.
"""

import sys
from typing import Any

from skyrl_megatron.plugins import register_generator
from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
from skyrl_megatron.rollout.interface import GeneratorInput, GeneratorOutput

HINT = "Count well. "


@register_generator("hinted")
class Hinted(SkyRLGymGenerator):
    """Training samples with an odd number within their group get the hint; evaluation gets none."""

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        metadata, ids = input_batch.get("batch_metadata"), input_batch.get("trajectory_ids")
        training = metadata is not None and metadata.training_phase == "train"
        numbers = [one.repetition_id for one in ids] if ids else [0] * len(input_batch["prompts"])
        hinted = [training and number % 2 == 1 for number in numbers]
        prompts: Any = [
            [*prompt[:-1], {**prompt[-1], "content": HINT + prompt[-1]["content"]}] if hint else prompt
            for prompt, hint in zip(input_batch["prompts"], hinted, strict=True)
        ]
        output = await super().generate({**input_batch, "prompts": prompts}, disable_tqdm)
        share = sum(hinted) / max(len(hinted), 1)
        output["rollout_metrics"] = {**(output["rollout_metrics"] or {}), "generate/hinted": share}
        return output


if __name__ == "__main__":
    from skyrl_megatron.entrypoints.main_base import main

    sys.exit(main(["generator.name=hinted", *sys.argv[1:]]))
