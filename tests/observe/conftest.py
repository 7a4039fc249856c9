"""A made run, and a browser to look at it; without a Chromium those tests are skipped."""

import pytest


@pytest.fixture(scope="package")
def made(tmp_path_factory):
    from tests.observe.made_run import write_run

    return write_run(tmp_path_factory.mktemp("made"), 40)


@pytest.fixture(scope="package")
def page():
    from tests.support.browser import browser, chromium

    command = chromium()
    if command is None:
        pytest.skip("no Chromium on this machine: launch/setup.sh ci installs it")
    with browser(command) as page:
        yield page


@pytest.fixture
def quiet(page):
    """The page; its scripts must have complained of nothing at the end of the test."""
    page.errors.clear()
    page.size(1280)
    yield page
    assert not page.errors
