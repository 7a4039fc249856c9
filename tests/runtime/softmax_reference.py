"""Log-probs, entropies and gradients in fp64 by autograd on whole logits, and how far others may be from them."""

from __future__ import annotations

from typing import Any

VOCAB = 1003


def inputs(dtype: str, *, tokens: int = 40, hidden: int = 0) -> dict[str, Any]:
    """Logits [tokens, VOCAB], or what they are made from, with rows from flat to nearly certain of their target."""
    import torch

    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    made = {"targets": targets, "weights": torch.randn(2, tokens, generator=generator)}
    if hidden:
        made["hidden"] = torch.randn(tokens, hidden, generator=generator)
        made["head"] = torch.randn(VOCAB, hidden, generator=generator) / hidden**0.5
        return made
    logits = torch.randn(tokens, VOCAB, generator=generator) * torch.linspace(0.1, 6, tokens)[:, None]
    logits[torch.arange(tokens), targets] += torch.linspace(-5, 18, tokens)
    return made | {"logits": logits.to(getattr(torch, dtype))}


def reference(made: dict[str, Any], temperature: float, entropy_weight: float, kept: Any = None) -> dict[str, Any]:
    """Return log-probs, entropies and gradients in fp64. ``kept``: [tokens, VOCAB] bool, all if not given."""
    import torch

    leaves = {name: made[name].double().requires_grad_() for name in ("logits", "hidden", "head") if name in made}
    logits = leaves["logits"] if "logits" in leaves else leaves["hidden"] @ leaves["head"].t()
    if kept is not None:
        logits = logits.masked_fill(~kept, -torch.inf)
    every = torch.log_softmax(logits / temperature, -1)
    logprobs = every.gather(1, made["targets"][:, None]).squeeze(1)
    entropy = -(every.exp() * every.masked_fill(every == -torch.inf, 0.0)).sum(-1)
    loss(made, logprobs, entropy, entropy_weight).backward()
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach()} | {n: leaf.grad for n, leaf in leaves.items()}


def kept(targets: Any) -> Any:
    """[tokens, VOCAB] bool: between one column, the target's, and all of them."""
    import torch

    generator = torch.Generator().manual_seed(5)
    share = torch.linspace(0, 1, len(targets))[:, None] ** 2
    marked = torch.rand(len(targets), VOCAB, generator=generator) < share
    marked[torch.arange(len(targets)), targets] = True
    return marked


def loss(made: dict[str, Any], logprobs: Any, entropy: Any, entropy_weight: float) -> Any:
    on_logprobs, on_entropy = made["weights"].to(logprobs.dtype)
    total = (on_logprobs * logprobs).sum()
    return total if entropy is None else total + entropy_weight * (on_entropy * entropy).sum()


def excess(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """Return the largest error of each result over what is allowed: above 1 it is too large.

    Log-probs 5e-7·max(1, |log p|), entropies 1e-4; a gradient of the logits one unit in the last place of bf16, or
    1e-6 of the largest of its row in fp32 (and that at least in bf16); other gradients 1e-5 of their largest entry.
    """
    import torch

    worst: dict[str, float] = {}
    for name, value in found.items():
        if value is None or not value.numel():
            continue
        right = exact[name]
        if name == "logprobs":
            allowed = 5e-7 * right.abs().clamp(min=1)
        elif name == "entropy":
            allowed = torch.full_like(right, 1e-4)
        elif name == "logits":
            allowed = 1e-6 * right.abs().amax(-1, keepdim=True).expand_as(right)
            if value.dtype == torch.bfloat16:
                allowed = torch.maximum(allowed, torch.exp2(right.abs().clamp(min=1e-37).log2().floor() - 7))
        else:
            allowed = torch.full_like(right, 1e-5 * right.abs().max().item())
        worst[name] = ((value.double() - right).abs() / allowed.clamp(min=1e-300)).max().item()
    return worst
