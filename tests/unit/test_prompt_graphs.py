"""Inputs of steps as graphs take them: padded steps give what steps as they are give."""

import numpy as np
import pytest
import torch

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine.build import Rank, build_rank
from shardwise.engine.plan import Chunk, Span
from shardwise.engine.prompt_graphs import TOKENS, Shape, fill, graph_tokens, shape_of, step_inputs
from shardwise.parallel.comm import Alone
from tests.golden.eval import miniature

MOST = Shape(0, 0, 256, 512)
STEPS = (
    [Chunk(1, 0, 30, list(range(5, 35)), [1, 2], True)],
    [
        Chunk(1, 30, 1, [], [], True),
        Chunk(2, 0, 70, list(range(100, 170)), [3, 4]),
        Chunk(3, 0, 9, list(range(9)), [5], check=True),
    ],
    [
        Chunk(1, 31, 1, [], [], True),
        Chunk(2, 70, 50, list(range(40, 90)), [], True),
        Chunk(3, 9, 14, list(range(14)), [], True),
    ],
)


@pytest.fixture(scope="module")
def rank() -> Rank:
    serve = ServeConfig(
        model=str(miniature()), ranks=1, device="cpu", dtype="float32", max_model_len=512, max_num_seqs=4
    )
    return build_rank(serve, RankEnvironment(0, 1, 0, 1, 0), Alone())


def padded(rank: Rank, chunks: list[Chunk]) -> torch.Tensor:
    """As the runner's forward, in the way of a graph."""
    runner, several = rank.runner, len(chunks) > 1
    shape = Shape(16, 8, 128, 512) if several else shape_of(chunks, MOST)
    assert shape is not None
    for chunk in chunks:
        runner.tables.update(chunk)
    tokens_T, positions_T, seqs, rows_L = step_inputs(
        shape, *(torch.from_numpy(part) for part in fill(shape, chunks, runner.tables))
    )
    assert len(tokens_T) == shape.decodes + shape.tokens == int(seqs.starts_S1[-1])
    logits_LV = runner.model(tokens_T, positions_T, seqs, runner.caches, rows_L, last_tokens_R=runner.last_tokens)
    return logits_LV[: sum(1 for chunk in chunks if chunk.sample or chunk.check)]


@torch.inference_mode()
def test_padded_steps_give_the_same(rank: Rank) -> None:
    """Logits of every step, and the states and pages behind them, but for row 0 and page 0."""
    outputs: list[list[torch.Tensor]] = []
    for way in (rank.runner.forward, lambda chunks: padded(rank, chunks)):
        tensors = [part for cache in rank.runner.caches for part in vars(cache).values() if torch.is_tensor(part)]
        for tensor in tensors:
            tensor.fill_(7.0)
        rank.runner.tables.pages[:] = 0
        found = []
        for chunks in STEPS:
            found.append(way(chunks).clone())
            count = sum(1 for chunk in chunks if chunk.sample)
            rank.runner.commit([chunk.row for chunk in chunks if chunk.sample], found[-1][:count].argmax(-1))
        outputs.append(found + [tensor[1:].clone() for tensor in tensors])
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_shapes() -> None:
    """The smallest that holds a step; none for what graphs do not do."""
    prompt = Chunk(1, 0, 65, list(range(65)))
    long = Shape(0, 0, 2048, 1 << 18)
    assert shape_of([prompt], long) == Shape(0, 1, 128, 1 << 18)
    assert shape_of([Chunk(1, 9, 500, list(range(500)))], long) == Shape(0, 1, 512, 1 << 18)
    refused = [
        [Chunk(2, 9, 1), prompt],
        [prompt, prompt],
        [Chunk(1, 9, 1)],
        [Chunk(1, 0, 2049)],
        [Chunk(1, 0, 65, prompt_logits=True)],
        [Chunk(1, 0, 65, axes=bytes(780))],
        [Chunk(1, 0, 65, spans=[Span(b"", 0, 0, 4)])],
    ]
    assert [shape_of(chunks, long) for chunks in refused] == [None] * len(refused)
    assert [graph_tokens(tokens) for tokens in (100, 1024, 8192, 1 << 20)] == [0, 256, 2048, TOKENS[-1]]


def test_a_graph_made_ahead_reads_nothing_of_a_request(rank: Rank) -> None:
    """Without chunks, all tokens are one chunk of row 0 in page 0."""
    shape = Shape(16, 1, 64, 512)
    wide, narrow = fill(shape, [], rank.runner.tables)
    assert not wide.any()
    starts, rest = narrow[: shape.sequences + 1], narrow[shape.sequences + 1 :]
    assert not rest.any()
    assert list(starts) == [*range(17), 80, 80]
    assert starts.dtype == np.int32
