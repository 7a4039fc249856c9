"""``--check`` and memory: figures as built models and optimizers have them, phases, limits, the nearest setting."""

import json

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.support.released_models import DEEPSEEK_V3, QWEN3_30B_A3B
from tests.support.whole_folder import write_sums, write_whole_folder

pytestmark = pytest.mark.slow

M = "trainer.policy.megatron_config."
E = "generator.inference_engine."


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A folder of Qwen3-30B-A3B that passes every check of files, and rows of GSM8K."""
    folder = tmp_path_factory.mktemp("qwen")
    write_sums(folder / "rows.parquet", rows=16)
    return write_whole_folder(folder / "model", QWEN3_30B_A3B)


@pytest.fixture
def check(qwen, capsys):
    """Run ``--check`` with that model: (exit code, stdout, stderr)."""
    from skyrl_megatron.entrypoints import check

    rows = [f"data.train_data=['{qwen.parent / 'rows.parquet'}']", "data.val_data=[]", "trainer.logger=console"]
    rows += ["trainer.train_batch_size=16", "trainer.policy_mini_batch_size=16"]

    def run(*args):
        code = check.run([f"trainer.policy.model.path={qwen}", *rows, *args])
        return code, *capsys.readouterr()

    return run


EIGHT = (
    "--check=1x8",
    "trainer.placement.policy_num_gpus_per_node=8",
    f"{M}expert_model_parallel_size=8",
    f"{E}num_engines=4",
    f"{E}tensor_parallel_size=2",
)


def test_a_run_that_does_not_fit_is_refused_with_a_setting_that_does(check):
    code, _, err = check(*EIGHT, "--gpu", "80GB")
    assert code == 2
    # 12 bytes for each of 3.8 G parameters, of which ep=8 leaves the experts' unsharded
    assert "rank 0 needs" in err and "in policy training" in err and "policy optimizer 45.80 GB" in err
    settings = err.split("the nearest setting that fits: ")[1].split("\n")[0].split()
    code, out, _ = check(*EIGHT, "--gpu", "80GB", *settings)
    assert code == 0 and " free" in out and "of 80.00 GB, " in out


def test_four_gpus_are_too_few_for_qwen3_30b(check):
    four = [arg.replace("8", "4") for arg in EIGHT[:3]]
    code, _, err = check(*four, f"{E}num_engines=2", f"{E}tensor_parallel_size=2", "--gpu", "80GB")
    assert code == 2 and "in policy training" in err and "the nearest setting that fits: " in err


def test_a_model_without_weights_is_budgeted_by_its_config(check, tmp_path):
    """DeepSeek-V3 on 16 nodes: weights and tokenizer may come later, and what does not fit is found."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    layout = {"expert": 16, "pipeline": 8}
    code, _, err = check(
        "--check=16x8",
        "--gpu=h100",
        f"trainer.policy.model.path={tmp_path}",
        "trainer.placement.policy_num_nodes=16",
        "trainer.placement.policy_num_gpus_per_node=8",
        *(f"{M}{name}_model_parallel_size={degree}" for name, degree in layout.items()),
        f"{M}num_layers_in_first_pipeline_stage=8",
        f"{M}num_layers_in_last_pipeline_stage=5",
        f"{E}num_engines=4",
        f"{E}tensor_parallel_size=32",
    )
    assert code == 2 and "safetensors" not in err and "tokenizer" not in err
    # a stage of 8 layers, of which a rank has 16 of 256 experts
    assert (
        "in policy training" in err and "policy weights 15.00 GB" in err and "the nearest setting that fits: " in err
    )


def test_without_sizes_memory_is_not_checked(check):
    code, out, _ = check(*EIGHT)
    assert code == 0 and "memory: the memory size of GPUs or nodes is unknown: add --gpu h100" in out
    assert "policy training, rank 0: " in out  # but what it takes is told


