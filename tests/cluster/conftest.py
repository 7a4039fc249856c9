"""What tests of whole runs on two hosts share."""

import pytest

from tests.cluster import whole_runs


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from skyrl_megatron.tiny_model import write_embedded_model

    return write_embedded_model(tmp_path_factory.mktemp("model") / "m", 42)


@pytest.fixture(scope="session")
def undisturbed(model, tmp_path_factory):
    """The metrics of four steps on one host; a function, so that a test may let something else begin before."""
    known = []

    def run():
        if not known:
            known.append(whole_runs.on_one_host(model, tmp_path_factory.mktemp("u") / "undisturbed"))
        return known[0]

    return run
