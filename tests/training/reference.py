"""The policy-gradient step once more, with transformers and autograd: no Megatron, no packing, no reduction code.

Each sequence runs alone and unpadded; the loss is written out here. What it shares with the engine is the HF folder.
"""

from dataclasses import dataclass

KL, ENTROPY = 0.5, 0.5
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TEMPERATURE = 0.7


@dataclass
class Reference:
    """Numbers of one step: loss terms (means over the batch's valid tokens) and the gradient by HF name."""

    policy_loss: float
    kl: float
    entropy: float
    final_loss: float
    grad_norm: float
    grads: dict
    logprobs: object
    """[B, T] tensor."""


def make_batch(vocab_size, seed=0, rows=7, prompt=9, response=14):
    """Unequal lengths, one fully masked row, one row with a hole in its loss mask; every log-prob near the model's."""
    import torch

    from skyrl_megatron.types import TrainingBatch

    g = torch.Generator().manual_seed(seed)
    sequence, width = prompt + response, response
    batch = TrainingBatch(
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


def with_logprobs(batch, logprobs, seed=1):
    """Old and reference log-probs a little off the model's, so that ratios clip on both sides and KL is not zero."""
    import torch

    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(logprobs.shape, generator=g)
    batch.old_logprobs = (logprobs + 0.3 * noise) * batch.response_mask
    batch.ref_logprobs = (logprobs + 0.3 * torch.randn(logprobs.shape, generator=g)) * batch.response_mask
    batch.rollout_logprobs = batch.old_logprobs.clone()
    return batch


def hf_logprobs(model, batch, row):
    """(log-probs [r], entropies [r]) of a row's response tokens, at :data:`TEMPERATURE`."""
    import torch

    length = int(batch.attention_mask[row].sum())
    responses = int(batch.response_mask[row].sum())
    tokens = batch.sequences[row, -length:][None]
    logits = model(tokens, use_cache=False).logits[0, length - responses - 1 : -1].float() / TEMPERATURE
    every = torch.log_softmax(logits, -1)
    return every.gather(1, tokens[0, -responses:, None]).squeeze(1), -(every.exp() * every).sum(-1)


def load_model(folder):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def all_logprobs(folder, batch):
    """[B, T] log-probs under the folder's weights."""
    import torch

    model, out = load_model(folder), torch.zeros(batch.response_mask.shape)
    with torch.no_grad():
        for row in range(len(batch)):
            logprobs, _ = hf_logprobs(model, batch, row)
            out[row, -len(logprobs) :] = logprobs
    return out


def policy_gradient_step(folder, batch):
    """Clipped policy loss + KL (k3) − entropy, all divided by the valid tokens of the batch."""
    import torch

    model = load_model(folder)
    tokens = batch.loss_mask.sum()
    policy = kl = entropy = 0.0
    for row in range(len(batch)):
        logprobs, entropies = hf_logprobs(model, batch, row)
        n = len(logprobs)
        mask, advantages = batch.loss_mask[row, -n:], batch.advantages[row, -n:]
        ratio = (logprobs - batch.old_logprobs[row, -n:]).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        policy = policy - (torch.minimum(ratio * advantages, clipped * advantages) * mask).sum()
        k = batch.ref_logprobs[row, -n:] - logprobs
        kl = kl + ((k.exp() - k - 1) * mask).sum()
        entropy = entropy + (entropies * mask).sum()
    policy, kl, entropy = policy / tokens, kl / tokens, entropy / tokens
    loss = policy + KL * kl - ENTROPY * entropy
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.sqrt(sum((g.double() ** 2).sum() for g in grads.values())).item()
    return Reference(policy.item(), kl.item(), entropy.item(), loss.item(), norm, grads, None)
