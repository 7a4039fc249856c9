"""PPO's critic once more, with transformers and autograd: a trunk, a linear head, GAE as a loop in fp64.

What it shares with the engine are the HF folders.
"""

from dataclasses import dataclass

from tests.training import reference

GAMMA, LAMBDA, CRITIC_LAMBDA = 0.95, 0.9, 0.7
VALUE_CLIP = 0.02
STEPS = reference.STEPS


@dataclass
class CriticReference:
    """Numbers of each step (means over the batch's valid tokens), and tensors by HF name on disk."""

    values: object
    """[R] before the first step."""
    advantages: object
    returns: object
    losses: list
    clipped: list
    """Share of tokens whose loss is clipped, by step."""
    grad_norm: float
    grads: dict
    weights: dict


def make_batch(batch):
    """The invariance batch with a reward for each token."""
    import torch

    batch = batch.select(range(len(batch)))
    g = torch.Generator().manual_seed(5)
    responses = batch.responses
    batch.rewards = responses.flat(torch.randn(len(batch), responses.width, generator=g)) * batch.response_mask
    return batch


def save_critic(policy_folder, folder, name="value_head.weight"):
    """A folder with the policy's trunk and a head, without an LM head."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(policy_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    hidden = tensors.pop("lm_head.weight").shape[1]
    tensors[name] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(3)) * 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def row_values(trunk, head, batch, row):
    """Values [r] of a row's response tokens: of the state before each."""
    length, responses = int(batch.lengths[row]), int(batch.response_lengths[row])
    hidden = trunk(reference.tokens_of(batch, row), use_cache=False).last_hidden_state[0]
    return (hidden[length - responses - 1 : -1].float() @ head.T).squeeze(1)


def whole_gae(rewards, values, mask):
    """(advantages before whitening, returns), [B, T] fp64: A_t = δ_t + γλ A_{t+1}, with two λ."""
    import torch

    rewards, values = rewards.double() * mask, values.double() * mask
    found = []
    for lambd in (LAMBDA, CRITIC_LAMBDA):
        advantages, after, value_after = torch.zeros_like(values), 0.0, 0.0
        for t in reversed(range(values.shape[1])):
            delta = rewards[:, t] + GAMMA * value_after - values[:, t]
            advantages[:, t] = after = delta + GAMMA * lambd * after
            value_after = values[:, t]
        found.append(advantages)
    return found[0], found[1] + values


def value_loss(trunk, head, batch, old, returns):
    """(½·max of both squares, share of clipped tokens), means over the valid tokens; each row runs alone."""
    import torch

    tokens, total, clipped = batch.loss_mask.sum(), 0.0, 0.0
    for row in range(len(batch)):
        values = row_values(trunk, head, batch, row)
        place = batch.responses.of(row)
        before, target, mask = old[place], returns[place], batch.loss_mask[place]
        near = before + (values - before).clamp(-VALUE_CLIP, VALUE_CLIP)
        free, limited = (values - target) ** 2, (near - target) ** 2
        total = total + (0.5 * torch.maximum(free, limited) * mask).sum()
        clipped += float(((limited > free) * mask).sum())
    return total / tokens, clipped / float(tokens)


def critic_steps(folder, batch, scratch):
    """Values, GAE, and :data:`STEPS` steps of AdamW with clipped gradients on trunk and head."""
    import copy

    import torch
    from safetensors.torch import load_file

    model = reference.load_model(folder)
    head = torch.nn.Parameter(load_file(folder / "model.safetensors")["value_head.weight"].clone())
    trunk, parameters = model.model, [*model.model.parameters(), head]
    with torch.no_grad():
        values = torch.cat([row_values(trunk, head, batch, row) for row in range(len(batch))])
    responses = batch.responses
    padded = [responses.padded(each.float()) for each in (batch.rewards, values, batch.response_mask)]
    advantages, returns = (responses.flat(each) for each in whole_gae(*padded))
    valid = batch.response_mask
    advantages = (advantages - advantages[valid].mean()) / (advantages[valid].var() + 1e-8).sqrt()
    optimizer = torch.optim.AdamW(parameters, reference.LR, eps=reference.ADAM_EPS, weight_decay=0.0)
    losses, clipped, grads, norm = [], [], None, None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, share = value_loss(trunk, head, batch, values, returns.float())
        loss.backward()
        losses.append(loss.item())
        clipped.append(share)
        if step == 0:
            norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf")).item()
            holder = copy.deepcopy(model)
            for parameter, source in zip(holder.model.parameters(), trunk.parameters(), strict=True):
                parameter.data.copy_(source.grad)
            grads = trunk_on_disk(holder, head.grad.clone(), scratch / "grads")
        torch.nn.utils.clip_grad_norm_(parameters, reference.MAX_GRAD_NORM)
        optimizer.step()
    weights = trunk_on_disk(model, head.detach(), scratch / "weights")
    return CriticReference(values, advantages.float(), returns.float(), losses, clipped, norm, grads, weights)


def trunk_on_disk(model, head, folder):
    """The trunk's tensors and the head by the names of an exported critic."""
    tensors = reference.on_disk(model, folder)
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"} | {"score.weight": head}
