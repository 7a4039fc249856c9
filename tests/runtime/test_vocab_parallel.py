"""Log-probs, entropies and their gradients against fp64, on vocabularies that are padded and split."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest

from tests.runtime import softmax_reference
from tests.runtime.softmax_reference import VOCAB

PADDED = {"whole": 1003, "padded": 1008, "a rank of padding alone": 2008}


def alone():
    """The group of one rank, which nothing is sent in."""
    import torch.distributed as dist

    class Alone(dist.ProcessGroup):
        def __init__(self):
            super().__init__(0, 1)

    return Alone()


def compute(
    dtype,
    temperature,
    entropy_weight,
    width,
    *,
    hidden=0,
    overwrite=False,
    group=None,
    vocab=VOCAB,
    part=False,
    tokens=40,
):
    """Return how far this rank's results are from fp64, over what is allowed."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.runtime.logprobs import SoftmaxSettings, fused_logprobs_and_entropy, logprobs_and_entropy
    from skyrl_megatron.runtime.softmax import Support

    group = group or alone()
    made = softmax_reference.inputs(dtype, hidden=hidden, tokens=tokens)
    kept = softmax_reference.kept(made["targets"]) if part else None
    support = None
    if part:
        counts = (kept.sum(-1) * ~kept.all(-1)).numpy()
        ids = (kept & ~kept.all(-1, keepdim=True)).nonzero()[:, 1].numpy()
        support = Support.of(ids, counts, torch.device("cpu"))
    exact = softmax_reference.reference(made, temperature, entropy_weight, kept)
    share = width // group.size()
    first, last = group.rank() * share, min((group.rank() + 1) * share, VOCAB)
    mine = slice(first, max(first, last))

    def columns(whole, dim):
        part = whole.narrow(dim, mine.start, mine.stop - mine.start) if mine.start < VOCAB else whole.narrow(dim, 0, 0)
        shape = list(part.shape)
        shape[dim] = share - part.shape[dim]
        return torch.cat([part, torch.full(shape, 50.0, dtype=whole.dtype)], dim).requires_grad_()

    settings = SoftmaxSettings(
        vocab, temperature, chunk_size=7, with_entropy=entropy_weight > 0, overwrite=overwrite and not hidden
    )
    if hidden:
        x, weight = made["hidden"].clone().requires_grad_(), columns(made["head"], 0)
        results = fused_logprobs_and_entropy(x, weight, made["targets"], group, settings, None, support)
    else:
        leaf = columns(made["logits"], 1)
        results = logprobs_and_entropy(leaf * 1, made["targets"], group, settings, support)
    softmax_reference.loss(made, *results, entropy_weight).backward()
    found = {"logprobs": results[0], "entropy": results[1]}
    if hidden:
        assert not weight.grad[mine.stop - mine.start :].any()
        if group.size() > 1:
            dist.all_reduce(x.grad, group=group)
        found |= {"hidden": x.grad, "head": weight.grad[: mine.stop - mine.start]}
        exact["head"] = exact["head"][mine]
    else:
        assert not leaf.grad[:, mine.stop - mine.start :].any()
        found["logits"] = leaf.grad[:, : mine.stop - mine.start]
        largest = exact["logits"].abs().amax(-1, keepdim=True)  # of the whole row, not of this rank's columns
        exact["logits"] = torch.cat([exact["logits"][:, mine], largest], 1)
        found["logits"] = torch.cat([found["logits"], largest.to(leaf.grad.dtype)], 1)
    return softmax_reference.excess(found, exact)


CASES = list(itertools.product(("float32", "bfloat16"), (1.0, 0.7), (0.0, 0.3)))


