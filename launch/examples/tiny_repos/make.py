"""Tiny repositories for agents: each has a few functions, one of them wrong or missing, a task text, and hidden tests.

    python launch/examples/tiny_repos/make.py OUT [--seed 0] [--count 20] [--try]

writes one folder per task, as ``skyrl_megatron_agents.task.read_task`` reads it, with the repository's right
version in ``solution/``. The same seed gives the same files. ``--try`` shows that the tests can tell: in sandboxes, an
agent that does nothing solves no task and one that copies the solution solves each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THINGS = ("apple", "boat", "card", "door", "egg", "flag", "gate", "hat", "ink", "jar", "key", "lamp", "map", "net")
PLACES = ("shop", "farm", "port", "mill", "school", "garden", "bakery", "museum", "station", "library")
CASES = 6
"""Hidden calls per task, besides the one that the task text shows."""
RUN = '''"""Call the function with each case and print the results. What is right is not known here."""

import importlib
import json
import os
import sys

results = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the repository prints is no result
sys.path.insert(0, os.getcwd())
plan = json.load(open("/tests/cases.json"))
function = getattr(importlib.import_module(plan["module"]), plan["function"])
for arguments in plan["cases"]:
    try:
        line = json.dumps(function(*arguments))
    except Exception as error:
        line = type(error).__name__
    print(line, file=results, flush=True)
'''
SETTINGS = """[tests]
command = ["python3", "-I", "/tests/run.py"]
expected = true
timeout_s = 20

[agent]
timeout_s = 120

