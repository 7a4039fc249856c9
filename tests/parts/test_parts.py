"""The seam between a rank and its optional parts: when they are called, and what an error of one does."""

from tests.training import bodies

HOOKS = ("prepared", "begin_pass", "extra_loss", "plan", "end_pass", "begin_step", "updated", "end_step", "end_batch")
FAULTS = tuple(hook for hook in HOOKS if hook != "prepared")


def recording_part():
    """A class of parts that write down their calls, and raise in the hook ``fault`` on rank 1."""
    import contextlib

    import torch.distributed as dist

    from skyrl_megatron.runtime.parts import RankPart

    class Seen(RankPart):
        name = "seen"

        def __init__(self, setup):
            super().__init__(setup)
            self.calls, self.fault = [], None

        @contextlib.contextmanager
        def around(self, phase, name):
            self.calls.append(f"begin {name}")
            yield
            self.calls.append(f"end {name}")

    def hook(name):
        def called(self, *arguments):
            text = [each for each in arguments if isinstance(each, str | int)]
            self.calls.append(" ".join(map(str, [name, *text])))
            if self.fault == name and dist.get_rank() == 1:
                raise ValueError(f"a fault in {name}")
            if name == "plan":
                return arguments[2][::-1]
            return {f"seen_{name}": float(len(self.calls))} if name in ("end_pass", "updated", "end_batch") else None

        return called

    for name in HOOKS:
        setattr(Seen, name, hook(name))
    return Seen


def with_part(folder, role="policy"):
    """An engine of two ranks with the recording part, which is registered as a plugin does it."""
    from unittest import mock

    from skyrl_megatron.plugins import PARTS, register_part
    from skyrl_megatron.runtime.engine import MegatronEngine

    PARTS.all()  # imports the installed packages, whose parts stay registered
    with mock.patch.dict(PARTS._items):  # the process runs further tests
        register_part(recording_part())
        engine = MegatronEngine(bodies.config(folder, world=2), role)
    return engine, next(part for part in engine.parts if part.name == "seen")


def two_steps(folder, batch):
    engine, part = with_part(folder)
    rows = batch.select(range(engine.dp_rank, len(batch), 2))
    metrics = [engine.forward_backward(rows), engine.optim_step(more_follow=True).metrics]
    metrics += [engine.forward_backward(rows), engine.optim_step().metrics]
    part.calls.append("logprobs")
    engine.compute_logprobs(rows)
    return part.calls, [{name for name in each if name.startswith("seen_")} for each in metrics]


def test_a_part_sees_passes_and_steps(ranks, folder, batch):
    def one(number):
        return [
            *(
                "begin_pass",
                "extra_loss",
                "plan 3",
                f"begin forward_backward_{number}",
                f"end forward_backward_{number}",
                "end_pass",
            ),
            *(f"begin optim_step_{number}", "begin_step", "updated", f"end optim_step_{number}"),
            f"end_step step_{number + 1}",
        ]

    for calls, metrics in ranks(2, two_steps, folder, batch):
        assert calls == ["prepared", *one(0), *one(1), "end_batch 2", "logprobs", "plan 3"]
        assert metrics == [{"seen_end_pass"}, {"seen_updated"}, {"seen_end_pass"}, {"seen_updated", "seen_end_batch"}]


def faults(folder, batch):
    """What each hook's error on rank 1 is on this rank."""
    engine, part = with_part(folder)
    rows, messages = batch.select(range(engine.dp_rank, len(batch), 2)), {}
    for part.fault in FAULTS:
        try:
            engine.forward_backward(rows)
            engine.optim_step()
        except ValueError as error:
            messages[part.fault] = str(error)
        engine.clear_gradients()
    part.fault = None
    engine.forward_backward(rows)
    return messages, engine.optim_step().skipped


def test_a_part_that_raises_ends_all_ranks_with_its_name(ranks, folder, batch):
    for messages, skipped in ranks(2, faults, folder, batch):
        assert not skipped, "the next step is whole"
        for hook in FAULTS:
            assert messages[hook] == f"rank 1: part seen: a fault in {hook}"


def optional_parts(folder, role, overrides):
    """Names of the parts that act for a role."""
    from skyrl_megatron.runtime.engine import MegatronEngine

    cfg = bodies.config(folder, world=2, overrides=overrides)
    return [part.name for part in MegatronEngine(cfg, role).parts]


def test_a_part_acts_only_if_a_setting_asks_for_it(ranks, folder):
    profiled = {f"{bodies.MEGATRON}torch_profiler_config.enable": True}
    assert ranks(2, optional_parts, folder, "policy", {}) == [[]] * 2
    assert ranks(2, optional_parts, folder, "policy", profiled) == [["profiler"]] * 2
    assert ranks(2, optional_parts, folder, "ref", profiled) == [[]] * 2
