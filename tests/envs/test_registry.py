"""Registration, tools, and the pool in which environments run."""

import asyncio
import threading
import time

import pytest

from skyrl_megatron import envs
from skyrl_megatron.envs import BaseTextEnv, BaseTextEnvStepOutput, ToolGroup, tool
from skyrl_megatron.envs.env_pool import EnvPool, EnvTimeout
from skyrl_megatron.errors import DataError


class Echo(BaseTextEnv):
    def __init__(self, env_config, extras, greeting="hello"):
        super().__init__()
        self.greeting = greeting

    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={"said": action})


@pytest.fixture
def registered():
    ids = []

    def add(id, *args, **kwargs):
        envs.register(id, *args, **kwargs)
        ids.append(id)

    yield add
    for id in set(ids):
        envs.deregister(id)


def test_register_and_make(registered):
    registered("echo", f"{__name__}:Echo", kwargs={"greeting": "good day"})
    registered("echo", f"{__name__}:Echo", kwargs={"greeting": "good day"})  # again, as scripts do
    assert envs.make("echo").greeting == "good day" and envs.make("echo", greeting="hi").greeting == "hi"
    with pytest.raises(DataError, match=r"'echo' is registered already \(.*:Echo\): .*override=True"):
        envs.register("echo", Echo)
    registered("echo", Echo, override=True, kwargs={"greeting": "welcome"})
    assert envs.make("echo").greeting == "welcome"
    registered("echo-2", Echo)
    assert envs.make("echo-2", extras={}).step("x")["metadata"] == {"said": "x"}
    assert {"echo", "echo-2", "gsm8k", "search"} <= set(envs.registered())


def test_one_that_comes_with_the_package_is_replaced_on_purpose_only():
    """A user's environment often has the id of one of ours: ``multiply`` is the field's usual first example."""
    ours = envs.spec("multiply")
    with pytest.raises(DataError, match=r"'multiply' is built in .*register\(.*, override=True\)"):
        envs.register(id="multiply", entry_point=f"{__name__}:Echo")
    assert envs.spec("multiply") == ours
    try:
        envs.register(id="multiply", entry_point=f"{__name__}:Echo", override=True)
        assert type(envs.make("multiply")).__name__ == "Echo"
    finally:
        envs.register(ours.id, ours.entry_point, override=True)
    assert envs.spec("multiply") == ours


@pytest.mark.around
def test_a_script_replaces_what_a_plugin_registers_later(monkeypatch):
    """Plugins are loaded at the first unknown id, which may be after the script's own registrations."""
    from skyrl_megatron.envs import base_text_env

    search = envs.spec("search")
    monkeypatch.setattr(base_text_env, "_registry", {})
    envs.register("search", Echo, override=True)
    envs.register(search.id, search.entry_point)
    assert envs.spec("search").entry_point is Echo
    monkeypatch.setattr(base_text_env, "_registry", {})
    envs.register("search", Echo)
    with pytest.raises(DataError, match=r"'search' is built in \(skyrl_megatron_agents.*override=True"):
        envs.register(search.id, search.entry_point)


def test_mistakes_are_named(registered):
    with pytest.raises(DataError, match=r"no environment 'none': register it .* one of \['addition', 'aime'"):
        envs.make("none")
    with pytest.raises(DataError, match="no environment 'none'"):
        envs.deregister("none")
    for number, point in enumerate(("nowhere:Env", "json:Missing", "json")):
        registered(f"lost-{number}", point)
        with pytest.raises(DataError, match=f"entry point {point!r} cannot be loaded .* module:Class"):
            envs.make(f"lost-{number}")
    registered("dict", dict)
    with pytest.raises(DataError, match="environment 'dict': dict has no init, step, close: derive from"):
        envs.make("dict")


def test_the_documented_environment_works(registered):
    """A subclass that overrides step alone finds its answer in ``ground_truth``."""
    import re

    class Documented(BaseTextEnv):
        def step(self, action: str) -> BaseTextEnvStepOutput:
            found = re.search(r"\\boxed\{([^}]+)\}", action)
            answer = found.group(1) if found else None
            correct = answer is not None and answer.strip() == str(self.ground_truth).strip()
            return BaseTextEnvStepOutput(observations=[], reward=float(correct), done=True, metadata={"a": answer})

    registered("documented", Documented)
    made = envs.make("documented", env_config={}, extras={"reward_spec": {"method": "rule", "ground_truth": 6}})
    assert made.init([{"role": "user", "content": "2 * 3"}]) == ([{"role": "user", "content": "2 * 3"}], {})
    assert made.step("\\boxed{6}")["reward"] == 1.0
    assert made.aggregate_metrics([{"a": 1, "b": True}, {"a": 2, "c": "text"}]) == {"a": 1.5, "b": 1.0}


def test_tools_share_the_state_of_their_group():
    class Counter(ToolGroup):
        def __init__(self):
            self.count = 0
            super().__init__("counter")

        @tool
        def add(self, amount):
            """Adds."""
            self.count += amount
            return self.count

    group = Counter()
    assert group.get_tool_names() == ["add"] and group.get_tool_to_group_mapping() == {"add": "counter"}
    made = BaseTextEnv()
    made.init_tool_groups([group])
    assert made.tool_to_toolgroup == {"add": "counter"}
    assert [made._execute_tool("counter", "add", [2]), made._execute_tool("counter", "add", (3,))] == [2, 5]
    assert group.get_tool("none") is None and group.add(1) == 6
    with pytest.raises(ValueError, match="no tool group 'other'"):
        made._execute_tool("other", "add", [1])
    with pytest.raises(ValueError, match="has no tool 'sub'"):
        made._execute_tool("counter", "sub", [1])


# ------------------------------------------------------- the pool
def test_pool_is_bounded_and_gives_results_and_errors():
    running, most, lock = 0, 0, threading.Lock()

    def work(i):
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.01)
        with lock:
            running -= 1
        if i % 3 == 0:
            raise KeyError(i) if i else StopIteration(i)
        return i

    async def main(pool):
        return await asyncio.gather(*(pool.run(work, i) for i in range(20)), return_exceptions=True)

    pool = EnvPool(3, timeout_s=30)
    for _ in range(2):  # also in another event loop
        found = asyncio.run(main(pool))
        assert [r for r in found if isinstance(r, int)] == [i for i in range(20) if i % 3]
        assert [type(r) for r in found if not isinstance(r, int)] == [RuntimeError] + [KeyError] * 6
    assert most == 3 and pool.abandoned == 0
    before = threading.active_count()
    pool.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > before - 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before - 3


def test_pool_gives_up_on_calls_that_hang():
    """Waiting for a thread does not count; hanging calls do not use up the pool."""
    release = threading.Event()

    async def main():
        pool = EnvPool(2, timeout_s=1.0)
        hung = [asyncio.create_task(pool.run(release.wait)) for _ in range(6)]
        slow = [asyncio.create_task(pool.run(time.sleep, 0.05)) for _ in range(10)]
        quick = asyncio.create_task(pool.run(lambda: 7))
        found = await asyncio.gather(*hung, *slow, quick, return_exceptions=True)
        return pool, found

    pool, found = asyncio.run(main())
    release.set()
    assert all(isinstance(error, EnvTimeout) for error in found[:6]) and found[6:] == [None] * 10 + [7]
    assert pool.abandoned == 6
