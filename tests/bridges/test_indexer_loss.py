"""The indexer's own loss, against transformers' indexer and attention: its gradients, and those of all others."""

import math
from unittest import mock

import pytest

from bridges.verified import degrees
from tests.bridges import parity
from tests.bridges.tiny_models import save_tiny

WEIGHT = 0.5
TAUGHT = {"dsa_indexer_loss_coeff": WEIGHT, "dsa_indexer_use_sparse_loss": True}
CASES = [
    ("deepseek_v32", "single"),
    *(
        pytest.param(*case, marks=pytest.mark.full_matrix)
        for case in (
            ("glm_moe_dsa", "single"),
            ("deepseek_v32", "tp2"),
            ("deepseek_v32", "ep2"),
            ("deepseek_v32", "pp2"),
            ("deepseek_v32", "cp2"),
        )
    ),
]


def divergence_of(model):
    """What sums, over all layers and queries of the forward passes to come, the loss of transformers' indexers."""
    import torch

    terms, inputs = [], {}

    def scores(indexer, arguments):
        """What transformers' indexer takes the largest of, with the gradient that it does without."""
        seen, topk = [], torch.Tensor.topk

        def watched(self, *args, **kwargs):
            seen.append(self)
            return topk(self, *args, **kwargs)

        with mock.patch.object(torch.Tensor, "topk", watched):
            type(indexer).forward.__wrapped__(indexer, *arguments)
        return seen[0]

    def remember(indexer, arguments):
        inputs[indexer] = [each.detach() if torch.is_tensor(each) else each for each in arguments]

    def add(attention, _, output):
        paid = output[1].detach().double().mean(1)
        chosen = paid > 0
        logs = scores(attention.indexer, inputs[attention.indexer]).double().masked_fill(~chosen, -torch.inf)
        terms.append((torch.xlogy(paid, paid) - paid * logs.log_softmax(-1).masked_fill(~chosen, 0.0)).sum())

    for layer in model.model.layers:
        layer.self_attn.indexer.register_forward_pre_hook(remember)
        layer.self_attn.register_forward_hook(add)
    return lambda: WEIGHT * sum(terms)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def get(model_type):
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            save_tiny(model_type, folder, num_hidden_layers=4, initializer_range=0.2)
            made[model_type] = folder, parity.reference(folder, folder / "reference.pt", divergence_of)
        return made[model_type]

    return get


@pytest.mark.full_matrix
@pytest.mark.parametrize("model_type, layout", [("deepseek_v32", "tp2"), ("glm_moe_dsa", "single")])
def test_recomputed_layers_have_it_once(ranks, models, model_type, layout):
    from bridges.files import read_hf_config
    from bridges.plan import Plan

    folder, expected = models(model_type)
    degree = degrees(layout)
    recomputed = TAUGHT | dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    world = math.prod(degree.values())
    found = ranks(world, parity.compare, folder, expected, degree, transformer_config_kwargs=recomputed)
    parity.check(found, expected, Plan.of(read_hf_config(folder)))


@pytest.mark.parametrize("model_type, layout", CASES)
def test_gradients_equal_transformers(ranks, models, model_type, layout):
    """Of the indexer those of its loss; all others have none of it, to the bit."""
    from bridges.files import read_hf_config
    from bridges.plan import Plan

    folder, expected = models(model_type)
    degree = degrees(layout)
    world = math.prod(degree.values())
    taught = ranks(world, parity.compare, folder, expected, degree, transformer_config_kwargs=TAUGHT)
    parity.check(taught, expected, Plan.of(read_hf_config(folder)))
    plain = ranks(world, parity.compare, folder, expected, degree)
    for (_, with_loss), (_, without) in zip(taught, plain, strict=True):
        ours = {name for name in with_loss if ".indexer." in name}
        assert {name: each for name, each in with_loss.items() if name not in ours} == {
            name: each for name, each in without.items() if name not in ours
        }
        assert all(without[name][0] == pytest.approx(without[name][1]) for name in ours), "untaught, there is none"
