"""Multi-token prediction in plain torch: DeepSeek-V3's formula around a decoder layer of transformers'."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.training.reference import TEMPERATURE, tokens_of

LAYERS = 4
SCALE = 0.1
PREFIX = f"model.layers.{LAYERS}."


@dataclass
class Expected:
    """What the draft head of a batch is to do."""

    logprobs: dict
    """Row → log-probs of its response tokens as foretold two positions before, nan where there is no position."""
    loss: float
    """Mean cross-entropy of the trained tokens that are foretold."""
    grads: dict
    """HF name → gradient of SCALE · Σ cross-entropy / trained tokens."""


def save_with_draft(model_type: str, folder: Path, **overrides) -> Path:
    """Save a tiny model of LAYERS layers with a layer of multi-token prediction, named as in released folders.
    ``overrides``: arguments of its config."""
    from tests.bridges.tiny_models import LATENT_FAMILIES, save_tiny

    groups = {} if model_type in LATENT_FAMILIES else {"num_key_value_heads": 2}
    sizes = dict(initializer_range=0.2, **groups) | overrides
    return last_as_draft(save_tiny(model_type, folder, num_hidden_layers=LAYERS + 1, **sizes))


def last_as_draft(folder: Path, seed: int = 3) -> Path:
    """Make the last of LAYERS + 1 layers in a HF folder the one of multi-token prediction."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    hidden, draw = config["hidden_size"], torch.Generator().manual_seed(seed)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{PREFIX}{name}.weight"] = torch.rand(hidden, generator=draw) * 0.8 + 0.6
    tensors[f"{PREFIX}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) * 0.2
    tensors[f"{PREFIX}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{PREFIX}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def foretell(folder: Path, batch, out: Path) -> Expected:
    """Compute what the head foretells of a batch, and its gradient, in fp32."""
    import torch
    from safetensors.torch import load_file, save_file
    from torch.nn import functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = load_file(folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = LAYERS + 1
    if hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    own = {name: value for name, value in tensors.items() if name.removeprefix(PREFIX).split(".")[0] in _OWN}
    every = {name: value for name, value in tensors.items() if name not in own}
    save_file(every, out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    own = {name.removeprefix(PREFIX): value.requires_grad_() for name, value in own.items()}
    body, layer = model.model, model.model.layers[LAYERS]

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], own[f"{name}.weight"], config.rms_norm_eps)

    total, count, logprobs = 0.0, 0, {}
    for row, (length, responses) in enumerate(
        zip(batch.lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    ):
        tokens = tokens_of(batch, row)
        place = torch.arange(length)[None]
        masked = torch.full((1, 1, length, length), -torch.inf).triu(1)
        with torch.no_grad():
            rotary, hidden = body.rotary_emb(body.embed_tokens(tokens), place), body.embed_tokens(tokens)
            for each in body.layers[:LAYERS]:
                hidden = _layer(each, hidden, masked, place, rotary)
            hidden, embedded = body.norm(hidden), body.embed_tokens(tokens.roll(-1))
            embedded[:, 0] = 0.0
        joined = torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], -1)
        made = _layer(layer, joined @ own["eh_proj.weight"].t(), masked, place, rotary)
        logits = norm(made, "shared_head.norm") @ model.lm_head.weight.detach().t() / TEMPERATURE
        found = F.log_softmax(logits[0, :-2], -1).gather(1, tokens[0, 2:, None]).squeeze(1)
        found = torch.cat([torch.full((2,), torch.nan), found])[-responses:]
        kept = batch.loss_mask[batch.responses.of(row)] & ~found.isnan()
        total, count = total - found[kept].sum(), count + int(kept.sum())
        logprobs[row] = found.detach()
    (SCALE * total / batch.loss_mask.sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(out)  # transformers' own names and shapes on disk
    grads = {n: g for n, g in load_file(out / "model.safetensors").items() if n.startswith(PREFIX)}
    grads |= {PREFIX + name: value.grad for name, value in own.items()}
    return Expected(logprobs, float(total.detach()) / count, grads)


_OWN = {"enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens"}


def _layer(layer, hidden, mask, positions, rotary):
    out = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
    return out[0] if isinstance(out, tuple) else out
