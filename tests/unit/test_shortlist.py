"""When a head keeps its shortlist: where every rank has memory to spare, and where it would be short."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.cache.budget import LISTED_SHARE, affords_list
from shardwise.config import ServeConfig
from shardwise.engine.build import Blueprint, blueprint
from shardwise.engine.memory import keep_shortlist
from shardwise.layers.embedding import listed_bytes
from shardwise.parallel.choice import RESERVE_BYTES
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


def kept(made: Blueprint, left: int, others: int = 1, sharp: bool = True, slotted: bool = False, **serve: Any) -> bool:
    """With `left` bytes on this rank beside the reserve. others: what the least of the other ranks says."""
    comm = SimpleNamespace(minimum=lambda own: min(own, others))
    ctx: Any = SimpleNamespace(device=torch.device("cpu"), comm=comm, rank=0, partitions=made.partitions)
    head: Any = Head(sharp)
    config = ServeConfig(model=str(miniature()), ranks=1, **serve)
    keep_shortlist(config, made.specs, head, ctx, left + RESERVE_BYTES, slotted)
    return head.shortlist is not None


def test_every_rank_has_memory_to_spare(made: Blueprint) -> None:
    size = listed_bytes(made.specs, made.partitions, 0)
    assert size == 2048 * (256 + 12)
    ample = int(size / LISTED_SHARE)
    assert kept(made, ample)
    assert not kept(made, ample - 1)
    assert not kept(made, ample, others=0)
    assert not kept(made, ample, sharp=False)
    assert not kept(made, ample, slotted=True)
    assert not kept(made, ample, shortlist=False)
    assert not kept(made, ample, kernels="reference")


def test_a_quantised_head_and_a_rank_without_rows_have_none() -> None:
    assert not affords_list(ServeConfig(model="m"), 1 << 40, 0, slotted=False)
    dummy = ServeConfig(model="benchmarks/geometry/qwen3.6-35b-a3b-nvfp4", ranks=1, load_format="dummy", device="cpu")
    coded = blueprint(dummy, planned_for="cuda")
    assert listed_bytes(coded.specs, coded.partitions, 0) == 0
