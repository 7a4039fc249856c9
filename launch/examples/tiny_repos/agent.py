"""An agent that repairs one function: an ordinary program that calls OpenAI's API and knows nothing of training.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… AGENT_MODEL=… python agent.py TASK

It shows the model the function that TASK names, and puts the line that the model answers there. It needs Python only:
the import of OpenAI's client takes five times as long as everything else in an attempt.
"""

import json
import os
import re
import sys
import urllib.request
from pathlib import Path

TASK = re.compile(r"the function (\w+) in (\w+)\.py")


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


def answered(text: str) -> str:
    """Return what the model answers to a message (Chat Completions)."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ["AGENT_MODEL"], "messages": [{"role": "user", "content": text}]}).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=100) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


def main(task: str) -> None:
    """Work on a task in the current folder."""
    named = TASK.search(task)
    assert named is not None, task
    name, module = named.groups()
    path = Path(f"{module}.py")
    source = path.read_text()
    line = answered(task + shown(source, name)).strip().partition("\n")[0]
    path.write_text(repaired(source, name, line))


if __name__ == "__main__":
    main(sys.argv[1])