def test_memory_that_may_be_locked(qwen):
    """RDMA cards register buffers under a limit, which ends a run over several nodes and none within one."""
    from skyrl_megatron.checks import NotChecked, PlannedRun
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron_observe.preflight.machine_checks import machine

    def found(nodes, limit):
        cfg = SkyRLTrainConfig.from_cli_overrides(
            {"trainer.policy.model.path": str(qwen), "trainer.placement.policy_num_nodes": nodes}
        )
        given = machine(PlannedRun(cfg, Hardware(8, nodes, lockable_bytes=limit)))
        return [(type(each), str(each)) for each in given if "locked memory" in str(each)]

    [(kind, text)] = found(2, 8 << 20)
    assert kind is not NotChecked and "locked memory=8.38861 MB" in text and "ulimit -l unlimited" in text
    [(kind, text)] = found(1, 8 << 20)
    assert kind is NotChecked and "ulimit -l unlimited" in text
    assert [kind for kind, _ in found(2, 1 << 30)] == [NotChecked] and found(2, None) == []


def test_packages_of_another_machine_are_not_looked_for_here(check):
    aware = f"{M}optimizer_config_kwargs.use_precision_aware_optimizer"
    code, out, err = check(*EIGHT, f"{aware}=true")
    assert code == 0 and f"{aware}: whether the machines of the ranks have transformer_engine" in out, err


def test_little_room_for_what_is_not_counted_is_warned_of(check):
    """Of the allocator's segments and of uneven experts; 3 GB are little, what a GPU of 143 GB leaves is not."""
    run = (*EIGHT, f"{M}transformer_config_kwargs.recompute_granularity=full")  # else what is free is used
    code, out, _ = check(*run, "--gpu=143GB")
    (line,) = [line for line in out.splitlines() if line.startswith("headroom beyond the estimate")]
    assert code == 0 and "in policy training, rank 0" in line and "warning: the headroom" not in out
    assert "10% of activations for fragmentation, 1.5 times the average tokens per expert rank" in line
    headroom = float(line.partition("): ")[2].partition(" GB")[0])
    assert headroom > 4
    code, out, _ = check(*run, f"--gpu={143 - headroom + 3:.3f}GB")
    assert code == 0 and "headroom beyond the estimate" in out and "3.00 GB, in policy training" in out
    assert (
        "warning: the headroom is below 4.00 GB" in out and "lower trainer.micro_train_batch_size_per_gpu (1)" in out
    )


def test_a_deterministic_run_whose_attention_has_no_kernel_is_refused(check):
    """Qwen3-30B's 32 heads: of 2 x 4,096 tokens, the least that cuDNN's deterministic kernel is not taken for."""
    run = (*EIGHT, "trainer.deterministic=true", "trainer.max_prompt_length=2048", "--gpu=h200")
    run += ("generator.sampling_params.max_generate_length=2048", "trainer.max_tokens_per_microbatch=8192")
    code, _, err = check(*run)
    local = f"{M}transformer_config_kwargs.transformer_impl=local"
    assert code == 2 and "trainer.deterministic=True: Transformer Engine has no deterministic kernel" in err
    assert "2 sequence(s) of 4096 tokens with 32 heads a rank" in err and local in err
    for fix in (
        ("trainer.deterministic=false",),
        (local,),
        ("trainer.max_tokens_per_microbatch=8191",),
        ("--gpu=b200",),
    ):
        code, _, err = check(*run, *fix)
        assert code == 0, (fix, err)


def test_host_memory(check):
    optimizer = [f"{M}optimizer_config_kwargs.{name}" for name in ("optimizer_cpu_offload=true",)]
    optimizer.append(f"{M}optimizer_config_kwargs.optimizer_offload_fraction=1.0")
    code, _, err = check(*EIGHT, "--host-memory", "256GiB", *optimizer)
    # moments, 8 bytes for each of 30.5 G parameters; master weights and gradients pinned, 768 rows as 1024
    assert (
        code == 2 and "host memory=274.88 GB" in err and "policy optimizer of optimizer_cpu_offload 581.27 GB" in err
    )
    assert check(*EIGHT, "--host-memory=2TB", *optimizer)[0] == 0
    code, _, err = check(*EIGHT, "--host-memory=900GB", *optimizer)
    nearest = "trainer.policy.optimizer_config.offload_after_step=false"
    assert code == 2 and f"the nearest setting that fits: {nearest}\n" in err


