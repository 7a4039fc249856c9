"""Bodies of the tests of several adapters trained together, each against a run that trains it alone."""

import contextlib
import hashlib
from unittest import mock

import numpy as np

from tests.lora import bodies

NAMES = ("math", "code")
OWN = {
    "math": {},
    "code": {"lr": 3e-3, "max_grad_norm": 0.02, "scheduler": "cosine", "num_decay_steps": 5, "alpha": 20},
}
WHERE = {"lr": "trainer.policy.optimizer_config.", "alpha": bodies.LORA}
"""Sections of an adapter's settings, in a run of its own."""
STEPS = 3


def engine_of(folder, layout, names, overrides):
    """An engine with the adapters ``names``; of one in a string, as a run that has no other."""
    from skyrl_megatron.runtime.engine import MegatronEngine
    from tests.training.bodies import config

    if isinstance(names, str):
        own = {f"{WHERE.get(key, WHERE['lr'])}{key}": value for key, value in OWN[names].items()}
    else:
        own = {f"{bodies.LORA}adapters": {name: OWN[name] for name in names}}
    return MegatronEngine(config(folder, **layout, overrides=bodies.KEYS | own | overrides))


def share(engine, batch, names=NAMES):
    """This replica's rows: those of each adapter are split over the replicas as if there were no others."""
    from skyrl_megatron.data.splitting import rows_by_adapter, split_for_dp

    own = [
        rows[split_for_dp(engine.flops.forward(batch.lengths[rows]), engine.dp_size)[engine.dp_rank]]
        for rows in rows_by_adapter(batch, names).values()
        if len(rows)
    ]
    return batch.select(np.sort(np.concatenate(own)))


def tagged(batch, labels):
    """The batch with its rows' adapters, e.g. ``mcmmc``."""
    import dataclasses

    full = {name[0]: name for name in NAMES}
    return dataclasses.replace(batch, adapters=[full[letter] for letter in labels])


def held(engine):
    """Digests of the factors of the adapter that is set, its optimizer state, schedule, gradient norm and counts."""
    from skyrl_megatron.runtime.checkpoint import rank_files as rng
    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges, step_count
    from tests.checkpoint.training import digest

    names = {id(factor.tensor): factor.name for factor in engine.adapters.factors()}
    found = {factor.name: digest(factor.tensor) for factor in engine.adapters.factors()}
    for each in owned_ranges(engine.optimizer):
        found |= {f"{names[id(each.parameter)]} {key}": digest(value) for key, value in each.tensors.items()}
    counts = dict(steps=engine.steps, adam=step_count(engine.optimizer), schedule=engine.lr_schedule.num_steps)
    return found | counts | {"random": hashlib.sha256(rng.capture_rng()).hexdigest()}


def train(engine, batches):
    """Steps on this replica's rows of each batch; what was measured of each adapter."""
    seen = {}
    for batch in batches:
        metrics = engine.forward_backward(batch)
        result = engine.optim_step()
        for name, own in (result.adapters or {"": result}).items():
            loss = metrics[f"adapter/{name}/final_loss" if name else "final_loss"]
            seen.setdefault(name, []).append((loss, own.grad_norm, own.learning_rate))
    return seen


def together(folder, batch, labels, layout, overrides, fault=None):
    """Adapter → (what it holds, what was measured) after steps in which all of them take part, as ``labels`` say of
    each step's rows; and log-probs of the rows under adapters and base."""
    engine = engine_of(folder, layout, NAMES, overrides)
    with planted(fault, engine):
        parts = [share(engine, tagged(batch, step)) for step in labels]
        seen = train(engine, parts)
    first = parts[0] if parts else share(engine, tagged(batch, "mcmcmcm"))
    scores = [engine.compute_logprobs(first, adapters=adapters) for adapters in (True, False)]
    found = {}
    for name in NAMES:
        engine.set_adapter(name)
        found[name] = held(engine), seen.get(name, []), rows_of(first, scores, name)
    return found


def rows_of(part, scores, name):
    rows = np.asarray([row for row, adapter in enumerate(part.adapters) if adapter == name], dtype=np.int64)
    return [part.responses.select(score, rows).tolist() for score in scores]


def alone(folder, batch, labels, layout, overrides, name):
    """The same of one adapter, in a run that has no other and sees the rows of its own alone."""
    engine = engine_of(folder, layout, name, overrides)
    parts = [share(engine, tagged(batch, step)) for step in labels]
    mine = [part.select([row for row, each in enumerate(part.adapters) if each == name]) for part in parts]
    for part in mine:
        part.adapters = []
    seen = train(engine, [part for part in mine if len(part)])
    scores = [engine.compute_logprobs(mine[0], adapters=adapters).tolist() for adapters in (True, False)]
    return held(engine), seen.get("", []), scores


def checkpointer(engine, root):
    """Every adapter of an engine in a folder of its own; of a run with one that has no name, in the policy's."""
    from functools import partial

    from skyrl_megatron.config.roles import role_part
    from skyrl_megatron.runtime.checkpoint.rank_files import RankState
    from tests.checkpoint.ranks import RankCheckpointer

    def state(name):
        engine.set_adapter(name)
        return RankState(engine.chunks, engine.groups, engine.optimizer, engine.lr_schedule, engine.base)

    return RankCheckpointer(root, {role_part("policy", name): partial(state, name) for name in engine.adapter_names})


