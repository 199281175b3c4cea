"""How many threads a rank on CPUs takes: more than its share of cores makes every operation wait."""

import os

import pytest
import torch

from shardwise.config import RankEnvironment, ServeConfig, launcher_environment, rank_threads
from shardwise.engine.place import place


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (16, 1, 15), (16, 4, 3)])
def test_ranks_share_all_cores_but_one(cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert rank_threads(ranks) == threads
    assert launcher_environment(ranks)["OMP_NUM_THREADS"] == str(threads)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert launcher_environment(ranks)["OMP_NUM_THREADS"] == "2"


def test_a_rank_keeps_the_fewer_threads_that_the_user_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert torch.get_num_threads() == 1, "see conftest.py"
    assert place(ServeConfig(model="m"), RankEnvironment(0, 1, 0, 1, 0), "cpu").type == "cpu"
    assert torch.get_num_threads() == 1
