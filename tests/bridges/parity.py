"""Each family in Megatron against transformers: parameter names of the built model, logits, gradients, fp32.

The gradients of the reference are written to disk by ``save_pretrained``, as if they were the weights: so they come
with the names and shapes on disk from transformers itself and not from the tables under test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

LOGITS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-4  # relative L2 error of each parameter's gradient


def reference(folder: Path, out: Path, further: Callable[[Any], Callable[[], Any]] | None = None) -> Path:
    """Logits and gradients of the model in ``folder`` by transformers' autograd, saved to ``out``.

    ``further``: what is called with the model first, and returns what says behind it which loss to add."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tests.runtime.parity import data, logits_of

    batch = data()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    added = further(model) if further else lambda: 0.0
    logits = logits_of(model, batch)
    assert logits.max() > 5 and logits.min() < -5, "the model's logits are too small to show anything"
    ((logits * batch["weights"]).sum() + added()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(out.parent / "gradients", max_shard_size="1GB")
    gradients = load_file(out.parent / "gradients" / "model.safetensors")
    found = {"logits": logits.detach(), "gradients": gradients}
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        # The gated norm behind a head of a delta net that says next to nothing enlarges its rounding a hundred times.
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        with torch.no_grad():
            found["rounding"] = (logits_of(model, batch) - found["logits"]).abs().amax(-1).float()
    torch.save(found, out)
    return out


def compare(
    folder: Path, reference_file: Path, layout: dict[str, int], padded: bool = False, **build: Any
) -> tuple[float | None, dict[str, Any]]:
    """Body of a multi-process test: (largest logit error or None, HF name → (squared error, squared norm, slices))."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.hf_weights import load_hf, stream_hf
    from skyrl_megatron.runtime.model.build import build_model
    from tests.runtime.parity import forward_backward

    groups = parallel_state.initialize(ParallelConfig(dist.get_world_size(), **layout), timeout_s=120)
    model = build_model(folder, groups, dtype=torch.float32, **build)
    load_hf(model, folder, groups)
    expected = torch.load(reference_file)
    logits_error = forward_backward(model, groups, expected["logits"], padded, None, expected.get("rounding"))
    buffers = {piece.name for entry in model.hf.plan.entries if entry.is_buffer for piece in entry.hf}
    found: dict[str, Any] = {}

    def gradient(parameter: Any) -> torch.Tensor:
        return parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)

    for piece in stream_hf(model, groups, of=gradient):
        if piece.name in buffers:
            continue
        wanted = expected["gradients"][piece.name]
        wanted = wanted if piece.index is None else wanted[piece.index]
        assert piece.tensor.shape == wanted.shape, piece.name
        error, norm, count = found.get(piece.name, (0.0, 0.0, 0))
        error += float((piece.tensor.double() - wanted.double()).square().sum())
        found[piece.name] = (error, norm + float(wanted.double().square().sum()), count + 1)
    return logits_error, found


def check(results: list[tuple[float | None, dict[str, Any]]], reference_file: Path, plan: Any) -> None:
    """Asserts that logits and the gradient of every parameter are those of transformers."""
    import torch

    logits = [error for error, _ in results if error is not None]
    total: dict[str, tuple[float, float, int]] = {}
    for _, found in results:
        for name, (error, norm, count) in found.items():
            old = total.get(name, (0.0, 0.0, 0))
            total[name] = (old[0] + error, old[1] + norm, old[2] + count)
    relative = {name: (error / norm) ** 0.5 if norm else error**0.5 for name, (error, norm, _) in total.items()}
    worst = max((error, name) for name, error in relative.items())
    print(f"largest error: logits {max(logits):.1e}, gradients {worst[0]:.1e} ({worst[1]})")  # shown by pytest -rP
    assert logits and max(logits) <= LOGITS_TOLERANCE, f"logits differ by {max(logits):.2e}"
    wrong = {name: error for name, error in relative.items() if not error <= GRADIENT_TOLERANCE}
    assert not wrong, f"{len(wrong)} gradients differ, e.g. {dict(list(wrong.items())[:5])}"
    gradients = torch.load(reference_file)["gradients"]
    buffers = {piece.name for entry in plan.entries if entry.is_buffer for piece in entry.hf}
    assert total.keys() == gradients.keys() - buffers
    for name, (_, _, count) in total.items():
        assert count == (plan.hf[name][0] if name in plan.stacked else 1), f"{name} came {count} times"


def built_names(folder: Path) -> dict[str, tuple[int, ...]]:
    """Body of a one-process test: canonical name → shape of every parameter and weight buffer of the built model."""
    import torch

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron.runtime.model.local_weights import local_weights

    groups = parallel_state.initialize(ParallelConfig(1), timeout_s=120)
    model = build_model(folder, groups, dtype=torch.float32)
    return {weight.name: tuple(weight.tensor.shape) for weight in local_weights(model, groups)}


def compare_with_fault(fault: str, *arguments: Any) -> tuple[float | None, dict[str, Any]]:
    """:func:`compare` with a mistake planted in the layers, one that was met on the way."""
    from unittest import mock

    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from bridges import conversions
    from skyrl_megatron.runtime.model import attention, delta_net, family_attention, moe, norm

    def one_sequence(lengths: tuple[int, ...], device: Any) -> Any:
        from skyrl_megatron.runtime.model.delta_rule import chunk_plan

        return chunk_plan((sum(lengths),), device)

    def queries_then_gates(self: Any, hf: Any) -> tuple[Any, ...]:
        q, k, v = hf
        halves = q.unflatten(0, (2, self.groups * self.queries, self.dim)).transpose(0, 1).flatten(0, 2)
        return rightly(self, (halves, k, v))

    def norm_of_own_heads(*arguments: Any, **options: Any) -> Any:
        made: Any = norm.RMSNorm(*arguments, **options)
        made.weight.sequence_parallel = False
        return made

    def shuffled(x: Any, lengths: Any, group: Any) -> Any:
        return back(x, lengths, group).flip(1)

    def without_bias(self: Any, logits: Any, padding_mask: Any = None) -> Any:
        self.expert_bias.zero_()
        return route(self, logits, padding_mask)

    route = moe.TokenWeightedRouter.routing
    rightly, back = conversions.InterleaveGatedQkv.to_parts, delta_net._heads_to_tokens
    planted = {
        "rotary keys keep their own heads' gradient": (
            family_attention.LatentAttention,
            "_qkv_down_projection",
            MLASelfAttention._qkv_down_projection,
        ),
        "norm over the rank's own heads": (norm, "_summed", lambda x, group: x * group.size()),
        "sinks left out": (attention.PackedAttention, "_attend", _attend_without_sinks),
        "logits taken for log-odds": (moe, "log_odds", lambda logits: logits),
        "states run on into the next sequence": (delta_net, "chunk_plan", one_sequence),
        "gates behind all queries": (conversions.InterleaveGatedQkv, "to_parts", queries_then_gates),
        "gated norm keeps its own heads' gradient": (delta_net, "RMSNorm", norm_of_own_heads),
        "heads come back in their senders' order": (delta_net, "_heads_to_tokens", shuffled),
        "every key is seen": (
            family_attention,
            "_top_k_mask",
            lambda scores, visible, _: visible.expand_as(scores)[:, None],
        ),
        "windows are left out": (attention, "is_layer_window_attention", lambda *_: False),
        "experts are chosen without their bias": (moe.TokenWeightedRouter, "routing", without_bias),
    }
    with mock.patch.object(*planted[fault]):
        return compare(*arguments)


def _attend_without_sinks(attention: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
    from torch.nn import functional as F

    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    return (
        F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=attention.scale
        )
        + 0.0 * attention.softmax_offset.sum()
    )  # keeps it in the graph, with a gradient of 0
