"""The tests of this folder are of the checkout's own packages, whose files they parse once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure import source


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs them, so that no second one parses all files."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("structure"))


@pytest.fixture(scope="session", autouse=True)
def own_packages() -> None:
    """Fail if a package is imported from elsewhere: an editable installation of another checkout answers for a folder
    that is missing here."""
    assert not (problems := source.foreign_packages()), "\n".join(problems)


@pytest.fixture(scope="package", autouse=True)
def trees() -> Iterator[None]:
    """Free the trees after these tests: millions of objects, which every garbage collection would visit."""
    yield
    source.modules.cache_clear()
    source.import_statements.cache_clear()
