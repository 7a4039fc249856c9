"""The tests of this folder are of the checkout's own packages."""

import pytest

from tests.structure.source import foreign_packages


@pytest.fixture(scope="session", autouse=True)
def own_packages() -> None:
    """Fail if a package is imported from elsewhere: an editable installation of another checkout answers for a folder
    that is missing here."""
    assert not (problems := foreign_packages()), "\n".join(problems)
