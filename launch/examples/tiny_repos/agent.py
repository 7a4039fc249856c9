"""An agent that repairs one function: an ordinary program with OpenAI's client, which knows nothing of training.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… AGENT_MODEL=… python agent.py TASK

It shows the model the function that TASK names, and puts the line that the model answers there.
"""

import os
import re
import sys
from pathlib import Path

from openai import OpenAI

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


def main(task: str) -> None:
    """Work on a task in the current folder."""
    named = TASK.search(task)
    assert named is not None, task
    name, module = named.groups()
    path, client = Path(f"{module}.py"), OpenAI()
    source = path.read_text()
    answer = client.chat.completions.create(
        model=os.environ["AGENT_MODEL"], messages=[{"role": "user", "content": task + shown(source, name)}]
    )
    line = (answer.choices[0].message.content or "").strip().partition("\n")[0]
    path.write_text(repaired(source, name, line))


if __name__ == "__main__":
    main(sys.argv[1])
