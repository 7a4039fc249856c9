"""The policy-gradient step once more, with transformers and autograd: no Megatron, no packing, no reduction code.

Each sequence runs alone and unpadded; the loss is written out here. What it shares with the engine is the HF folder.
"""

import contextlib
from dataclasses import dataclass
from functools import partial

KL, ENTROPY = 0.5, 0.5
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TEMPERATURE = 0.7


MICRO_BATCH = 3
LR, ADAM_EPS, MAX_GRAD_NORM, STEPS = 1e-2, 1e-3, 0.1, 3


@dataclass
class Reference:
    """Numbers of the first step (means over the batch's valid tokens), and where tensors are, by HF name on disk."""

    policy_loss: float
    kl: float
    entropy: float
    final_loss: float
    grad_norm: float
    grads: dict
    """Gradient of the first step before clipping."""
    weights: dict
    """Weights after :data:`STEPS` steps on the same batch."""


def make_batch(vocab_size, **sizes):
    """:func:`padded_batch` without padding."""
    return padded_batch(vocab_size, **sizes).flat()


def padded_batch(vocab_size, seed=0, rows=7, prompt=9, response=14):
    """Unequal lengths, one fully masked row, one row with a hole in its loss mask; every log-prob near the model's."""
    import torch

    from skyrl_megatron.types import PaddedBatch

    g = torch.Generator().manual_seed(seed)
    sequence, width = prompt + response, response
    batch = PaddedBatch(
        sequences=torch.zeros(rows, sequence, dtype=torch.int64),
        attention_mask=torch.zeros(rows, sequence, dtype=torch.bool),
        response_mask=torch.zeros(rows, width),
        loss_mask=torch.zeros(rows, width),
        uids=[f"prompt-{row // 2}" for row in range(rows)],
    )
    for row in range(rows):
        p = int(torch.randint(2, prompt + 1, (), generator=g))
        r = width if row == 0 else int(torch.randint(1, response + 1, (), generator=g))
        batch.sequences[row, -(p + r) :] = torch.randint(0, vocab_size, (p + r,), generator=g)
        batch.attention_mask[row, -(p + r) :] = True
        batch.response_mask[row, -r:] = 1
        batch.loss_mask[row, -r:] = 1
    batch.loss_mask[2] = 0  # a row that counts nowhere
    batch.loss_mask[0, 3:5] = 0  # an observation in the middle
    batch.advantages = torch.randn(rows, width, generator=g) * batch.response_mask
    return batch


def tokens_of(batch, row):
    """A row's tokens as a batch of one, [1, n] int64."""
    return batch.tokens[batch.rows.of(row)].long()[None]


def with_logprobs(batch, logprobs, seed=1):
    """Old and reference log-probs a little off the model's, so that ratios clip on both sides and KL is not zero."""
    import torch

    g = torch.Generator().manual_seed(seed)
    responses = batch.responses
    noise = [responses.flat(torch.randn(len(batch), responses.width, generator=g)) for _ in range(2)]
    batch.old_logprobs = (logprobs + 0.3 * noise[0]) * batch.response_mask
    batch.ref_logprobs = (logprobs + 0.3 * noise[1]) * batch.response_mask
    batch.rollout_logprobs = batch.old_logprobs.clone()
    return batch


def hf_logprobs(model, batch, row):
    """(log-probs [r], entropies [r]) of a row's response tokens, at :data:`TEMPERATURE`."""
    import torch

    tokens, responses = tokens_of(batch, row), int(batch.response_lengths[row])
    length = tokens.shape[1]
    with forced_routes(model, batch.rollout_routes[row] if batch.rollout_routes else None):
        logits = model(tokens, use_cache=False).logits[0, length - responses - 1 : -1].float() / TEMPERATURE
    if batch.rollout_support:
        logits = logits.masked_fill(~kept(batch.rollout_support[row], logits.shape[1]), -torch.inf)
    every = torch.log_softmax(logits, -1)
    p_log_p = every.exp() * every.masked_fill(every == -torch.inf, 0.0)
    return every.gather(1, tokens[0, -responses:, None]).squeeze(1), -p_log_p.sum(-1)


def kept(support, vocab_size):
    """[tokens, V] bool of a support, token by token."""
    import torch

    marked, start = torch.zeros(len(support), vocab_size, dtype=torch.bool), 0
    for token, count in enumerate(support.counts.tolist()):
        marked[token, torch.from_numpy(support.ids[start : start + count].astype("int64"))] = True
        marked[token] |= count == 0
        start += count
    return marked


