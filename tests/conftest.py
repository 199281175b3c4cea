"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest

from tests.poison import poisoned
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of up to four Gloo ranks: `ranks.run(3, fn, **kwargs)` calls fn(rank, world, group, **kwargs) on each."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory from torch.empty and its kind holds NaN; for a whole file, pytest.mark.usefixtures("poison")."""
    with poisoned():
        yield
