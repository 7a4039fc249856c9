"""Seeds of requests on CPU whose prompts come in chunks. vLLM 0.32 samples behind every chunk, drops what is sampled
behind all but the last, and takes their random numbers back by the generator's offset, which generators on CPU do not
have: the engine ends with "CPU Generator does not use offset"."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def rewind_seeds_on_cpu() -> None:
    """Put generators back to where they were before the sample of an unfinished prompt."""
    sample, bookkeeping = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def sample_and_rewind(self: Any, *arguments: Any, **options: Any) -> Any:
        unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        generators = [self.input_batch.generators[each] for each in unfinished if each in self.input_batch.generators]
        states = [generator.get_state() for generator in generators]
        output = sample(self, *arguments, **options)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    def keep_generators(self: Any, *arguments: Any, **options: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeeping(self, *arguments, **options)
        finally:
            self.input_batch.generators = generators

    CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync = sample_and_rewind, keep_generators
