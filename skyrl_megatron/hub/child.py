"""The process that downloads: ``snapshot_download`` cannot be stopped from within, but a process can be ended.

Takes what to download as JSON in its only argument, and prints ``{"folder": …}`` or ``{"problem": …}``. It ends when
its standard input does, and so with the process that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl_megatron.errors import HubError
from skyrl_megatron.hub.explain import explain, silent
from skyrl_megatron.hub.names import Repo

POLL_S = 0.2


def download(
    repo: Repo, revision: str | None, files: Sequence[str], ignored: Sequence[str], stalled: Callable[[], bool]
) -> Path:
    """Return the snapshot of ``revision`` with ``files`` (patterns) in it, downloaded by a process of its own.

    ``stalled`` is asked while it works; once true, the process is ended. Raises HubError.
    """
    root = str(Path(__file__).parents[2])
    request = {"repo": [repo.kind, repo.name, repo.revision], "revision": revision}
    request |= {"files": [*files], "ignored": [*ignored]}
    process = subprocess.Popen(
        [sys.executable, "-c", f"import {__name__} as child; child.main()", json.dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"},
    )
    try:
        while True:
            try:
                process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                if stalled():
                    raise silent(repo) from None
        assert process.stdout is not None
        answer = json.loads(process.stdout.read() or "{}")
    finally:
        process.kill()
        process.communicate()
    if "folder" not in answer:
        raise HubError(answer.get("problem", f"the download of {repo.name} ended with exit code {process.returncode}"))
    return Path(answer["folder"])


def main() -> None:
    """Run in the process: download, print the answer, and leave without waiting for threads."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    request = json.loads(sys.argv[1])
    repo = Repo(*request["repo"])
    try:
        from huggingface_hub import snapshot_download

        answer = {
            "folder": snapshot_download(
                repo.name,
                repo_type=repo.kind,
                revision=request["revision"],
                allow_patterns=request["files"],
                ignore_patterns=request["ignored"],
            )
        }
    except Exception as error:
        answer = {"problem": str(explain(error, repo))}
    print(json.dumps(answer), flush=True)
    os._exit(0)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)
