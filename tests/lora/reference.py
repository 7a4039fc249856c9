"""The policy-gradient step on adapters once more: PEFT's modules on transformers' model, and autograd.

Where Megatron has one A for several projections (``lora_type=lora``), PEFT's are tied to one parameter; with one for
each (``canonical_lora``), autograd goes through merged weights.
"""

from dataclasses import dataclass

from tests.training import reference

RANK, ALPHA = 4, 12


@dataclass
class Reference:
    """Loss and gradient norm of the first step; tensors by ``HF module.A`` or ``.B``."""

    final_loss: float
    terms: float
    """Sum of the absolute loss terms, which the final loss may cancel."""
    grad_norm: float
    logprobs: object
    """[B, T], before the first step."""
    start: dict
    grads: dict
    weights: dict


def finder(factors):
    """Return what ``fill_factors`` asks, for factors by ``module.A`` and ``module.B``."""
    return lambda module, letter: factors[f"{module}.{letter}"]


def start_factors(plan, *, separate, seed=3):
    """HF module → A, B for every projection of ``tests.training``'s model; A is one tensor where Megatron has one."""
    import torch

    from skyrl_megatron_lora.targets import targets

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator) * 0.1

    factors = {}
    for target in targets(plan):
        if not target.module.startswith("decoder"):
            continue
        a = draw(RANK, target.entry.hf[0].shape[1])
        for piece, module in zip(target.entry.hf, target.hf_modules, strict=True):
            factors[f"{module}.A"] = draw(*a.shape) if separate else a
            factors[f"{module}.B"] = draw(piece.shape[0], RANK)
    return factors


def peft_model(folder, factors):
    """PEFT's model with ``factors`` as its adapter: linear layers by name, experts by parameter.

    Returns (model, read), where ``read(of)`` returns tensors by the names of ``factors``; ``of`` picks what of each
    parameter, such as its gradient.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    base = reference.load_model(folder, "float64")  # what is left of errors is ours
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = get_peft_model(base, config)
    named = dict(model.named_parameters())
    layers, experts = base.config.num_hidden_layers, base.config.num_experts
    places = {}  # name of a factor → (parameter, how to see the factor in it)
    for layer in range(layers):
        own = f"model.layers.{layer}."
        prefix = f"base_model.model.{own}"
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = f"self_attn.{projection}"
            for letter in "AB":
                places[f"{own}{module}.{letter}"] = (f"{prefix}{module}.lora_{letter}.default.weight", None)
        # PEFT wraps one parameter in the other: the inner one is the first that was named
        gate_up, down = ("gate_proj", "up_proj"), ("down_proj",)
        for projections, wrapper in ((gate_up, "mlp.experts.base_layer."), (down, "mlp.experts.")):
            for letter in "AB":
                key = f"{prefix}{wrapper}lora_{letter}.default.weight"
                for expert in range(experts):
                    for part, projection in enumerate(projections):
                        name = f"{own}mlp.experts.{expert}.{projection}.{letter}"
                        places[name] = (key, (letter, expert, experts, part, len(projections)))

    def view(tensor, where):
        if where is None:
            return tensor
        letter, expert, count, part, parts = where
        if letter == "A":
            return tensor.view(count, RANK, -1)[expert]
        return tensor.view(-1, RANK, count)[..., expert].chunk(parts)[part]

    with torch.no_grad():
        for name, (key, where) in places.items():
            view(named[key], where).copy_(factors[name])

    def read(of):
        now = dict(model.named_parameters(remove_duplicate=False))
        return {name: view(of(now[key]), where).clone() for name, (key, where) in places.items()}

    return model, read


def transformers_logprobs(model, batch):
    """[R] log-probs of the response tokens, each row alone."""
    import torch

    with torch.no_grad():
        return torch.cat([reference.hf_logprobs(model, batch, row)[0] for row in range(len(batch))])


def tie(model):
    """Make q, k and v of every layer share their A, as one Megatron module does."""
    for layer in model.base_model.model.model.layers:
        attention = layer.self_attn
        for other in (attention.k_proj, attention.v_proj):
            other.lora_A["default"].weight = attention.q_proj.lora_A["default"].weight


def steps(folder, batch, factors, *, tied):
    """The steps of ``tests.training.reference``, taken by PEFT's adapters alone."""
    model, read = peft_model(folder, factors)
    if tied:
        tie(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _train(lambda: model, trained, read, batch, factors)


def merged_steps(folder, batch, factors):
    """The same steps of a pair of factors for each projection, gate and up of an expert too, which PEFT has no module
    for: transformers' model with W + alpha / rank · B·A in the place of W, and autograd through the sum."""
    import torch

    base = reference.load_model(folder, "float64")  # what is left of errors is ours
    own = {name: tensor.double().requires_grad_() for name, tensor in factors.items()}

    def delta(module):
        return ALPHA / RANK * own[f"{module}.B"] @ own[f"{module}.A"]

    def merged():
        weights = {name: parameter.detach() for name, parameter in base.named_parameters()}
        for layer in range(base.config.num_hidden_layers):
            attention, experts = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp.experts"))
            for module in (f"{attention}.{name}_proj" for name in "qkvo"):
                weights[f"{module}.weight"] = weights[f"{module}.weight"] + delta(module)
            every = [f"{experts}.{expert}" for expert in range(base.config.num_experts)]
            for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                added = [torch.cat([delta(f"{expert}.{part}") for part in parts]) for expert in every]
                weights[f"{experts}.{name}"] = weights[f"{experts}.{name}"] + torch.stack(added)
        return lambda *args, **options: torch.func.functional_call(base, weights, args, options)

    def read(of):
        return {name: of(tensor).clone() for name, tensor in own.items()}

    return _train(merged, list(own.values()), read, batch, factors)


def _train(model, trained, read, batch, factors):
    """Steps of ``trained``; ``model()`` is what a step computes with, ``read`` as :func:`peft_model`'s."""
    import torch

    optimizer = torch.optim.AdamW(trained, reference.LR, eps=reference.ADAM_EPS, weight_decay=0.0)
    numbers = grads = None
    logprobs = transformers_logprobs(model(), batch)
    for step in range(reference.STEPS):
        optimizer.zero_grad()
        policy, kl, entropy = reference.loss_terms(model(), batch)
        loss = policy + reference.KL * kl - reference.ENTROPY * entropy
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, float("inf"))
        if step == 0:
            terms = abs(policy.item()) + reference.KL * kl.item() + reference.ENTROPY * entropy.item()
            numbers = loss.item(), terms, norm.item()
            grads = read(lambda parameter: parameter.grad)
        torch.nn.utils.clip_grad_norm_(trained, reference.MAX_GRAD_NORM)
        optimizer.step()
    return Reference(*numbers, logprobs, factors, grads, read(lambda parameter: parameter.data))
