"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest

from tests.poison import poisoned
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of up to four Gloo ranks: `ranks.run(3, fn, **kwargs)` gives the results of fn(rank, world, group, ...)."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory from torch.empty and its kind holds NaN. For a whole file: pytestmark = pytest.mark.usefixtures("poison")."""
    with poisoned():
        yield
