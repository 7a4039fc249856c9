"""The step of a reward model: loss and gradients are those of transformers' classifier in float64, in every layout."""

import numpy as np
import pytest

from tests.supervised.test_preferences import LAYOUTS, MORE, close

MARGINS = (0.5, 0.0, 1.25, -0.3, 0.0)


def rows():
    """Items of five pairs, each sequence with one more token after the answer."""
    from tests.supervised import test_preferences

    made = []
    for row, margin in zip(test_preferences.rows("sigmoid"), MARGINS, strict=True):
        answers = [row["sequences"][row["sides"].index(side)] for side in (1, -1)]
        longer = [(prompt, [*response, 7], [0] * len(response) + [1]) for prompt, response, _ in answers]
        made.append({"uid": row["uid"], "sequences": longer, "sides": [1, -1], "margin": margin})
    return made


@pytest.fixture(scope="module")
def scorer(folder, tmp_path_factory):
    """A folder for sequence classification."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.config.pad_token_id = 0
    place = tmp_path_factory.mktemp("scorer")
    model.save_pretrained(place)
    return place


def engine_of(folder, layout, overrides=None):
    """(engine, its share of the pairs)."""
    from skyrl_megatron.config.schema.supervised import RewardConfig
    from skyrl_megatron.workers.dispatch import _split
    from skyrl_megatron_supervised.preference_engine import RewardEngine
    from skyrl_megatron_supervised.preference_rows import preference_batch
    from tests.training.bodies import NO_DISTRIBUTED, config

    algorithm = {f"trainer.algorithm.{name}": False for name in ("use_kl_loss", "use_entropy_loss")}
    cfg = config(folder, **layout, overrides=NO_DISTRIBUTED | algorithm | (overrides or {}))
    cfg.reward = RewardConfig()
    engine, batch = RewardEngine(cfg), preference_batch(rows())
    shares = _split(batch, np.arange(len(batch)), engine.flops.forward(batch.lengths), engine.dp_size)
    return engine, batch.select(shares[engine.dp_rank][0])


def step(folder, layout, overrides=None):
    """(metrics, {HF name: gradient}) of this rank's share."""
    from skyrl_megatron.runtime.hf_weights import stream_hf

    engine, part = engine_of(folder, layout, overrides)
    metrics = engine.forward_backward(part)
    engine.reduce_gradients()
    pieces = stream_hf(engine.model, engine.groups, of=lambda parameter: parameter.main_grad)
    return metrics, {f"{piece.name}[{piece.index}]": piece.tensor.detach().float().cpu().numpy() for piece in pieces}


@pytest.fixture(scope="module")
def alone(ranks, scorer):
    return ranks(1, step, scorer, dict(world=1))[0]


@pytest.fixture(scope="module")
def closed_form(scorer):
    """(loss, scores [5, 2], {HF name: gradient}) of transformers' model in float64."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float64)
    model.set_experts_implementation("eager")  # the grouped product is not of float64
    losses, scores = [], []
    for row in rows():
        chosen, rejected = (
            model(torch.tensor([[*prompt, *response[:-1]]]), use_cache=False).logits[0, 0]
            for prompt, response, _ in row["sequences"]
        )
        losses.append((1 + (-(chosen - rejected - row["margin"])).exp()).log())
        scores.append([chosen.item(), rejected.item()])
    total = sum(losses) / len(losses)
    total.backward()
    return total.item(), np.array(scores), {name: value.grad for name, value in model.named_parameters()}


def test_loss_scores_and_gradients_are_those_of_transformers(alone, closed_form):
    metrics, gradients = alone
    loss, scores, wanted = closed_form
    assert metrics["policy_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["rewards/chosen"] == pytest.approx(scores[:, 0].mean(), abs=1e-5)
    assert metrics["rewards/rejected"] == pytest.approx(scores[:, 1].mean(), abs=1e-5)
    assert metrics["rewards/accuracies"] == pytest.approx((scores[:, 0] > scores[:, 1]).mean())
    found = {name.removesuffix("[None]"): value for name, value in gradients.items()}
    same = {name: value.numpy() for name, value in wanted.items() if name in found and value is not None}
    assert len(same) > 20 and "score.weight" in same
    close({name: found[name] for name in same}, same)


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full_matrix) for name in MORE)])
def test_every_layout_has_the_same_loss_and_gradients(ranks, scorer, alone, name):
    layout = (LAYOUTS | MORE)[name]
    outcomes = ranks(layout["world"], step, scorer, layout)
    for metrics, gradients in outcomes:
        for metric in ("policy_loss", "rewards/chosen", "rewards/margins"):
            assert metrics[metric] == pytest.approx(alone[0][metric], rel=1e-6), metric
        close(gradients, alone[1])
    assert set().union(*(gradients for _, gradients in outcomes)) == alone[1].keys()


def save(folder, root, layout):
    """Take a step, save a checkpoint and export the model."""
    from skyrl_megatron.runtime.hf_weights import save_hf
    from tests.checkpoint.ranks import RankCheckpointer
    from tests.checkpoint.training import state_of

    engine, part = engine_of(folder, layout)
    engine.forward_backward(part)
    engine.optim_step()
    checkpoints = RankCheckpointer(root, state_of(engine))
    checkpoints.save(1)
    checkpoints.close()
    save_hf(engine.model, engine.groups, f"{root}/exported")


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full_matrix) for name in MORE)])
def test_a_checkpoint_with_a_value_head_is_converted(ranks, folder, scorer, tmp_path, capsys, name):
    """The tensors are those of the export. ``config.json`` is that of a reward model, which a run writes into its
    checkpoints, or made from that of a language model, as of a critic."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    from bridges.convert import compare, export_megatron
    from skyrl_megatron.cli import convert

    layout = (LAYOUTS | MORE)[name]
    ranks(layout["world"], save, scorer, str(tmp_path), layout)
    for template, auto, absent in (
        (scorer, AutoModelForSequenceClassification, set()),
        (folder, AutoModelForTokenClassification, {"score.bias"}),  # which transformers sets to zero
    ):
        out = tmp_path / auto.__name__
        export_megatron(tmp_path / "global_step_1", out, template=template)
        assert not compare(out, tmp_path / "exported").differences
        model, loading = auto.from_pretrained(out, output_loading_info=True, num_labels=1)
        assert set(loading["missing_keys"]) == absent, loading
        assert not loading["unexpected_keys"] and not loading["mismatched_keys"]
        assert type(model).__name__.endswith(auto.__name__.removeprefix("AutoModel"))
    assert convert(["verify", str(tmp_path / "global_step_1"), str(out), "--hf-template", str(folder)]) == 0
    assert "every tensor is bit-equal" in capsys.readouterr().out


def engines(sections):
    """Names of the engines of policy, critic and reference in runs with these sections."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.schema import supervised
    from skyrl_megatron.workers.megatron_worker import engine_class

    names = []
    for section in sections:
        cfg = SkyRLTrainConfig()
        if section:
            setattr(cfg, section, {"dpo": supervised.DPOConfig, "reward": supervised.RewardConfig}[section]())
        names.append([engine_class(cfg, role).__name__ for role in ("policy", "critic", "ref")])
    return names


def test_the_engine_of_a_rank_is_that_of_what_the_run_trains(ranks):
    assert ranks(1, engines, ["", "dpo", "reward"])[0] == [
        ["MegatronEngine", "CriticEngine", "MegatronEngine"],
        ["PreferenceEngine", "CriticEngine", "MegatronEngine"],
        ["RewardEngine", "CriticEngine", "MegatronEngine"],
    ]
