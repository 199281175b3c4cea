"""Which graph a decode step takes, and that it gives what the step itself gives; a graph here is a step run anew."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine import graphs as decode
from shardwise.engine.build import Rank, build_rank
from shardwise.engine.messages import SamplingParams
from shardwise.engine.plan import Chunk
from shardwise.engine.request import Request
from shardwise.engine.sampler import LISTED, Sampler
from shardwise.layers.delta import DeltaState
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


def requests(*ways: dict[str, Any]) -> list[Request]:
    """In the rows of STEP, each about to get its third token."""
    every = [msgspec.convert({"max_tokens": 9, "temperature": 0.0} | way, SamplingParams) for way in ways]
    return [Request(str(n), [1], way, n, seed=n, output=[2, 3], pending=1) for n, way in enumerate(every)]


GREEDY = requests({}, {}, {})
MIXED = requests({"temperature": 0.9, "top_k": 5}, {}, {"temperature": 30.0, "top_k": LISTED, "top_p": 0.9})


@torch.inference_mode()
@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("keep", "kept", "who"), [(1, 1, GREEDY), (LISTED, LISTED, MIXED), (5, LISTED, GREEDY)])
def test_a_graph_chooses_what_the_sampler_would(
    rank: Rank, again: Callable[[], None], listed: bool, keep: int, kept: int, who: list[Request]
) -> None:
    runner = rank.runner
    for chunk in STEP:
        runner.tables.update(chunk)
    if listed:
        runner.model.head.make_shortlist()
    graphs = decode.DecodeGraphs(runner.model, runner.caches, runner.tables, runner.last_tokens, runner.ctx)
    logits_LV = graphs.run(STEP)
    assert bool(logits_LV.isfinite().all())
    want = [token for token, _ in Sampler(runner.ctx.ops).sample(logits_LV, who).read()]
    again()
    runner.last_tokens.fill_(-7)
    assert graphs.choose(STEP, keep, who).lists() == [want]
    assert runner.last_tokens[1:].tolist() == [*want, -7, -7, -7]
    assert {*graphs.captured} == {(4, 256, 0), (4, 256, kept)}


@torch.inference_mode()
@pytest.mark.usefixtures("anew", "again")
def test_tokens_of_two_steps_can_be_under_way(rank: Rank) -> None:
    """And rows that a smaller step leaves over are padding again."""
    runner = rank.runner
    for chunk in STEP:
        runner.tables.update(chunk)
    graphs = decode.DecodeGraphs(runner.model, runner.caches, runner.tables, runner.last_tokens, runner.ctx)
    first = graphs.choose(STEP, 1)
    later = [Chunk(chunk.row, chunk.start + 1, 1, [], [], True) for chunk in STEP]
    second = graphs.choose(later, 1)
    ((a, b, c), (d, e, f)) = *first.lists(), *second.lists()
    assert runner.last_tokens[1:4].tolist() == [d, e, f]
    assert len({a, b, c, d, e, f}) > 2
    turn = next(iter(graphs.captured.values())).turns.free()
    graphs.choose(STEP[:1] * 3, 1)
    graphs._fill(fields := graphs.captured[4, 256, 1].turns.fields[turn], STEP[:2], turn)
    assert fields.rows_B.tolist() == [1, 2, 0, 0]
    assert not fields.wide_3B[:, 2:].any()
    assert not fields.pages_BP[2:].any()


@torch.inference_mode()
@pytest.mark.usefixtures("anew", "again")
@pytest.mark.parametrize("runs", [1, 2, 3])
def test_each_graph_takes_over_the_turn_that_was_written(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """However often a step ran to be captured, whatever other graphs do, and if a step fails before its launch."""
    runner, once = rank.runner, decode.captured

    def captured(step: Callable[[], torch.Tensor], *rest: Any) -> tuple[Any, torch.Tensor]:
        for _ in range(runs - 1):
            step()
        return once(step, *rest)

    monkeypatch.setattr(decode, "captured", captured)
    for chunk in STEP:
        runner.tables.update(chunk)
    graphs = decode.DecodeGraphs(runner.model, runner.caches, runner.tables, runner.last_tokens, runner.ctx)
    for n, (count, keep) in enumerate([(3, 1), (3, 1), (1, 1), (3, 1), (1, 0), (1, 1), (3, 1), (1, 0), (1, 1)]):
        chunks = [Chunk(chunk.row, chunk.start + n, 1, [n + 1], [], True) for chunk in STEP[:count]]
        fill = graphs._fill
        monkeypatch.setattr(graphs, "_fill", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            graphs._replay(chunks, keep, ())
        monkeypatch.setattr(graphs, "_fill", fill)
        found, turn = graphs._replay(chunks, keep, ())
        words = found.inputs.fields
        assert words.context_B[:count].tolist() == [chunk.start for chunk in chunks]
        assert words.wide_3B[0, :count].tolist() == [n + 1] * count
        assert words.turn_1.tolist() == [turn]


@torch.inference_mode()
@pytest.mark.usefixtures("anew")
def test_a_row_that_is_not_finite_gets_minus_one(rank: Rank, again: Callable[[], None]) -> None:
    runner = rank.runner
    for chunk in STEP:
        runner.tables.update(chunk)
    for keep in (1, LISTED):
        again()
        next(cache for cache in runner.caches if isinstance(cache, DeltaState)).delta[2] = torch.nan
        graphs = decode.DecodeGraphs(runner.model, runner.caches, runner.tables, runner.last_tokens, runner.ctx)
        ((one, two, three),) = graphs.choose(STEP, keep, MIXED).lists()
        assert two == runner.last_tokens[2] == -1
        assert min(one, three) >= 0


@torch.inference_mode()
@pytest.mark.usefixtures("anew", "again")
def test_all_ways_of_small_sizes_are_captured_ahead(rank: Rank) -> None:
    runner = rank.runner
    runner.model.head.make_shortlist()
    graphs = decode.DecodeGraphs(runner.model, runner.caches, runner.tables, runner.last_tokens, runner.ctx)
    graphs.capture_all()
    assert {*graphs.captured} == {(size, 256, keep) for size in (1, 2, 4, 6) for keep in decode.KEEPS}
