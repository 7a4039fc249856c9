"""The tables against what transformers writes to disk: names, shapes, exact round trips, exact splits."""

import pytest

from tests.bridges.tiny_models import TINY, save_tiny, tiny_config

VARIANTS = [(model_type, {}) for model_type in TINY] + [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"tie_word_embeddings": False}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [0], "num_hidden_layers": 4}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen2_moe", {"qkv_bias": False}),
    ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "tie_word_embeddings": False}),
]


def label(variant):
    model_type, overrides = variant
    return "-".join([model_type, *(f"{key}={value}" for key, value in overrides.items())])


@pytest.fixture(scope="module", params=VARIANTS, ids=label)
def folder(request, tmp_path_factory):
    from bridges.hf_io import HfFolder

    model_type, overrides = request.param
    return HfFolder(save_tiny(model_type, tmp_path_factory.mktemp(model_type), **overrides))


@pytest.fixture(scope="module")
def plan(folder):
    from bridges.plan import Plan

    return Plan.of(folder.config)


def read(folder, entry):
    return [folder.read(piece.name, piece.index) for piece in entry.hf]


def test_every_family_has_a_tiny_model():
    from bridges.families import SUPPORTED

    assert set(TINY) == set(SUPPORTED)


def test_names_and_shapes_on_disk_are_the_expanded_table(folder, plan):
    pieces = [(piece.name, piece.index) for entry in plan.entries for piece in entry.hf]
    assert len(set(pieces)) == len(pieces), "a tensor on disk is named twice"
    assert {name: tuple(shape) for name, shape in folder.shapes().items()} == dict(plan.hf)
    plan.check(folder.shapes(), str(folder.path))


def test_round_trip_is_bitwise(folder, plan):
    import torch

    for entry in plan.entries:
        tensors = read(folder, entry)
        megatron = entry.to_megatron(tensors)
        assert tuple(megatron.shape) == entry.shape, entry.name
        for back, tensor in zip(entry.to_hf(megatron), tensors, strict=True):
            assert torch.equal(back, tensor), entry.name


def test_unshard_inverts_shard(folder, plan):
    import torch

    from bridges.errors import BridgeError
    from bridges.rules import local_shape, shard, unshard

    split = 0
    for entry in plan.entries:
        whole = entry.to_megatron(read(folder, entry))
        for size, padded in ((1, None), (2, None), (3, None), (6, None), (2, 1024), (3, 1152)):
            try:
                shares = [shard(whole, entry, size, rank, padded) for rank in range(size)]
            except BridgeError as error:  # 3 KV groups over 2 ranks, 4 experts' columns over 3 ...
                assert entry.name in str(error) and entry.split.dim is not None
                continue
            split += size > 1 and entry.split.dim is not None
            assert {tuple(share.shape) for share in shares} == {local_shape(entry, size, padded)}
            assert torch.equal(unshard(shares, entry), whole), (entry.name, size)
    assert split > 5


def test_a_share_is_read_as_it_is_cut(folder, plan):
    """The trainer converts a rank's rows alone, and not the whole tensor first."""
    import torch

    from bridges.errors import BridgeError
    from bridges.rules import padded_rows, shard
    from skyrl_megatron.runtime.hf_weights import read_shard

    read_entries = 0
    for entry in plan.entries:
        whole = entry.to_megatron(read(folder, entry))
        padded = padded_rows(whole.shape[0], 2) if entry.split.vocab else None
        for rank in range(2):
            try:
                wanted = shard(whole, entry, 2, rank, padded)
            except BridgeError:
                continue
            found = read_shard(folder, entry, 2, rank, (padded or whole.shape[0]) // 2)
            assert torch.equal(found, wanted), (entry.name, rank)
            read_entries += 1
    assert read_entries > 5


def test_every_module_spelling_leads_back_to_the_entry(plan):
    from bridges.rules import module_name
    from bridges.tensor_names import canonical

    for spec in ("local", "te", "local_grouped"):
        for entry in plan.entries:
            layers, experts = entry.layer or 0, entry.expert or 0
            name = module_name(entry, spec, layer_offset=layers, expert_offset=experts)
            shift = dict(layer_offset=layers, expert=lambda _, own, first=experts: own + first)
            assert canonical(name, **shift) == entry.name
            assert canonical("module.module." + name, **shift) == entry.name


def test_qkv_rows_go_by_kv_group():
    """2 groups of 2 query heads of size 1, written down by hand: q0 q1 k0 v0 q2 q3 k1 v1."""
    import torch

    from bridges.conversions import InterleaveQkv

    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    conversion = InterleaveQkv(groups=2, queries=2, dim=1)
    assert conversion.to_megatron([q, k, v]).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_gate_and_up_are_split_separately():
    import torch

    from bridges.plan import Plan
    from bridges.rules import shard

    plan = Plan.of(tiny_config("qwen3"))
    entry = plan.by_name["decoder.layers.0.mlp.linear_fc1.weight"]
    whole = torch.arange(80.0)[:, None].expand(80, 48)
    rows = shard(whole, entry, 2, 1)[:, 0].tolist()
    assert rows == [*range(20, 40), *range(60, 80)]


def test_unknown_family_names_the_nearest():
    from bridges.errors import BridgeError
    from bridges.families import get_family

    with pytest.raises(BridgeError, match=r"'qwen3_mo' is not supported; nearest: qwen3_moe\. Supported: .*qwen2"):
        get_family("qwen3_mo")


@pytest.mark.parametrize("module", ["tests.bridges.tiny_models", "tests.support.tiny_models"])
def test_no_part_of_a_tiny_model_is_trivial(module):
    """A gate of zeros, norms of ones: a comparison with such a part shows no mistake in it."""
    import importlib

    tiny = importlib.import_module(module)
    for family in tiny.TINY:
        model = tiny.tiny_model(family)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.numel() > 1 and tensor.is_floating_point():
                assert tensor.std() > 1e-3, f"{family}: {name}"


def test_mimo_has_the_window_of_its_engine():
    """transformers from 5.20 on saves ``sliding_window`` as one more than ``sliding_window_size``, by which vLLM
    samples."""
    from bridges.errors import BridgeError
    from bridges.families import get_family

    config, family = tiny_config("mimo_v2_flash"), get_family("mimo_v2_flash")
    for saved in ({"sliding_window": 17}, {"sliding_window": 17, "sliding_window_size": 17}):
        assert family.megatron_config(config | saved).transformer["window_size"] == (16, 0)
    again = config | {"sliding_window": 18, "sliding_window_size": 17}
    assert family.megatron_config(again).transformer["window_size"] == (16, 0)
    with pytest.raises(BridgeError, match="sliding_window_size is 17, by which engines sample"):
        family.megatron_config(config | {"sliding_window": 64, "sliding_window_size": 17})
