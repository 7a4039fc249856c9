"""Tests of this folder need Transformer Engine and no GPU: ``launch/run_tests.sh --te`` runs them in an environment of
their own, ``.venv-te``. The rest of the suite must have none: where it imports, Megatron takes its fused Adam, which
needs a GPU."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        missing = pytest.mark.skip(reason="Transformer Engine is not installed: launch/run_tests.sh --te")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(missing)