[sandbox]
memory = 268435456
disk = 67108864
processes = 64
"""


@dataclass(frozen=True)
class Kind:
    """A kind of bug: the right body of a function and a wrong one, and arguments for it.

    ``{n}`` in a body is a small number, drawn for each task. ``wrong`` = "" leaves the function out.
    """

    name: str
    parameters: str
    right: str
    wrong: str
    draw: Callable[[random.Random], Sequence[Any]]


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(1, 9) for _ in range(rng.randint(2, 5))]


KINDS = (
    Kind("cost_of", "price, count", "return price * count", "return price + count", lambda r: _two(r)),
    Kind("left_of", "start, used", "return start - used", "return used - start", lambda r: _two(r)),
    Kind("sum_of", "values", "return sum(values)", "return sum(values[1:])", lambda r: [_numbers(r)]),
    Kind("last_of", "values", "return values[-1]", "return values[0]", lambda r: [_numbers(r)]),
    Kind("most_of", "values", "return max(values)", "return min(values)", lambda r: [_numbers(r)]),
    Kind("is_full", "used", "return used >= {n}", "return used > {n}", lambda r: [r.randint(2, 9)]),
    Kind("with_fee", "price", "return price + {n}", "return price", lambda r: [r.randint(1, 30)]),
    Kind("label_of", "name", "return name.upper()", "return name.lower()", lambda r: [_mixed(r)]),
    Kind(
        "count_up", "end", "return list(range(1, end + 1))", "return list(range(1, end))", lambda r: [r.randint(2, 8)]
    ),
    Kind("turned", "values", "return values[::-1]", "", lambda r: [_numbers(r)]),
)


def _two(rng: random.Random) -> list[int]:
    return [rng.randint(3, 9), rng.randint(1, 9)]


def _mixed(rng: random.Random) -> str:
    return "".join(rng.choice((str.upper, str.lower))(letter) for letter in rng.choice(THINGS)) + "Ab"


@dataclass(frozen=True)
class Repository:
    """A task before it is written: file name → text of the broken and of the right version."""

    name: str
    text: str
    module: str
    function: str
    files: dict[str, str]
    solution: dict[str, str]
    cases: list[list[Any]]
    expected: str


def repositories(seed: int, count: int) -> list[Repository]:
    """Return ``count`` different repositories. Kinds take turns."""
    rng = random.Random(seed)
    places = [f"{place}_{thing}" for place in PLACES for thing in THINGS]
    rng.shuffle(places)
    if count > len(places):
        raise SystemExit(f"--count {count}: at most {len(places)}")
    return [_repository(rng, KINDS[number % len(KINDS)], module) for number, module in enumerate(places[:count])]


def _repository(rng: random.Random, kind: Kind, module: str) -> Repository:
    number = str(rng.randint(3, 7))
    function = f"{kind.name}_{module.split('_')[1]}s"
    others = rng.sample([each for each in KINDS if each is not kind], 2)
    parts = [(each.name, each.parameters, each.right, each.right) for each in others]
    parts.insert(rng.randint(0, 2), (function, kind.parameters, kind.wrong, kind.right))
    broken, solution = (
        "\n\n".join(_function(name, parameters, body[at], number) for name, parameters, *body in parts if body[at])
        for at in (0, 1)
    )
    cases = _cases(rng, kind, broken, solution, function)
    results = [_call(solution, function, case) for case in cases]
    shown = f"{function}({', '.join(repr(each) for each in cases[0])})"
    verb = "Fix" if kind.wrong else "Write"
    readme = f"# {module}\n\nFunctions of a {module.replace('_', ' ')}. See `{module}.py`.\n"
    return Repository(
        name=f"{module}-{kind.name}",
        text=f"{verb} the function {function} in {module}.py: {shown} must return {results[0]!r}.\n",
        module=module,
        function=function,
        files={f"{module}.py": broken, "README.md": readme},
        solution={f"{module}.py": solution},
        cases=cases,
        expected="".join(f"{json.dumps(result)}\n" for result in results),
    )


def _function(name: str, parameters: str, body: str, number: str) -> str:
    return f"def {name}({parameters}):\n    {body.replace('{n}', number)}\n"


def _cases(rng: random.Random, kind: Kind, broken: str, solution: str, function: str) -> list[list[Any]]:
    """Return calls of which the first, which the task text shows, differs between the two versions."""
    cases: list[list[Any]] = []
    while len(cases) <= CASES:
        case = list(kind.draw(rng))
        if cases or not kind.wrong or _call(broken, function, case) != _call(solution, function, case):
            cases.append(case)
    return cases


def _call(source: str, function: str, arguments: list[Any]) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)  # text of this file
    return names[function](*arguments)


def write(repository: Repository, folder: Path) -> None:
    """Write a task's folder."""
    plan = {"module": repository.module, "function": repository.function, "cases": repository.cases}
    files = {
        "task.md": repository.text,
        "task.toml": SETTINGS,
        "expected.txt": repository.expected,
        "tests/run.py": RUN,
        "tests/cases.json": json.dumps(plan),
        **{f"files/{name}": text for name, text in repository.files.items()},
        **{f"solution/{name}": text for name, text in repository.solution.items()},
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def try_all(folders: Sequence[Path]) -> list[tuple[str, str, str]]:
    """Return of each task its name and the outcomes of an agent that does nothing and of one that has the solution."""
    from skyrl_megatron_agents.attempt import AgentCommand, attempt
    from skyrl_megatron_agents.sandboxes.sandbox_queue import SandboxQueue, make_provider
    from skyrl_megatron_agents.task import read_task

    provider = make_provider("namespaces")
    queue = SandboxQueue(provider, at_once=2)

    async def outcomes(folder: Path) -> tuple[str, str, str]:
        copy = AgentCommand(["sh", "-c", "cp -r /solution/. ."], mounts={"/solution": folder / "solution"})
        tried = [await attempt(read_task(folder), agent, queue) for agent in (AgentCommand(["true"]), copy)]
        return folder.name, tried[0].outcome, tried[1].outcome

    try:
        return list(await asyncio.gather(*map(outcomes, folders)))
    finally:
        await provider.close()


def main(words: Sequence[str] | None = None) -> int:
    """Write the tasks; return 1 if ``--try`` finds a task whose tests cannot tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--try", action="store_true", dest="tried", help="run two trivial agents on each task")
    given = parser.parse_args(words)
    made = repositories(given.seed, given.count)
    for repository in made:
        shutil.rmtree(given.out / repository.name, ignore_errors=True)
        write(repository, given.out / repository.name)
    print(f"{len(made)} tasks in {given.out}")
    if not given.tried:
        return 0
    outcomes = asyncio.run(try_all([given.out / repository.name for repository in made]))
    for name, nothing, solution in outcomes:
        print(f"{name:32} nothing: {nothing:8} solution: {solution}")
    return int(any(outcome[1:] != ("failed", "solved") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
