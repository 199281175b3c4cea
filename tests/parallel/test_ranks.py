"""The pool of ranks itself: results, errors, deaths and time-outs come back, and the pool works again afterwards."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, Ranks, reference


def total(rank: int, world: int, group: Any, start: int) -> tuple[int, torch.Tensor]:
    x = torch.tensor([float(rank + start)])
    dist.all_reduce(x, group=group)
    return rank, x


def fails_on_last(rank: int, world: int, group: Any) -> None:
    if rank == world - 1:
        raise KeyError("the last rank says no")
    dist.barrier(group=group)  # hangs, as the last never comes


def dies(rank: int, world: int, group: Any) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group=group)


def sleeps(rank: int, world: int, group: Any) -> None:
    time.sleep(600 if rank else 0)


class OddError(Exception):
    """Pickle writes it but cannot read it."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


def raises_odd(rank: int, world: int, group: Any) -> None:
    raise OddError(1, 2)


def empty_is_nan(rank: int, world: int, group: Any) -> bool:
    return bool(torch.empty(3).isnan().all())


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results(ranks: Ranks, world: int) -> None:
    results = ranks.run(world, total, start=10)
    assert [rank for rank, _ in results] == list(range(world))
    assert all(x.item() == sum(10 + rank for rank in range(world)) for _, x in results)


def test_error_is_raised_here_with_the_traceback(ranks: Ranks) -> None:
    begin = time.monotonic()
    with pytest.raises(KeyError, match="says no") as caught:
        ranks.run(3, fails_on_last)
    assert time.monotonic() - begin < 10  # the others, who wait for the last, do not hold it up
    assert "fails_on_last" in caught.value.__notes__[0]
    assert "rank 2 of 3" in caught.value.__notes__[0]
    assert [x.item() for _, x in ranks.run(2, total, start=0)] == [1.0, 1.0]


def test_error_that_cannot_be_sent(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="raises_odd"):
        ranks.run(1, raises_odd)


@pytest.mark.slow
def test_death_and_time_out(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="code -9"):
        ranks.run(2, dies)
    with pytest.raises(RankError, match=r"no answer from ranks \[1\] of 2 after 1 s"):
        ranks.run(2, sleeps, timeout_s=1.0)
    assert len(ranks.run(4, total, start=0)) == 4


def test_wrong_use(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"1 \.\. 4"):
        ranks.run(5, total, start=0)
    with pytest.raises(ValueError, match="top level"):
        reference(lambda rank, world, group: None)


def test_ranks_are_poisoned(ranks: Ranks) -> None:
    assert ranks.run(2, empty_is_nan) == [True, True]


@pytest.mark.usefixtures("poison")
def test_poison() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.empty(2, 3, dtype=dtype)
        assert torch.empty_like(x).float().isnan().all()
        assert x.new_empty(4).float().isnan().all()
        assert x.float().isnan().all()
    assert torch.empty(0).shape == (0,)
    assert torch.empty(4, dtype=torch.int64).dtype == torch.int64
    assert not torch.zeros(3).isnan().any()
