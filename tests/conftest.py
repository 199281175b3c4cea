"""Fixtures that all tests share; and without a GPU, Triton interprets kernels."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # to be said before anything imports Triton, as transformers does
    os.environ["TRITON_INTERPRET"] = "1"

from tests.interpreter import patch_once_a_launch
from tests.poison import poisoned
from tests.ranks import Ranks

patch_once_a_launch()
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


@pytest.fixture(scope="session")
def siblings(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The miniature in every quantised layout, as `shardwise quantize` writes it."""
    from shardwise.cli import LAYOUTS, main
    from tests.golden.eval import miniature

    root = tmp_path_factory.mktemp("siblings")
    for layout in LAYOUTS:
        assert main(["quantize", str(miniature()), "--to", layout, str(root / layout)]) == 0
    return {layout: root / layout for layout in LAYOUTS}
