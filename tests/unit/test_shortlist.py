"""When a head keeps its shortlist: where every rank has memory to spare, and where it would be short."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.cache.budget import LISTED_SHARE, affords_list
from shardwise.config import ServeConfig
from shardwise.engine import build as building
from shardwise.engine.build import Blueprint, blueprint, keep_shortlist
from shardwise.layers.embedding import listed_bytes
from tests.golden.eval import miniature


@pytest.fixture(scope="module")
def made() -> Blueprint:
    return blueprint(ServeConfig(model=str(miniature()), ranks=1, device="cpu"))


class Head:
    def __init__(self, sharp: bool) -> None:
        self.sharp, self.shortlist = sharp, None

    def make_shortlist(self) -> bool:
        self.shortlist = "made"
        return self.sharp


def kept(made: Blueprint, monkeypatch: Any, free: int, others: int = 1, sharp: bool = True, **serve: Any) -> bool:
    """With `free` bytes on this rank. others: what the least of the other ranks says."""
    monkeypatch.setattr(building, "free_bytes", lambda *_: free)
    comm, head = SimpleNamespace(minimum=lambda own: min(own, others)), Head(sharp)
    ctx = SimpleNamespace(device=torch.device("cuda"), ops=SimpleNamespace(name="triton"), comm=comm, rank=0)
    config = ServeConfig(model=str(miniature()), ranks=1, **serve)
    keep_shortlist(config, made, SimpleNamespace(head=head), ctx, 1)  # pyright: ignore[reportArgumentType]
    return head.shortlist is not None


def test_every_rank_has_memory_to_spare(made: Blueprint, monkeypatch: pytest.MonkeyPatch) -> None:
    size = listed_bytes(made.specs, made.partitions, 0)
    assert size == 2048 * (256 + 12)
    ample = int(size / LISTED_SHARE)
    assert kept(made, monkeypatch, ample)
    assert not kept(made, monkeypatch, ample - 1)
    assert not kept(made, monkeypatch, ample, others=0)
    assert not kept(made, monkeypatch, ample, sharp=False)
    assert not kept(made, monkeypatch, ample, shortlist=False)


def test_a_quantised_head_and_a_rank_without_rows_have_none() -> None:
    assert not affords_list(ServeConfig(model="m"), 1 << 40, 0)
    dummy = ServeConfig(model="benchmarks/geometry/qwen3.6-35b-a3b-nvfp4", ranks=1, load_format="dummy", device="cpu")
    coded = blueprint(dummy, planned_for="cuda")
    assert listed_bytes(coded.specs, coded.partitions, 0) == 0
