"""Fixtures that all tests share; and without a GPU, Triton interprets kernels."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # to be said before anything imports Triton, as transformers does
    os.environ["TRITON_INTERPRET"] = "1"

from tests.poison import poisoned
from tests.ranks import Ranks

torch.set_num_threads(1)  # the tensors are small, and ranks run beside


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