@pytest.mark.parametrize("size, fix", [("h10", "one of a100, "), ("80", "at least 1 GiB"), ("80 bananas", "80GB")])
def test_sizes_that_make_no_sense(check, size, fix):
    code, _, err = check(*EIGHT, "--gpu", size)
    assert code == 2 and f"--gpu={size}" in err and fix in err


def engine_bytes(folder, overrides):
    """Bytes of a rank's weights, gradients, optimizer state and the copy of its state after a step of the real engine;
    and predicted ones."""
    import os

    import torch

    from skyrl_megatron.config import SkyRLTrainConfig, resolve
    from skyrl_megatron.config.hardware import local_hardware
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.model.scaled_weights import scaled_weight
    from skyrl_megatron.runtime.peer_checkpoint import StateSnapshot
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.memory_phases import RoleModel, copied_bytes

    cfg = SkyRLTrainConfig.from_cli_overrides(
        {"trainer.policy.model.path": str(folder), "trainer.bf16": False} | overrides
    )
    assert resolve.fit_to_hardware(cfg, local_hardware()) == []
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]  # Megatron refuses another attention backend than the last model of the process had
    engine = MegatronEngine(cfg)
    buffers, state, parameters = [], {}, {}
    for name in engine.adapter_names:
        engine.set_adapter(name)
        for chunk in engine.chunks:
            parameters |= {id(parameter): parameter for parameter in chunk.parameters()}
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    parameter.main_grad.fill_(1e-3)
        engine.optimizer.step()
        trained = engine.trained[name].buffered
        buffers += [b for chunk in trained for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
            for entry in (
                optimizer.optimizer.state.values() if optimizer.optimizer else ()
            ):  # none: nothing to train here
                state |= {id(value): value for value in entry.values() if torch.is_tensor(value) and value.dim()}
    every = parameters.values()
    weights = sum(scaled.matrix().nbytes if (scaled := scaled_weight(p)) else p.nbytes for p in every)
    measured = (weights, sum(b.grad_data.nbytes for b in buffers), sum(value.nbytes for value in state.values()))
    copy, stage = StateSnapshot(), engine.groups.pp.rank()
    copy.take(engine)
    model = RoleModel.of(cfg, "policy", parameter_tables(cfg)["policy"], on_cpu=True)
    size = model.state(stage)
    return (*measured, copy.nbytes), (size.weights, size.gradients, size.optimizer, copied_bytes(model, stage))


def as_predicted(found):
    """Check what each rank measured against what was predicted of it."""
    for measured, predicted in found:
        for name, real, expected in zip(
            ("weights", "gradients", "optimizer", "copy"), measured, predicted, strict=True
        ):
            assert abs(expected - real) <= 0.01 * real, f"{name}: predicted {expected:,}, measured {real:,}"


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "freeze_moe_router": True},
        {"pipeline_model_parallel_size": 2},
        {"expert_model_parallel_size": 2, "optimizer_config_kwargs.use_distributed_optimizer": False},
    ],
    ids=str,
)
def test_states_are_those_of_the_engine(ranks, tmp_path, settings):
    # sizes that are multiples of 64, to which Megatron pads each parameter in its buffers
    sizes = dict(
        hidden_size=128, moe_intermediate_size=64, num_hidden_layers=4, num_key_value_heads=2, vocab_size=1024
    )
    folder = save_tiny("qwen3_moe", tmp_path, **sizes)
    overrides = {f"{M}{name}": value for name, value in settings.items()}
    overrides["trainer.placement.policy_num_gpus_per_node"] = 2
    as_predicted(ranks(2, engine_bytes, folder, overrides, timeout_s=400))


