"""Credentials of the user's environment: every actor has them, and no file of Ray."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.job import runs
from tests.support import planted

pytestmark = pytest.mark.process


@pytest.fixture
def short():
    """A folder with a short name, as Ray's sockets need it."""
    folder = Path(tempfile.mkdtemp(prefix="s-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def secrets(monkeypatch):
    """Secrets in this process's environment."""
    found = planted.secrets_of_all_names()
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def seen_by_an_actor():
    """The environment of an actor, started as ranks are, without a model."""
    import ray

    class Actor:
        def environment(self):
            return dict(os.environ)

    actor = ray.remote(Actor).remote()
    return ray.get(actor.environment.remote(), timeout=120)


def test_a_ray_of_ours_writes_none_down(secrets, short, monkeypatch):
    from skyrl_megatron.workers.ray_setup import local_ray

    monkeypatch.setenv("RAY_TMPDIR", str(short))
    with planted.arguments_watched(secrets) as in_arguments, local_ray(2):
        assert secrets.items() <= seen_by_an_actor().items()
    assert list(short.rglob("runtime_env_agent.log")), "what had them"
    assert not planted.found_in_files(secrets, [short])
    assert not in_arguments


JOINS = """
import json, os, ray
from skyrl_megatron.workers.runtime_env import joined_environment
from skyrl_megatron.workers.ray_setup import join
from tests.job.test_secrets import seen_by_an_actor
join(os.environ["RAY_ADDRESS"], joined_environment())
print(json.dumps(seen_by_an_actor()))
"""


def test_a_cluster_that_is_joined_writes_none_down(tmp_path, short, monkeypatch):
    secrets = planted.secrets_of_all_names()
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    with runs.cluster(tmp_path) as joining, planted.arguments_watched(secrets) as in_arguments:
        variables = runs.environment(tmp_path) | joining | secrets
        joined = subprocess.run(
            [sys.executable, "-c", JOINS], env=variables, capture_output=True, text=True, timeout=300
        )
        assert list(short.rglob("runtime_env_agent.log")), "what had them"
        left = planted.found_in_files(secrets, [short])
    assert joined.returncode == 0, joined.stderr
    del secrets["AWS_SECRET_ACCESS_KEY"]  # not forwarded
    assert secrets.items() <= json.loads(joined.stdout.splitlines()[-1]).items()
    assert not left
    assert not in_arguments
