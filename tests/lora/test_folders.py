"""PEFT folders: written at one layout, opened by PEFT, loaded at another, merged; and folders that do not fit."""

import json

import pytest

from tests.lora import bodies, reference
from tests.lora.reference import transformers_logprobs
from tests.training.conftest import batch, folder  # noqa: F401

CANONICAL = {f"{bodies.HOW}lora_type": "canonical_lora"}
LOGPROBS_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def factors(folder):  # noqa: F811
    from skyrl_megatron.runtime.model.description import read_hf_model

    plan = read_hf_model(folder).plan
    return {separate: reference.start_factors(plan, separate=separate) for separate in (False, True)}


def save_body(folder, batch, factors, root, layout, overrides):  # noqa: F811
    from skyrl_megatron.runtime.hf_weights import save_hf
    from skyrl_megatron_lora.folder import save_adapter

    engine = bodies.adapted_engine(folder, layout, overrides, factors)
    save_adapter(engine.adapters, engine.groups, root / "adapter", engine.base)
    save_hf(engine.model, engine.groups, root / "merged", of=engine.adapters.merged)
    return logprobs(engine, batch), logprobs(engine, batch, adapters=False)


def load_body(folder, batch, adapter, layout, overrides):  # noqa: F811
    from skyrl_megatron_lora.folder import load_adapter

    engine = bodies.adapted_engine(folder, layout, overrides)
    load_adapter(engine.adapters, engine.groups, adapter)
    return logprobs(engine, batch)


def logprobs(engine, batch, adapters=True):  # noqa: F811
    """[R] of this rank's replica, and which rows they are."""
    from skyrl_megatron.data.splitting import split_for_dp

    rows = split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank]
    return rows, engine.compute_logprobs(batch.select(rows), adapters=adapters)


def whole(results, batch):  # noqa: F811
    import torch

    out = torch.zeros(len(batch.response_mask))
    for rows, values in results:
        out[batch.responses.select(torch.arange(len(out)), rows)] = values
    return out


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="lora"),
        pytest.param(True, id="canonical_lora", marks=pytest.mark.full_matrix),
    ],
)
def saved(request, ranks, folder, batch, factors, tmp_path_factory):  # noqa: F811
    root = tmp_path_factory.mktemp("adapter")
    overrides = CANONICAL if request.param else {}
    results = ranks(4, save_body, folder, batch, factors[request.param], root, dict(world=4, tp=2, ep=2), overrides)
    return root, overrides, *(whole([result[kind] for result in results], batch) for kind in (0, 1))


def test_peft_and_another_layout_compute_the_same(ranks, folder, batch, saved):  # noqa: F811
    """PEFT opens the folder; so does an engine at pp2. Without its adapters the engine is the base model."""
    from peft import PeftModel

    from tests.training.reference import load_model

    root, overrides, adapted, base = saved
    model = load_model(folder)
    assert (transformers_logprobs(model, batch) - base).abs().max() < LOGPROBS_TOLERANCE
    peft = PeftModel.from_pretrained(model, str(root / "adapter"))
    expected = transformers_logprobs(peft, batch)
    assert (adapted - base).abs().max() > 0.1, "the adapter changes next to nothing"
    assert (expected - adapted).abs().max() < LOGPROBS_TOLERANCE
    elsewhere = ranks(2, load_body, folder, batch, root / "adapter", dict(world=2, pp=2), overrides)
    assert (whole(elsewhere, batch) - adapted).abs().max() < LOGPROBS_TOLERANCE


def test_merged(folder, batch, saved, tmp_path):  # noqa: F811
    """The engine's merged export computes the same, and so do the weights that the command line merges."""
    from safetensors.torch import load_file

    from bridges.__main__ import main
    from tests.training.reference import load_model

    root, _, adapted, _ = saved
    assert main(["merge", "--hf", str(folder), "--adapter", str(root / "adapter"), "--out", str(tmp_path / "m")]) == 0
    ours, theirs = (load_file(path / "model.safetensors") for path in (root / "merged", tmp_path / "m"))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-6
    merged = transformers_logprobs(load_model(tmp_path / "m"), batch)
    assert (merged - adapted).abs().max() < LOGPROBS_TOLERANCE


@pytest.mark.parametrize("workers", [1, 3])
def test_weights_are_merged_one_at_a_time(folder, saved, tmp_path, monkeypatch, workers):  # noqa: F811
    """Of the merged weights, no more than one of each worker is alive."""
    import weakref

    from bridges import peft as merge_adapter

    made, most, original = [], 0, merge_adapter.merged

    def counted(*factors, **how):
        nonlocal most
        weight = original(*factors, **how)
        made.append(weakref.ref(weight))
        most = max(most, sum(each() is not None for each in made))
        return weight

    monkeypatch.setattr(merge_adapter, "merged", counted)
    merge_adapter.merge_adapter(folder, saved[0] / "adapter", tmp_path / "m", workers=workers)
    assert len(made) > 50 and 1 <= most <= workers