def with_support(batch, vocab_size, seed=2):
    """The batch, sampled from parts of the vocabulary: from 1 to 400 entries a token; every fifth token from all."""
    import copy

    import numpy as np

    from skyrl_megatron.types import TokenSupport

    rng, batch = np.random.default_rng(seed), copy.deepcopy(batch)
    for row in range(len(batch)):
        responses = int(batch.response_lengths[row])
        sets = [
            [] if place % 5 == 4 else {int(token), *rng.integers(0, vocab_size, rng.integers(0, 400)).tolist()}
            for place, token in enumerate(tokens_of(batch, row)[0, -responses:])
        ]
        batch.rollout_support.append(TokenSupport.of([sorted(entries) for entries in sets]))
    return batch


@contextlib.contextmanager
def forced_routes(model, routes):
    """Let a Qwen3-MoE's routers take routes [n, L, K] for the first n tokens, and weigh them by their own rule."""
    import torch

    gates = {} if routes is None else {layer: block.mlp.gate for layer, block in enumerate(model.model.layers)}
    for layer, gate in gates.items():
        gate.forward = partial(_weigh, gate, torch.from_numpy(routes[:, layer].astype("int64")))
    yield
    for gate in gates.values():
        del gate.forward


def _weigh(gate, routes, hidden):
    """(logits, weights, experts) of tokens [t, H], the first of which have routes."""
    import torch

    logits = torch.nn.functional.linear(hidden, gate.weight)
    scores = logits.softmax(-1)
    chosen = scores.topk(gate.top_k).indices
    chosen[: len(routes)] = routes
    weights = scores.gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def with_routes(batch, layers, experts, top_k, seed=3):
    """The batch with routes that no router chose: of all tokens but the last; of fewer in row 1, of none in row 3."""
    import copy

    import numpy as np

    rng, batch = np.random.default_rng(seed), copy.deepcopy(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        known = length // 2 if row == 1 else length - 1
        routes = rng.random((known, layers, experts)).argsort(-1)[..., :top_k].astype(np.uint8)
        batch.rollout_routes.append(None if row == 3 else routes)
    return batch


def natural_routes(folder, batch):
    """The batch with the routes that its tokens take in transformers."""
    import copy

    import numpy as np
    import torch

    model, batch = load_model(folder), copy.deepcopy(batch)
    seen = router_logits(model)
    with torch.no_grad():
        for row in range(len(batch)):
            seen.clear()
            model(tokens_of(batch, row), use_cache=False)
            chosen = [logits.topk(model.config.num_experts_per_tok).indices for logits in seen]
            batch.rollout_routes.append(torch.stack(chosen, 1).numpy().astype(np.uint8))
    return batch


def load_model(folder, dtype="float32"):
    """The model by transformers. Grouped products of experts, their default, know no float64."""
    import torch
    from transformers import AutoModelForCausalLM

    how = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if dtype == "float64" else {})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **how)


def all_logprobs(folder, batch):
    """[R] log-probs under the folder's weights."""
    import torch

    model = load_model(folder)
    with torch.no_grad():
        return torch.cat([hf_logprobs(model, batch, row)[0] for row in range(len(batch))])


def on_disk(model, folder):
    """The model's tensors by their names on disk."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def router_logits(model):
    """A list that fills with every router's logits [tokens, E] as the model runs."""
    from torch.nn import functional as F

    seen = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(
                lambda gate, inputs, _: seen.append(F.linear(inputs[0].reshape(-1, gate.weight.shape[1]), gate.weight))
            )
    return seen


def auxiliary_loss(per_row, lengths, experts, top_k, aux_coefficient, z_coefficient):
    """Load-balancing loss of each micro-batch (Switch Transformer, arXiv:2101.03961, equation 4, times E / K) weighted
    by its tokens, and the mean squared log-sum-exp over all tokens (ST-MoE, arXiv:2202.08906); sums over layers.

    ``per_row``: for each row its layers' logits.
    """
    import torch

    total = 0.0
    tokens = sum(lengths)
    for layer in range(len(per_row[0])):
        for start in range(0, len(per_row), MICRO_BATCH):
            logits = torch.cat([row[layer] for row in per_row[start : start + MICRO_BATCH]])
            n = len(logits)
            chosen = torch.zeros_like(logits).scatter(1, logits.topk(top_k, -1).indices, 1.0)
            balance = (logits.softmax(-1).sum(0) * chosen.sum(0)).sum() * experts / (top_k * n * n)
            total = total + aux_coefficient * balance * n / tokens
            total = total + z_coefficient * logits.logsumexp(-1).square().sum() / tokens
    return total


