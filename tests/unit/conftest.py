"""Unit tests read the catalogues of tests/support/inventory: an edit of inventory/ is no edit of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rig.catalog.entries import catalogues_of
from rigctl import builder
from tests.support.plans import INVENTORY


@pytest.fixture(scope="session", autouse=True)
def without_sandbox() -> None:
    """No systemd is needed here: what others wrote is small, and the tests' own."""
    builder.unconfined()


@pytest.fixture(scope="package", autouse=True)
def own_catalogues() -> Iterator[None]:
    """For the programs that a test starts too."""
    with catalogues_of(INVENTORY):
        yield