def saved(folder, batch, labels, layout, overrides, root):
    """The first step, a checkpoint, and what follows: adapter → state at the end."""
    engine = engine_of(folder, layout, NAMES, overrides)
    parts = [share(engine, tagged(batch, step)) for step in labels]
    train(engine, parts[:1])
    saver = checkpointer(engine, root)
    assert saver.save(1)
    saver.close()
    train(engine, parts[1:])
    return states(engine)


def states(engine):
    found = {}
    for name in engine.adapter_names:
        engine.set_adapter(name)
        found[name] = held(engine)
    return found


def resumed(folder, batch, labels, layout, overrides, root, names=NAMES):
    """The same from the checkpoint on, in an engine that has trained on something else. ``names``: of the run."""
    engine = engine_of(folder, layout, names, overrides)
    parts = [share(engine, tagged(batch, step)) for step in labels]
    parts = [part.select([row for row, name in enumerate(part.adapters) if name in names]) for part in parts]
    train(engine, parts[1:2])
    assert checkpointer(engine, root).load().step == 1
    for trained in engine._trained.values():
        trained.steps = 1  # what an engine counts is its own
    train(engine, parts[1:])
    return states(engine)


def loaded(folder, layout, overrides, root, name, names):
    """What one adapter holds when its folder of the checkpoint is read: in an engine of several, or (``names`` a
    string) in a run that knows no names."""
    from skyrl_megatron.runtime.checkpoint.rank_files import RankState, read_rank

    engine = engine_of(folder, layout, names, overrides)
    engine.set_adapter("" if isinstance(names, str) else name)
    state = RankState(engine.chunks, engine.groups, engine.optimizer, engine.lr_schedule, engine.base)
    read_rank(f"{root}/global_step_1", f"policy/{name}", state, seed=0)
    return held(engine)


def misnamed(folder, root):
    """The error of a run without names that continues from a checkpoint with names."""
    from skyrl_megatron.errors import CheckpointError

    engine = engine_of(folder, {}, "math", {})
    try:
        checkpointer(engine, root).load("from_path", f"{root}/global_step_1")
    except CheckpointError as error:
        return str(error)


def exported(folder, batch, labels, out):
    """Adapter → digests of its factors, after steps; both are written as PEFT folders."""
    from skyrl_megatron_lora.folder import save_adapter

    engine = engine_of(folder, {}, NAMES, {})
    train(engine, [tagged(batch, step) for step in labels])
    found = {}
    for name in NAMES:
        engine.set_adapter(name)
        save_adapter(engine.adapters, engine.groups, f"{out}/{name}")
        found[name] = factors(engine)
    return found


def imported(folder, name, out):
    """The same of a run that has one adapter without a name, from its PEFT folder."""
    from skyrl_megatron_lora.folder import load_adapter

    engine = engine_of(folder, {}, name, {})
    load_adapter(engine.adapters, engine.groups, f"{out}/{name}")
    return factors(engine)


def factors(engine):
    from tests.checkpoint.training import digest

    return {factor.name: digest(factor.tensor) for factor in engine.adapters.factors()}


def refused(folder, batch, names):
    """Messages of batches that name adapters which are not there, and the adapters that step on one without names."""
    import dataclasses

    engine = engine_of(folder, {}, names, {})
    messages = []
    wrong = tagged(batch, "mcmcmmc")
    wrong.adapters[3] = "poetry"
    for work in (engine.forward_backward, engine.compute_logprobs):
        try:
            work(wrong)
        except ValueError as error:
            messages.append(str(error))
    engine.forward_backward(dataclasses.replace(batch, adapters=[]))
    return messages, list(engine.optim_step().adapters)


def away_and_back(folder, batch, labels, leaves):
    """States after steps; ``leaves``: behind each, all memory leaves the device."""
    engine = engine_of(folder, {}, NAMES, {})
    for step in labels:
        train(engine, [tagged(batch, step)])
        if leaves:
            engine.offload()
            every = [factor for each in engine._trained.values() for factor in each.adapters.factors()]
            assert len(every) > 30 and not any(factor.tensor.untyped_storage().nbytes() for factor in every)
    engine.onload()
    return states(engine)


@contextlib.contextmanager
def planted(fault, engine):
    """Run with a mistake that a trainer of several adapters can make."""
    from skyrl_megatron.runtime import engine as module

    if fault is None:
        yield
    elif fault == "clipped by the joint norm":
        real = module.step_if_finite

        def joint(optimizer, schedule, chunks):
            norms = []
            for trained in engine._trained.values():
                trained.optimizer.prepare_grads()
                norms.append(float(trained.optimizer.get_grad_norm()))
            with mock.patch.object(type(optimizer), "get_grad_norm", lambda self: sum(n * n for n in norms) ** 0.5):
                return real(optimizer, schedule, chunks)

        with mock.patch.object(module, "step_if_finite", joint):
            yield
    elif fault == "loss over the rows of all":
        real = engine.step_totals
        whole = {}

        def totals(part, objective=None):
            return whole["batch"] if "batch" in whole else real(part, objective)

        backward = engine.forward_backward

        def forward_backward(part, **options):
            whole.clear()
            whole["batch"] = real(part)
            return backward(part, **options)

        with (
            mock.patch.object(engine, "step_totals", totals),
            mock.patch.object(engine, "forward_backward", forward_backward),
        ):
            yield
    elif fault == "one stream of random numbers":
        from skyrl_megatron.runtime import optimizer as trained

        with mock.patch.object(trained.rng, "restore", lambda states: None):
            yield
    else:
        raise KeyError(fault)