def loss_terms(model, batch, *, after_row=lambda: None):
    """(clipped policy loss, KL (k3), entropy), means over the valid tokens of the batch; each row runs alone."""
    import torch

    tokens = batch.loss_mask.sum()
    policy = kl = entropy = 0.0
    for row in range(len(batch)):
        logprobs, entropies = hf_logprobs(model, batch, row)
        after_row()
        place = batch.responses.of(row)
        mask, advantages = batch.loss_mask[place], batch.advantages[place]
        ratio = (logprobs - batch.old_logprobs[place]).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        policy = policy - (torch.minimum(ratio * advantages, clipped * advantages) * mask).sum()
        k = (batch.ref_logprobs[place] - logprobs).clamp(-20, 20)
        kl = kl + ((k.exp() - k - 1).clamp(max=10) * mask).sum()  # limited as documented for k3
        entropy = entropy + (entropies * mask).sum()
    return policy / tokens, kl / tokens, entropy / tokens


def policy_gradient_step(folder, batch, scratch, *, aux_coefficient=0.0, z_coefficient=0.0):
    """Clipped policy loss + KL (k3) − entropy over the valid tokens of the batch, for :data:`STEPS` steps."""
    import copy

    import torch

    model = load_model(folder, "float64")
    seen = router_logits(model) if aux_coefficient or z_coefficient else []
    optimizer = torch.optim.AdamW(model.parameters(), LR, eps=ADAM_EPS, weight_decay=0.0)
    numbers = grads = None
    for step in range(STEPS):
        optimizer.zero_grad()
        per_row = []

        def keep(per_row=per_row):
            per_row.append(list(seen))
            seen.clear()

        policy, kl, entropy = loss_terms(model, batch, after_row=keep)
        loss = policy + KL * kl - ENTROPY * entropy
        objective = loss
        if aux_coefficient or z_coefficient:
            config = model.config
            objective = loss + auxiliary_loss(
                per_row,
                batch.lengths.tolist(),
                config.num_experts,
                config.num_experts_per_tok,
                aux_coefficient,
                z_coefficient,
            )
        objective.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        if step == 0:
            numbers = policy.item(), kl.item(), entropy.item(), loss.item(), norm.item()
            holder = copy.deepcopy(model)
            for parameter, source in zip(holder.parameters(), model.parameters(), strict=True):
                parameter.data.copy_(source.grad)
            grads = on_disk(holder, scratch / "grads")
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
    return Reference(*numbers, grads, on_disk(model, scratch / "weights"))


def router_load(folder, batch):
    """(tokens of the busiest expert over the mean, mean entropy in nats) of each layer, over all tokens."""
    import torch

    model = load_model(folder)
    seen, layers = router_logits(model), None
    with torch.no_grad():
        for row in range(len(batch)):
            model(tokens_of(batch, row), use_cache=False)
            layers = seen[:] if layers is None else [torch.cat(pair) for pair in zip(layers, seen, strict=True)]
            seen.clear()
    loads = []
    for logits in layers:
        counts = (
            logits.topk(model.config.num_experts_per_tok, -1).indices.flatten().bincount(minlength=logits.shape[1])
        )
        loads.append(
            (
                float(counts.max() / counts.double().mean()),
                float(torch.distributions.Categorical(logits=logits).entropy().mean()),
            )
        )
    return loads


def mismatch(folder, batch):
    """Share of the tokens with routes that would go to other experts, by layer, in the run with the routes."""
    import torch

    model = load_model(folder)
    elsewhere, tokens = torch.zeros(len(model.model.layers), dtype=torch.float64), 0
    seen = router_logits(model)
    with torch.no_grad():
        for row in range(len(batch)):
            seen.clear()
            if (routes := batch.rollout_routes[row]) is None:
                continue
            with forced_routes(model, routes):
                model(tokens_of(batch, row), use_cache=False)
            for layer, logits in enumerate(seen):
                natural = logits[: len(routes)].topk(model.config.num_experts_per_tok).indices.sort(-1).values
                given = torch.from_numpy(routes[:, layer].astype("int64")).sort(-1).values
                elsewhere[layer] += (natural != given).any(-1).sum()
            tokens += len(routes)
    return (elsewhere / tokens).tolist()
