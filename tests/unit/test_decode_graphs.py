"""Which graph a decode step takes, and that it gives what the step itself gives; a graph here is a step run anew."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine import graphs as decode
from shardwise.engine.build import Rank, build_rank
from shardwise.engine.plan import Chunk
from shardwise.engine.sampler import LISTED
from shardwise.parallel.comm import Alone
from tests.golden.eval import miniature

PROMPTS = [Chunk(row, 0, 20 + row, list(range(row, 20 + 2 * row)), [row], True) for row in (1, 2, 3)]
STEP = [Chunk(row, 20 + row, 1, [40 + row], [], True) for row in (1, 2, 3)]


@pytest.fixture(scope="module")
def rank() -> Rank:
    serve = ServeConfig(
        model=str(miniature()), ranks=1, device="cpu", dtype="float32", max_model_len=256, max_num_seqs=6
    )
    return build_rank(serve, RankEnvironment(0, 1, 0, 1, 0), Alone())


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(step: Callable[[], torch.Tensor], pool: Any, device: torch.device) -> tuple[Any, torch.Tensor]:
        out = step()
        return SimpleNamespace(replay=lambda: out.copy_(step())), out

    monkeypatch.setattr(decode, "captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@pytest.fixture
def again(rank: Rank) -> Iterator[Callable[[], None]]:
    """Back to the state behind the prompts."""
    tensors = [part for cache in rank.runner.caches for part in vars(cache).values() if torch.is_tensor(part)]
    rank.runner.forward(PROMPTS)
    saved = [tensor.clone() for tensor in tensors]

    def restore() -> None:
        for tensor, before in zip(tensors, saved, strict=True):
            tensor.copy_(before)

    yield restore
    rank.runner.model.head.shortlist = None


@torch.inference_mode()
@pytest.mark.usefixtures("anew")
def test_a_step_takes_the_graph_of_the_logits_that_matter(rank: Rank, again: Callable[[], None]) -> None:
    runner = rank.runner
    parts = runner.model, runner.caches, runner.tables, runner.last_tokens, runner.ctx
    want_BV = runner.forward(STEP).clone()
    for chunk in STEP:
        runner.tables.update(chunk)
    runner.model.head.make_shortlist()
    graphs = decode.DecodeGraphs(*parts)
    for keep, kept in ((0, 0), (1, 1), (2, LISTED), (LISTED, LISTED), (LISTED + 1, 0)):
        again()
        got_BV = graphs.run(STEP, keep)
        assert (4, 256, kept) in graphs.captured
        there_BV = got_BV > -torch.inf
        assert there_BV.all() == (kept == 0), keep
        torch.testing.assert_close(got_BV[there_BV], want_BV[there_BV], rtol=1e-3, atol=1e-3)
        best_BK = want_BV.topk(max(keep, 1) if kept else 1).indices
        assert there_BV.gather(1, best_BK).all()
    assert {key[2] for key in graphs.captured} == {*decode.KEEPS}
    runner.model.head.shortlist = None
    again()
    plain = decode.DecodeGraphs(*parts)
    torch.testing.assert_close(plain.run(STEP, 1), want_BV, rtol=1e-3, atol=1e-3)
    assert {*plain.captured} == {(4, 256, 0)}


@torch.inference_mode()
@pytest.mark.usefixtures("anew", "again")
def test_all_ways_of_small_sizes_are_captured_ahead(rank: Rank) -> None:
    runner = rank.runner
    runner.model.head.make_shortlist()
    graphs = decode.DecodeGraphs(runner.model, runner.caches, runner.tables, runner.last_tokens, runner.ctx)
    graphs.capture_all()
    assert {*graphs.captured} == {(size, 256, keep) for size in (1, 2, 4, 6) for keep in decode.KEEPS}
