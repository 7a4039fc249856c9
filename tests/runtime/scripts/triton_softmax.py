"""Run as a program: the errors of the Triton kernel, interpreted on CPU, over what is allowed; prints JSON.

Needs ``TRITON_INTERPRET=1``, which Triton reads when its functions are defined, and so a process of its own. Ranks are
forks of it.
"""

import json
import multiprocessing
import sys

CASES = [
    (("float32", 1.0, 0.0), {}),
    (("bfloat16", 0.7, 0.3), {"overwrite": True}),
    (("bfloat16", 1.0, 0.3), {"part": True}),
    (("float32", 0.7, 0.3), {"hidden": 24, "part": True}),
]


def errors(rank, world, store, width, pipe):
    import torch.distributed as dist

    from skyrl_megatron.runtime import logprobs as vocab_parallel
    from skyrl_megatron.runtime import triton_softmax as triton_kernel
    from tests.runtime.test_vocab_parallel import compute

    triton_kernel.BLOCK = 512  # several blocks in the tests' vocabulary
    vocab_parallel.kernel_for = lambda logits: triton_kernel
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    pipe.send([compute(*case, width, group=dist.group.WORLD, tokens=10, **how) for case, how in CASES])


def main(folder):
    import skyrl_megatron.runtime.triton_softmax  # noqa: F401  before the ranks are forked
    from tests.runtime.test_vocab_parallel import PADDED

    fork, found = multiprocessing.get_context("fork"), {}
    world = 2
    for name in ("padded", "a rank of padding alone"):
        pipes = [fork.Pipe() for _ in range(world)]
        store = f"{folder}/{name}"
        ranks = [
            fork.Process(target=errors, args=(rank, world, store, PADDED[name], pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        found[name] = [pipe[0].recv() if pipe[0].poll(200) else [] for pipe in pipes]
        for rank in ranks:
            rank.join(10)
            rank.kill()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
