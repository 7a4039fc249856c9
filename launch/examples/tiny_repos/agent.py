"""An agent that repairs one function: an ordinary program with OpenAI's client, which knows nothing of training.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… AGENT_MODEL=… python agent.py TASK

It shows the model the function that TASK names, puts the line that the model answers there, tries the example of the
task, and asks once more if the result is wrong.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

TRIES = 2
TASK = re.compile(r"the function (\w+) in (\w+)\.py: (.*) must return (.*)\.")
SHOW = "import json, sys; sys.path.insert(0, '.'); from {module} import *; print(repr({call}))"


def repaired(source: str, name: str, line: str) -> str:
    """Return the module's text with one line as the function's body. A function that is missing takes ``values``."""
    body = f"    {line}\n"
    head = re.search(rf"^def {name}\(.*\):\n", source, re.MULTILINE)
    if head is None:
        return f"{source}\n\ndef {name}(values):\n{body}"
    return source[: head.end()] + re.sub(r"\A(    .*\n)*", lambda _: body, source[head.end() :])


def shown(source: str, name: str) -> str:
    """Return the function as it is."""
    found = re.search(rf"^def {name}\(.*\):\n(    .*\n)*", source, re.MULTILINE)
    return found[0] if found else ""


def result(module: str, call: str) -> str:
    """Return what the task's example comes to now: a value, or the name of an error."""
    words = [sys.executable, "-I", "-S", "-c", SHOW.format(module=module, call=call)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2].partition(":")[0]


def main(task: str) -> None:
    """Work on a task in the current folder."""
    named = TASK.search(task)
    assert named is not None, task
    name, module, call, wanted = named.groups()
    path, client = Path(f"{module}.py"), OpenAI()
    source = path.read_text()
    messages: list[Any] = [{"role": "user", "content": task + shown(source, name)}]
    for _ in range(TRIES):
        answer = client.chat.completions.create(model=os.environ["AGENT_MODEL"], messages=messages)
        message = answer.choices[0].message
        line = (message.content or "").strip().partition("\n")[0]
        path.write_text(repaired(source, name, line))
        found = result(module, call)
        print(json.dumps({"line": line, "result": found}))
        if found == wanted:
            return
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": f"It is {found}."}]


if __name__ == "__main__":
    main(sys.argv[1])
