"""The whole training pass of every family on a CUDA device without a GPU: no operation meets a tensor that was left on
the host, every parameter gets a gradient, of its shape and on its device.

Layers are ours: Transformer Engine's kernels read memory, which fake tensors have none of, so that its layers stop at
their first product (``tests/te`` compares what they are made of). Recomputation is off, because torch's engine, which
it calls, asks the driver for streams; collectives and counts of tokens are stand-ins (``scripts/fake_cuda.py``).
"""

import re

import pytest

from tests.support import forked

LAYOUTS = {"single": {}, "tp2": {"tp": 2}, "ep2": {"ep": 2}, "tp2·ep2": {"tp": 2, "ep": 2}, "pp2": {"pp": 2}}
DENSE = {"llama", "qwen2", "qwen3"}
FAMILIES = [*sorted(DENSE), "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
PLAIN = [
    ("qwen3_moe", "tp2·ep2", {}),
    ("deepseek_v3", "single", {"fused": True}),
    ("qwen3", "tp2", {"shared": True}),
]
MORE = [
    *(
        (family, layout, {})
        for family in FAMILIES
        for layout in LAYOUTS
        if ("ep" not in layout or family not in DENSE) and (family, layout) != ("qwen3_moe", "tp2·ep2")
    ),
    ("qwen3_moe", "ep2", {"adapters": True}),
    ("deepseek_v3", "tp2", {"adapters": True}),
    ("qwen3", "pp2", {"fused": True}),
    *((family, "single", {"shared": True}) for family in ("deepseek_v3", "gpt_oss", "qwen3_moe")),
]


@pytest.fixture(scope="module")
def results(request):
    """(family, layout, options) → results of its ranks, or their error; all computed in one process."""
    wanted = [item.callspec.params["case"] for item in request.session.items if item.path == request.path
              and hasattr(item, "callspec")]  # fmt: skip
    ours, theirs = forked.context().Pipe(duplex=False)
    process = forked.context().Process(target=all_passes, args=(wanted, theirs))
    process.start()
    theirs.close()
    assert ours.poll(1500), "the passes do not end"
    found = ours.recv()
    process.join(60)
    return found


def all_passes(cases, pipe):
    import logging
    import warnings

    from tests.runtime.scripts.training_pass import training_pass

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = {}
    for case in cases:
        family, layout, options = case
        ranks = (0, 1) if "pp" in layout else (0,)
        try:
            found[repr(case)] = [training_pass(family, LAYOUTS[layout], rank, **options) for rank in ranks]
        except Exception as error:
            found[repr(case)] = f"{type(error).__name__}: {error}"
    pipe.send(found)


def name_of(case):
    family, layout, options = case
    return " ".join([family, layout, *(f"{key}={value}" for key, value in options.items())])


@pytest.mark.process
@pytest.mark.parametrize("case", [*PLAIN, *(pytest.param(case, marks=pytest.mark.full_matrix) for case in MORE)],
                         ids=name_of)  # fmt: skip
def test_a_training_pass(results, case):
    found, (_, layout, options) = results[repr(case)], case
    assert isinstance(found, list), found
    tp = LAYOUTS[layout].get("tp", 1)
    for rank, result in enumerate(found):
        last = rank == len(found) - 1
        assert not result["elsewhere"] and result["trained"] > 5
        # B starts as zeros, but its gradient does not; experts without tokens have one, too: of zeros
        assert not result["without gradient"]
        width = 64 if options.get("fused") or not last else -(-1003 // tp)
        rows = result["tokens"] if last else result["tokens"] // tp
        assert result["output"] == ([1, rows, width] if last else [rows, 1, width])
        assert result["loss"] == (([], "cuda:0") if last else None)
        assert result["received"] == (None if rank == 0 else True)


FAULTS = [("qwen3", "single", {"fault": fault}) for fault in ("mask left on the host", "positions left on the host")]


@pytest.mark.process
@pytest.mark.parametrize("case", FAULTS, ids=name_of)
def test_a_tensor_left_on_the_host_shows(results, case):
    assert re.match(r"AlgorithmError: loss_mask is on cpu|FakeTensorDeviceMismatchError", results[repr(case)])