@pytest.mark.full_matrix
@pytest.mark.parametrize("taught", [False, True], ids=["frozen", "taught"])
def test_states_of_an_indexer_are_those_of_the_engine(ranks, tmp_path, taught):
    sizes = dict(hidden_size=128, moe_intermediate_size=64, num_hidden_layers=4, vocab_size=1024, q_lora_rank=64)
    sizes |= dict(kv_lora_rank=64, index_head_dim=64, intermediate_size=128)
    folder = save_tiny("deepseek_v32", tmp_path, **sizes)
    kwargs = {"dsa_indexer_loss_coeff": 0.1, "dsa_indexer_use_sparse_loss": True} if taught else {}
    overrides = {f"{M}transformer_config_kwargs": kwargs, f"{M}expert_model_parallel_size": 2}
    overrides["trainer.placement.policy_num_gpus_per_node"] = 2
    as_predicted(ranks(2, engine_bytes, folder, overrides, timeout_s=400))


@pytest.mark.full_matrix
@pytest.mark.parametrize("degree", ["expert", "pipeline"])
def test_states_of_a_draft_head_are_those_of_the_engine(ranks, tmp_path, degree):
    from tests.training.draft_reference import save_with_draft

    sizes = dict(hidden_size=128, moe_intermediate_size=64, vocab_size=1024, q_lora_rank=64, kv_lora_rank=64)
    folder = save_with_draft("deepseek_v3", tmp_path, **sizes, intermediate_size=128)
    overrides = {f"{M}mtp.train": True, f"{M}{degree}_model_parallel_size": 2}
    overrides["trainer.placement.policy_num_gpus_per_node"] = 2
    as_predicted(ranks(2, engine_bytes, folder, overrides, timeout_s=400))


LORA = "trainer.policy.model.lora."


@pytest.mark.parametrize(
    "settings",
    [
        {f"{M}expert_model_parallel_size": 2, f"{LORA}target_modules": "all-linear,output_layer"},
        {f"{M}tensor_model_parallel_size": 2, f"{M}lora_config.lora_type": "canonical_lora"},
        {f"{M}expert_model_parallel_size": 2, f"{M}lora_config.experts_shared_outer_loras": True},
        {f"{M}pipeline_model_parallel_size": 2, f"{LORA}target_modules": "q_proj,k_proj,v_proj,layers.3"},
        {f"{LORA}adapters": {"math": {}, "code": {"rank": 8, "train_attn": False}}, f"{LORA}sync_mode": "memory"},
    ],
    ids=lambda settings: " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items()),
)
def test_states_of_adapters_are_those_of_the_engine(ranks, tmp_path, settings):
    sizes = dict(
        hidden_size=128, moe_intermediate_size=64, num_hidden_layers=4, num_key_value_heads=2, vocab_size=1024
    )
    folder = save_tiny("qwen3_moe", tmp_path, **sizes)
    overrides = {f"{LORA}rank": 16, "trainer.placement.policy_num_gpus_per_node": 2} | settings
    found = ranks(2, engine_bytes, folder, overrides, timeout_s=400)
    for (weights, gradients, _, copied), predicted in found:
        assert weights == predicted[0]
        assert abs(copied - predicted[3]) <= 0.01 * copied  # buffers are padded
        assert abs(gradients - predicted[1]) <= 0.01 * gradients  # buffers are padded
    measured, predicted = (sum(rank[which][2] for rank in found) for which in (0, 1))
    assert measured == predicted  # Adam's state, shared by the ranks


@pytest.mark.parametrize("kind", ["fp8", "int8 groups"])
@pytest.mark.parametrize(
    "degrees",
    [dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=2), dict(expert_model_parallel_size=2)],
    ids=["tp2·etp2", "ep2"],
)
def test_a_base_of_8_bits_is_counted_as_it_is_kept(ranks, tmp_path, kind, degrees):
    from tests.support.quantised import quantise

    sizes = dict(hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_key_value_heads=2, vocab_size=1024)
    (tmp_path / "plain model").mkdir()
    quantised, _ = quantise(save_tiny("qwen3_moe", tmp_path / "plain model", **sizes), tmp_path, kind)
    overrides = {f"{LORA}rank": 4, "trainer.placement.policy_num_gpus_per_node": 2}
    overrides |= {f"{M}{name}": degree for name, degree in degrees.items()}
    for (weights, *_), predicted in ranks(2, engine_bytes, quantised, overrides, timeout_s=400):
        assert 0 <= predicted[0] - weights <= 0.01 * weights  # ranks whose first block is cut have a scale more