def test_stacked_experts_are_read(folder, saved):  # noqa: F811
    """The other form of experts holds the same factors."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    from bridges.peft import CONFIG, PREFIX, WEIGHTS, PeftFolder
    from skyrl_megatron.runtime.model.description import read_hf_model
    from tests.lora.stacked import stack_experts

    root, overrides, *_ = saved
    if overrides:
        pytest.skip("below: gate and up with an A each take twice the rank when stacked")
    plan, other = read_hf_model(folder).plan, root / "stacked"
    tensors = load_file(root / "adapter" / WEIGHTS)
    single = {
        f"{name.removeprefix(PREFIX).removesuffix('.weight')[:-7]}.{name[-8]}": tensor
        for name, tensor in tensors.items()
    }
    other.mkdir()
    save_file(stack_experts(single, plan), other / WEIGHTS)
    shutil.copy(root / "adapter" / CONFIG, other / CONFIG)
    first, second = PeftFolder(root / "adapter", plan), PeftFolder(other, plan)
    assert len(second.modules) < len(load_file(other / WEIGHTS)) * 4 and first.modules == second.modules
    for module in first.modules:
        for letter in "AB":
            assert torch.equal(first.factor(module, letter), second.factor(module, letter)), module


def start_body(folder, batch, adapter, layout, overrides):  # noqa: F811
    engine = bodies.adapted_engine(folder, layout, overrides | {f"{bodies.LORA}adapter_path": str(adapter)})
    before = logprobs(engine, batch)
    rows, _ = before
    engine.forward_backward(batch.select(rows))
    engine.optim_step()
    return before, float((logprobs(engine, batch)[1] - before[1]).abs().max())


def test_training_starts_from_a_folder(ranks, folder, batch, saved):  # noqa: F811
    """Log-probs are those of the engine that wrote it; the first step moves them by what a step may, not back to the
    base, as it would from main copies that were made before."""
    root, overrides, adapted, base = saved
    results = ranks(2, start_body, folder, batch, root / "adapter", dict(world=2, tp=2, etp=2), overrides)
    assert (whole([before for before, _ in results], batch) - adapted).abs().max() < LOGPROBS_TOLERANCE
    assert all(0 < moved < (adapted - base).abs().max() for _, moved in results)


@pytest.mark.parametrize(
    "change, says",
    [
        ({f"{bodies.LORA}alpha": 5}, "a scale of 1.25, the folder's 3: set trainer.policy.model.lora.alpha=12 with"),
        (
            {f"{bodies.LORA}use_rslora": True},
            "or trainer.policy.model.lora.alpha=6 with trainer.policy.model.lora.use_rs",
        ),
        ({f"{bodies.LORA}target_modules": "self_attn"}, "has an adapter there"),
        ({"alpha_pattern": {"q_proj": 20}}, "give its projections several ranks or scales, and one is trained"),
        ({}, "the adapter has another base model"),
    ],
    ids=["alpha", "scale", "layers", "patterns", "base"],
)
def test_a_folder_to_start_from_is_checked_before_the_run(folder, saved, tmp_path, change, says):  # noqa: F811
    import shutil
    import warnings

    from skyrl_megatron.checks import PlannedRun, run_checks
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from tests.bridges.tiny_models import save_tiny

    if not change:  # the same sizes, other weights
        sizes = dict(num_hidden_layers=4, num_key_value_heads=2, initializer_range=0.2)
        folder = save_tiny("qwen3_moe", tmp_path / "model", seed=9, **sizes)
    adapter = shutil.copytree(saved[0] / "adapter", tmp_path / "adapter")
    if "alpha_pattern" in change:
        change_config(adapter, **change)
        change = {}
    keys = bodies.KEYS | saved[1] | {"trainer.policy.model.path": str(folder)} | change
    keys[f"{bodies.LORA}adapter_path"] = str(adapter)
    with warnings.catch_warnings(action="ignore"):
        problems = run_checks(PlannedRun(SkyRLTrainConfig.from_cli_overrides(keys), Hardware(0, 1))).problems
    found = [each for each in problems if each.key == f"{bodies.LORA}adapter_path"]
    assert len(found) == 1 and says in str(found[0]), problems


def change_config(adapter, **values):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda a: change_config(a, r=8), "gives it the rank 8 (r, rank_pattern)"),
        (lambda a: change_config(a, use_dora=True), "use_dora=True"),
        (
            lambda a: change_config(a, rank_pattern={"q_proj": 8}),
            "q_proj is [4, 48], but adapter_config.json gives it",
        ),
        (lambda a: change_config(a, rank_pattern={"(": 8}), "rank_pattern or alpha_pattern has no regular expression"),
        (lambda a: change_config(a, peft_type="IA3"), "only LORA"),
        (lambda a: (a / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda a: (a / "adapter_model.safetensors").write_bytes(b"\0" * 40), "adapter_model.safetensors"),
    ],
    ids=["rank", "dora", "rank pattern", "no pattern", "ia3", "no config", "damaged"],
)
def test_folders_that_do_not_fit(folder, saved, tmp_path, capsys, damage, says):  # noqa: F811
    import shutil

    from bridges.__main__ import main

    adapter = tmp_path / "adapter"
    shutil.copytree(saved[0] / "adapter", adapter)
    damage(adapter)
    code = main(["merge", "--hf", str(folder), "--adapter", str(adapter), "--out", str(tmp_path / "m")])
    error = capsys.readouterr().err
    assert code == 2 and says in error and "Traceback" not in error
    assert not (tmp_path / "m").exists()


def test_stacked_pairs_of_twice_the_rank_are_read(folder, factors, tmp_path):  # noqa: F811
    """Gate and up with an A each: side by side in one pair of factors, and apart again; others of that rank stay
    whole, and such a rank must be in ``rank_pattern``."""
    import torch
    from safetensors.torch import save_file

    from bridges.errors import BridgeError
    from bridges.peft import CONFIG, WEIGHTS, PeftFolder, adapter_config
    from skyrl_megatron.runtime.model.description import read_hf_model
    from tests.lora.stacked import stack_experts

    plan = read_hf_model(folder).plan
    shape = dict(rank=reference.RANK, scale=reference.ALPHA / reference.RANK)
    (tmp_path / CONFIG).write_bytes(adapter_config(**shape, modules=[], base=None))
    change_config(
        tmp_path,
        rank_pattern={"gate_up_proj": 2 * reference.RANK},
        alpha_pattern={"gate_up_proj": 2 * reference.ALPHA},
    )
    stacked = {name: tensor.contiguous() for name, tensor in stack_experts(factors[True], plan).items()}
    save_file(stacked, tmp_path / WEIGHTS)
    peft = PeftFolder(tmp_path, plan)
    assert {f"{module}.{letter}" for module in peft.modules for letter in "AB"} == factors[True].keys()
    assert all(torch.equal(peft.factor(name[:-2], name[-1]), tensor) for name, tensor in factors[True].items())
    assert peft.is_uniform
    stacked = {name: torch.ones_like(tensor) for name, tensor in stacked.items()}
    save_file(stacked, tmp_path / WEIGHTS)
    shared = PeftFolder(tmp_path, plan)  # gate and up share all ranks
    assert not shared.is_uniform and shared.factor("model.layers.0.mlp.experts.0.up_proj", "A").shape[0] == 8
    change_config(tmp_path, rank_pattern={}, alpha_pattern={})
    with pytest.raises(BridgeError, match=r"of rank 8 for 4 experts, but .* gives gate_up_proj the rank 4"):
        PeftFolder(tmp_path, plan)


def tied_case(tmp_path, module):
    """A model whose output layer is its embedding, and an adapter of one of them: (base, adapter)."""
    import torch
    from safetensors.torch import save_file

    from bridges.peft import CONFIG, WEIGHTS, adapter_config, tensor_on_disk
    from tests.bridges.tiny_models import save_tiny

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_tiny("qwen2", base)
    config = json.loads((base / "config.json").read_text())
    assert config["tie_word_embeddings"]
    adapter.mkdir()
    generator = torch.Generator().manual_seed(0)
    factors = {
        "A": torch.randn(4, config["hidden_size"], generator=generator),
        "B": torch.randn(config["vocab_size"], 4, generator=generator),
    }
    save_file(dict(tensor_on_disk(module, letter, each) for letter, each in factors.items()), adapter / WEIGHTS)
    shape = dict(rank=4, scale=2.0)
    ends = [module.rpartition(".")[2]]
    (adapter / CONFIG).write_bytes(adapter_config(**shape, modules=ends, base=None))
    return base, adapter


def test_an_adapter_of_a_tied_embedding(tmp_path):
    """PEFT adds it to the embedding alone: merged, the output layer is what it was."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from bridges.peft import merge_adapter

    base, adapter = tied_case(tmp_path, "model.embed_tokens")
    with pytest.warns(UserWarning, match="the merged model has a separate output layer"):
        merge_adapter(base, adapter, tmp_path / "merged")
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
    ids = torch.arange(12)[None]
    load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # noqa: E731
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(load(base), adapter)(ids).logits
        found, plain = load(tmp_path / "merged")(ids).logits, load(base)(ids).logits
    assert (expected - plain).abs().max() > 1
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_an_adapter_of_a_tied_output_layer(tmp_path, capsys):
    from bridges.__main__ import main

    base, adapter = tied_case(tmp_path, "lm_head")
    assert main(["merge", "--hf", str(base), "--adapter", str(adapter), "--out", str(tmp_path / "m")]) == 2
    error = capsys.readouterr().err
    assert "lm_head shares its weight with the embedding (tie_word_embeddings" in error and "another" not in error
