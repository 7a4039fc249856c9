"""Experts that change their ranks between steps: the same weights and moments as without, wherever experts are."""

import dataclasses

import pytest

from tests.checkpoint import training
from tests.support.rank_pool import RankFailure
from tests.training import reference
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

SHUFFLED = {f"{MEGATRON}moe_expert_moves": "shuffle"}
AUTO = {f"{MEGATRON}moe_expert_moves": "auto"}
NOT_CLIPPED = {"trainer.policy.optimizer_config.max_grad_norm": 0.0}
"""The clipped gradient depends on the last bit of its norm, which depends on the order of the ranks' sums."""
REPLAYED = {
    f"{MEGATRON}moe_enable_routing_replay": True,
    "generator.inference_engine.enable_return_routed_experts": True,
}
LORA = {"trainer.policy.model.lora.rank": 4, "trainer.policy.model.lora.alpha": 8}
OF_ADAPTERS = [{}, pytest.param(LORA, id="lora")]
"""Checkpoints of a run with adapters have no frozen weights: they are loaded again into the slots."""
PLAIN = [("dp2·ep2", {}), ("tp2·dp2·ep2", {}), ("dp2·ep2", NO_DISTRIBUTED), ("dp2·ep2", LORA)]
MORE = [
    (layout, options)
    for layout in ("tp2·dp2·ep2", "pp2·cp2·ep2", "pp2·vpp2·dp2·ep2", "tp2·ep2", "tp2·cp2·ep4")
    for options in ({}, NO_DISTRIBUTED, REPLAYED, {"trainer.bf16": True}, LORA, LORA | NO_DISTRIBUTED)
    if (layout, options) not in PLAIN
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return training.save_model(tmp_path_factory.mktemp("model"))


def state_by_expert(engine):
    """SHA-256 of every global weight, master and moment, put together from the blocks that the ranks would save."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.runtime.checkpoint.rank_state import blocks_to_save

    mine = [
        (block.key, block.global_shape, block.offsets, block.data.detach().clone().view(block.sizes))
        for block in blocks_to_save(engine.chunks, engine.optimizer, engine.groups)
    ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = {}
    for key, shape, offsets, data in (block for rank in everyone for block in rank):
        whole.setdefault(key, torch.zeros(shape, dtype=data.dtype))
        whole[key][tuple(slice(a, a + n) for a, n in zip(offsets, data.shape, strict=True))] = data
    return {key: training.digest(tensor) for key, tensor in sorted(whole.items())}


def step(engine, number):
    """A step on the batch of this number, with routes where the engine replays them: its loss, and the moves."""
    from skyrl_megatron.data.splitting import split_for_dp

    batch = training.synthetic_batch(number)
    if engine.megatron.moe_enable_routing_replay:
        batch = reference.with_routes(batch, layers=4, experts=4, top_k=2)
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
    logprobs = engine.compute_logprobs(part).double().sum().item()
    loss = engine.forward_backward(part)["final_loss"]
    return (logprobs, loss), engine.optim_step().metrics


def exported(engine, place):
    """SHA-256 of the weights that an export writes, by file."""
    import hashlib
    from pathlib import Path

    import torch.distributed as dist

    from skyrl_megatron.runtime.hf_weights import save_hf

    save_hf(engine.model, engine.groups, place)
    dist.barrier()
    files = sorted(Path(place).glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def three_steps(folder, layout, overrides, place):
    """What each step computed, the state afterwards, an export, the slots, and how many experts moved."""
    engine = training.engine(folder, layout, **overrides)
    seen, moves = zip(*(step(engine, number) for number in (1, 2, 3)), strict=True)
    slots = dict(engine.model.experts.moved)
    return (
        seen,
        state_by_expert(engine),
        exported(engine, place),
        slots,
        [each.get("moe_moved_experts") for each in moves],
    )


@pytest.mark.parametrize(
    "layout, options", [*PLAIN, *(pytest.param(*each, marks=pytest.mark.full_matrix) for each in MORE)]
)
def test_a_run_with_moves_is_the_run_without(ranks, folder, tmp_path, layout, options):
    """Bit for bit: two experts of a token have one sum, and nothing is clipped."""
    world, options = training.LAYOUTS[layout]["world"], NOT_CLIPPED | options
    plain = ranks(world, three_steps, folder, layout, options, str(tmp_path / "plain"))[0]
    moved = ranks(world, three_steps, folder, layout, options | SHUFFLED, str(tmp_path / "moved"))[0]
    assert plain[3:] == ({}, [None] * 3)
    assert moved[3] and all(count > 4 for count in moved[4]), "experts moved after every step"
    assert moved[:3] == plain[:3]


@pytest.mark.parametrize("fault", ["moments stay", "columns stay"])
def test_planted_faults_are_seen(ranks, folder, tmp_path, fault):
    plain = ranks(2, three_steps, folder, "dp2·ep2", NOT_CLIPPED, str(tmp_path / "plain"))[0]
    broken = ranks(2, broken_steps, folder, str(tmp_path / "broken"), fault)[0]
    assert broken[1] != plain[1]


def broken_steps(folder, place, fault):
    from unittest import mock

    from skyrl_megatron.runtime.model.expert_placement import ExpertPlacement
    from skyrl_megatron_parts.experts import moves as expert_moves

    def without_moments(optimizer):
        for each in owned(optimizer):
            yield dataclasses.replace(each, tensors={name: each.tensors[name] for name in ("param",)})

    owned = expert_moves.owned_ranges
    planted = (
        mock.patch.object(expert_moves, "owned_ranges", without_moments)
        if fault == "moments stay"
        else mock.patch.object(ExpertPlacement, "columns", lambda *_: None)
    )
    with planted:
        return three_steps(folder, "dp2·ep2", NOT_CLIPPED | SHUFFLED, place)


def test_a_clipped_run_differs_by_the_order_of_sums(ranks, folder, tmp_path):
    plain = ranks(2, three_steps, folder, "dp2·ep2", {}, str(tmp_path / "plain"))[0]
    moved = ranks(2, three_steps, folder, "dp2·ep2", SHUFFLED, str(tmp_path / "moved"))[0]
    for (score, loss), (expected_score, expected_loss) in zip(moved[0], plain[0], strict=True):
        assert score == pytest.approx(expected_score, rel=1e-5) and loss == pytest.approx(expected_loss, rel=1e-5)


def save_and_continue(folder, root, options):
    """Two steps, a checkpoint, and two more: what they computed and the state at the checkpoint and at the end."""
    from tests.checkpoint.ranks import RankCheckpointer

    engine = training.engine(folder, "dp2·ep2", **SHUFFLED, **options)
    for number in (1, 2):
        step(engine, number)
    checkpointer = RankCheckpointer(root, training.state_of(engine))
    assert checkpointer.save(2)
    checkpointer.close()
    slots, state = dict(engine.model.experts.moved), state_by_expert(engine)
    return slots, state, [step(engine, number)[0] for number in (3, 4)], state_by_expert(engine)


def load_and_continue(folder, root, layout, overrides, going_on):
    import warnings

    from tests.checkpoint.ranks import RankCheckpointer

    engine = training.engine(folder, layout, seed=7, **overrides)
    step(engine, 10)  # other weights, moments and slots
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random states at another layout
        assert RankCheckpointer(root, training.state_of(engine)).load().step == 2
    slots, state = dict(engine.model.experts.moved), state_by_expert(engine)
    if not going_on:
        return slots, state
    return slots, state, [step(engine, number)[0] for number in (3, 4)], state_by_expert(engine)


@pytest.mark.parametrize("options", OF_ADAPTERS)
def test_checkpoints(ranks, folder, tmp_path, options):
    """A resumed run has the saved slots and continues bit for bit, clipped as it is; other layouts, and runs whose
    experts stay, load the same weights and moments into the initial slots."""
    root = str(tmp_path / "checkpoints")
    saved = ranks(2, save_and_continue, folder, root, options)[0]
    assert saved[0]
    overrides = {"trainer.seed": 42} | SHUFFLED | options
    assert ranks(2, load_and_continue, folder, root, "dp2·ep2", overrides, True)[0] == saved
    for layout, overrides in (("single", {}), ("dp2·ep2", {})):
        world = training.LAYOUTS[layout]["world"]
        slots, state = ranks(world, load_and_continue, folder, root, layout, overrides | options, False)[0]
        assert slots == {} and state == saved[1]


def killed_in_a_move(folder, root, options):
    """As :func:`save_and_continue`, but rank 1 is killed in the move after step 3, between two tensors."""
    import os
    import signal
    from unittest import mock

    import torch.distributed as dist

    from skyrl_megatron_parts.experts.moves import ExpertMoves
    from tests.checkpoint.ranks import RankCheckpointer

    engine = training.engine(folder, "dp2·ep2", **SHUFFLED, **options)
    checkpointer = RankCheckpointer(root, training.state_of(engine))
    for number in (1, 2):
        step(engine, number)
    assert checkpointer.save(2)
    checkpointer.close()
    exchange, calls = ExpertMoves._exchange, []

    def killed(*arguments, **options):
        exchange(*arguments, **options)
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(ExpertMoves, "_exchange", killed):
        step(engine, 3)


@pytest.mark.parametrize("options", OF_ADAPTERS)
def test_kill_9_in_a_move(ranks, folder, tmp_path, options):
    """The checkpoint before it is whole, and the run that continues from it is the one that was not killed."""
    saved = ranks(2, save_and_continue, folder, str(tmp_path / "whole"), options)[0]
    with pytest.raises(RankFailure):
        ranks(2, killed_in_a_move, folder, str(tmp_path / "killed"), options)
    overrides = {"trainer.seed": 42} | SHUFFLED | options
    resumed = ranks(2, load_and_continue, folder, str(tmp_path / "killed"), "dp2·ep2", overrides, True)[0]
    assert resumed == saved


def interrupted(folder, root, options):
    """A move that fails without an end of the process: what a save says, and where the peer checkpoint leads back."""
    from unittest import mock

    from skyrl_megatron.errors import CheckpointError
    from skyrl_megatron.runtime.peer_checkpoint import PeerCheckpoints
    from skyrl_megatron_parts.experts.moves import ExpertMoves
    from tests.checkpoint.ranks import RankCheckpointer

    engine, copies = training.engine(folder, "dp2·ep2", **SHUFFLED, **options), PeerCheckpoints()
    step(engine, 1)
    copies.keep(engine, 1)
    kept = dict(engine.model.experts.moved), state_by_expert(engine)
    following = step(engine, 2)[0]
    whole = dict(engine.model.experts.moved), state_by_expert(engine)
    exchange, calls = ExpertMoves._exchange, []

    def failing(*arguments, **options):
        calls.append(exchange(*arguments, **options))
        if len(calls) == 3:  # of frozen weights, if there are any, too
            raise RuntimeError("a rank is gone")

    with mock.patch.object(ExpertMoves, "_exchange", failing):
        with pytest.raises(RuntimeError):
            step(engine, 3)
    with pytest.raises(CheckpointError, match="a move of experts failed"):
        RankCheckpointer(root, training.state_of(engine)).save(3)
    copies.roll_back(engine, {})
    back = dict(engine.model.experts.moved), state_by_expert(engine)
    again = step(engine, 2)[0], (dict(engine.model.experts.moved), state_by_expert(engine))
    return kept, back, (following, whole), again


@pytest.mark.parametrize("options", OF_ADAPTERS)
def test_a_failed_move_is_not_saved_and_the_peer_checkpoint_leads_back(ranks, folder, tmp_path, options):
    kept, back, following, again = ranks(2, interrupted, folder, str(tmp_path / "checkpoints"), options)[0]
    assert kept[0] and back == kept and again == following


def balanced(folder):
    """Moves by plan: the metrics of the first step, and the imbalance of the same batch with the experts in place."""
    engine = training.engine(folder, "dp2·ep2", **AUTO, **{"trainer.policy.optimizer_config.lr": 0.0})
    first, second = (step(engine, 1)[1] for _ in range(2))
    return dict(first), dict(second)


def test_auto_moves_what_pays_back(ranks, folder):
    """With a learning rate of 0 the second step has the loads of the first, with the balance that was planned."""
    first, second = ranks(2, balanced, folder)[0]
    assert first["moe_moved_experts"] > 0 and first["moe_rank_imbalance_moved"] < first["moe_rank_imbalance"]
    assert second["moe_rank_imbalance"] == pytest.approx(first["moe_rank_imbalance_moved"], abs=1e-12)
    assert second["moe_moved_experts"] == 0