def hybrid_bytes(folder, options):
    """Bytes of the state of Megatron's HybridDeviceOptimizer, (device, host), after a step; and predicted ones."""
    import dataclasses
    import json
    import warnings

    from bridges.plan import Plan
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime.checkpoint.rank_state import inner_optimizers
    from skyrl_megatron.runtime.offload import optimizer_tensors
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable, rank_bytes
    from tests.checkpoint.test_variants import bf16_state, set_gradients
    from tests.support.fake_gpu import fake_gpu

    options = dict(options, optimizer_cpu_offload=True)
    with fake_gpu(), warnings.catch_warnings(action="ignore"):
        state = bf16_state(folder, {}, 1, options)
        state.optimizer.config.clip_grad = 0.0
        set_gradients(state, 1)
        state.optimizer.prepare_grads()
        state.optimizer.step_with_ready_grads()
        weights = {p.untyped_storage()._cdata for chunk in state.model_chunks for p in chunk.parameters()}
        held = {True: 0, False: 0}
        gradients = [
            copy.grad
            for part in inner_optimizers(state.optimizer)
            for copy in part.optimizer.cpu_copys_map_gpu_param
            if copy.grad is not None
        ]
        seen = set(weights)
        for tensor in (*optimizer_tensors(state.optimizer), *gradients):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                held[bool(tensor.is_cuda)] += tensor.numel() * tensor.element_size()
        moved = sum(
            p.numel() for part in inner_optimizers(state.optimizer) for p in part.optimizer.cpu_copys_map_gpu_param
        )
    megatron = SkyRLTrainConfig().trainer.policy.megatron_config
    table = ParameterTable(Plan.of(json.loads((folder / "config.json").read_text())))
    count = dataclasses.replace(table.stage(ParallelConfig(1), 0), pinned_rounding=1.0)
    # it moves whole parameters, and so not the exact share that was asked for
    megatron.optimizer_config_kwargs = dict(options, optimizer_offload_fraction=moved / count.parameters)
    predicted = rank_bytes(count, ParallelConfig(1), megatron, bf16=True, trained=True)
    return moved / count.parameters, held[True], held[False], predicted.optimizer, predicted.host_optimizer


@pytest.mark.process
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_state_that_is_updated_on_the_host(ranks, tmp_path, fraction):
    """Masters, moments and gradients of the real HybridDeviceOptimizer, on a GPU that is not there."""
    sizes = dict(hidden_size=128, moe_intermediate_size=64, num_key_value_heads=2, vocab_size=1024)
    folder = save_tiny("qwen3_moe", tmp_path / "model", num_hidden_layers=2, **sizes)
    options = {"optimizer_offload_fraction": fraction}
    moved, device, host, on_device, on_host = ranks(1, hybrid_bytes, folder, options)[0]
    assert abs(moved - fraction) < 0.2
    assert abs(host - on_host) <= 0.01 * on_host, f"predicted {on_host:,}, measured {host:,}"
    assert abs(device - on_device) <= 0.01 * on_device, f"predicted {on_device:,}, measured {device:,}"


def test_counters_of_penalties_are_counted_with_an_engine():
    """vLLM's sampler has one of 32 bits for each token of each request that may run, and bits of prompts."""
    from bridges.plan import Plan
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable
    from skyrl_megatron_observe.estimate.memory_phases import engine_bytes

    table = ParameterTable(Plan.of(QWEN3_30B_A3B))
    sizes = {
        requests: engine_bytes(SkyRLTrainConfig.from_cli_overrides([f"{E}max_num_seqs={requests}"]), table)
        for requests in (256, 1024)
    }
    assert sizes[1024].counters == 4 * sizes[256].counters == 1024 * (151936 * 4 + 151936 // 8)
    assert sizes[1024].least - sizes[1024].at_work - (sizes[256].least - sizes[256].at_work) == 768 * 626736