@pytest.mark.parametrize("dtype, temperature, entropy_weight", CASES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_from_logits(dtype, temperature, entropy_weight, overwrite):
    for width in PADDED.values():
        found = compute(dtype, temperature, entropy_weight, width, overwrite=overwrite)
        assert max(found.values()) <= 1, found


@pytest.mark.parametrize("temperature, entropy_weight", [(1.0, 0.0), (0.7, 0.3)])
def test_from_hidden_states(temperature, entropy_weight):
    found = compute("float32", temperature, entropy_weight, PADDED["padded"], hidden=24)
    assert max(found.values()) <= 1, found


def sizes_made(body):
    """(what ``body`` returns, storage → bytes of all tensors that it made on the way)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found = {}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else [out]:
                if hasattr(each, "untyped_storage"):
                    storage = each.untyped_storage()
                    found[storage.data_ptr()] = max(storage.nbytes(), found.get(storage.data_ptr(), 0))
            return out

    with Sizes():
        return body(), found


def head_inputs(kind, tokens, vocab, width):
    """(hidden states, head, targets, weights of the log-probs); the same numbers in each type."""
    import torch

    generator = torch.Generator().manual_seed(4)
    made = (torch.randn(n, width, generator=generator).bfloat16().to(getattr(torch, kind)) for n in (tokens, vocab))
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return *(each.requires_grad_() for each in made), targets, torch.randn(tokens, generator=generator)


def gradients_of_a_head(way, hidden, head, targets, weights, chunk=0):
    """Gradients of hidden states and head: by the fused head, from all logits, or by autograd."""
    import torch

    from skyrl_megatron.runtime.logprobs import SoftmaxSettings, fused_logprobs_and_entropy, logprobs_and_entropy

    settings = SoftmaxSettings(len(head), chunk_size=chunk, with_entropy=True)
    if way == "fused":
        logprobs, entropy = fused_logprobs_and_entropy(hidden, head, targets, alone(), settings)
    elif way == "unfused":
        logprobs, entropy = logprobs_and_entropy(hidden @ head.t(), targets, alone(), settings)
    else:
        every = torch.log_softmax(hidden @ head.t(), -1)
        logprobs, entropy = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    ((weights * logprobs).sum() + 0.3 * entropy.sum()).backward()
    return hidden.grad, head.grad


def test_a_head_in_bf16_is_as_exact_as_from_all_logits_and_takes_a_chunk_of_them():
    tokens, vocab, width, chunk = 640, 12_000, 96, 160
    exact = gradients_of_a_head("autograd", *head_inputs("float64", tokens, vocab, width))
    unfused = gradients_of_a_head("unfused", *head_inputs("bfloat16", tokens, vocab, width))
    given = head_inputs("bfloat16", tokens, vocab, width)
    fused, sizes = sizes_made(lambda: gradients_of_a_head("fused", *given, chunk))
    for mine, theirs, right in zip(fused, unfused, exact, strict=True):
        assert 0 < (mine.double() - right).norm() <= 1.05 * (theirs.double() - right).norm()
    assert max(sizes.values()) == chunk * vocab * 2, "bytes: logits of a chunk, and nothing is larger"


@pytest.mark.parametrize("dtype, temperature, entropy_weight", CASES)
def test_over_a_part_of_the_vocabulary(dtype, temperature, entropy_weight):
    for width in PADDED.values():
        found = compute(dtype, temperature, entropy_weight, width, overwrite=True, part=True)
        assert max(found.values()) <= 1, found


def test_over_a_part_of_the_vocabulary_from_hidden_states():
    found = compute("float32", 0.7, 0.3, PADDED["padded"], hidden=24, part=True)
    assert max(found.values()) <= 1, found


def split(width):
    """All cases on this rank's columns."""
    import torch.distributed as dist

    group = dist.group.WORLD
    found = [compute(*case, width, overwrite=True, group=group, part=part) for case in CASES for part in (0, 1)]
    return [*found, *(compute("float32", 0.7, 0.3, width, hidden=24, group=group, part=part) for part in (0, 1))]


@pytest.mark.parametrize("padding", ["padded", "a rank of padding alone"])
def test_split_over_two_ranks(ranks, padding):
    for found in ranks(2, split, PADDED[padding]):
        assert max(max(errors.values()) for errors in found) <= 1, found


def test_a_gradient_over_the_logits_takes_no_memory_and_is_computed_once():
    """The gradient is the logits' own memory; a second backward, which would read the gradient as logits, fails."""
    import torch

    from skyrl_megatron.runtime.logprobs import SoftmaxSettings, logprobs_and_entropy

    made = softmax_reference.inputs("float32")
    logits = made["logits"].requires_grad_() * 1
    logits.retain_grad()
    logprobs, _ = logprobs_and_entropy(logits, made["targets"], alone(), SoftmaxSettings(VOCAB, overwrite=True))
    (grad,) = torch.autograd.grad(logprobs.sum(), logits, retain_graph=True)
    assert grad.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(logprobs.sum(), logits)


def test_the_reference_notices_a_wrong_temperature_and_padding_that_counts():
    """What is allowed is far below what a mistake makes."""
    made = softmax_reference.inputs("float32")
    exact = softmax_reference.reference(made, 0.7, 0.3)
    warmer = softmax_reference.reference(made, 0.70001, 0.3)
    assert softmax_reference.excess(warmer, exact)["logprobs"] > 1
    with pytest.raises(AssertionError):  # padding got a gradient
        compute("float32", 1.0, 0.0, PADDED["padded"], vocab=PADDED["padded"])


@pytest.mark.process
def test_the_triton_kernel(tmp_path):
    """The GPU's kernel, interpreted on CPU, over two ranks, one of which may have padding alone."""
    command = [sys.executable, "-m", "tests.runtime.scripts.triton_softmax", str(tmp_path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    for name, ranks in found.items():
        assert [len(cases) for cases in ranks] == [4, 4]
        worst = max((max(errors.values()), case) for cases in ranks for case, errors in enumerate(cases))
        assert worst[0] <= 1, (name, worst)


def test_kernels_are_chosen_by_device():
    """Triton's on a GPU; torch's here."""
    from types import SimpleNamespace

    import torch

    from skyrl_megatron.runtime.logprobs import kernel_for
    from skyrl_megatron.runtime.softmax import TorchKernel

    assert kernel_for(torch.zeros(1, 1)) is TorchKernel
    assert kernel_for(SimpleNamespace(is_cuda=True)).__name__.endswith("triton_softmax")
