"""Inputs of steps as graphs take them: padded steps give what steps as they are give."""

import numpy as np
import pytest
import torch

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine.build import Rank, build_rank
from shardwise.engine.plan import Chunk, Span
from shardwise.engine.prompt_graphs import TOKENS, fill, graph_tokens, size_of, step_inputs
from shardwise.parallel.comm import Alone
from tests.golden.eval import miniature

STEPS = (
    Chunk(1, 0, 30, list(range(5, 35)), [1, 2], True),
    Chunk(2, 0, 70, list(range(100, 170)), [3, 4]),
    Chunk(2, 70, 50, list(range(40, 90)), [], check=True),
    Chunk(1, 30, 14, list(range(14)), [], True),
)


@pytest.fixture(scope="module")
def rank() -> Rank:
    serve = ServeConfig(
        model=str(miniature()), ranks=1, device="cpu", dtype="float32", max_model_len=512, max_num_seqs=4
    )
    return build_rank(serve, RankEnvironment(0, 1, 0, 1, 0), Alone())


def padded(rank: Rank, chunks: list[Chunk]) -> torch.Tensor:
    """As the runner's forward, in the way of a graph."""
    runner, (chunk,) = rank.runner, chunks
    runner.tables.update(chunk)
    tokens = size_of(chunks, 256)
    wide, narrow = (torch.from_numpy(part) for part in fill(tokens, chunk, runner.tables))
    tokens_T, positions_T, seqs, row_1 = step_inputs(tokens, wide, narrow, runner.tables.page_tokens)
    assert len(tokens_T) == tokens == int(seqs.starts_S1[-1]) > chunk.count
    logits_1V = runner.model(tokens_T, positions_T, seqs, runner.caches, row_1, last_tokens_R=runner.last_tokens)
    return logits_1V[: int(chunk.sample or chunk.check)]


@torch.inference_mode()
def test_padded_steps_give_the_same(rank: Rank) -> None:
    """Logits of every step, and the states and pages behind them, but for row 0 and page 0."""
    outputs: list[list[torch.Tensor]] = []
    for way in (rank.runner.forward, lambda chunks: padded(rank, chunks)):
        tensors = [part for cache in rank.runner.caches for part in vars(cache).values() if torch.is_tensor(part)]
        for tensor in tensors:
            tensor.fill_(7.0)
        rank.runner.tables.pages[:] = 0
        found = [way([chunk]).clone() for chunk in STEPS]
        outputs.append(found + [tensor[1:].clone() for tensor in tensors])
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_sizes() -> None:
    """The smallest that holds a step; none for what graphs do not do."""
    prompt = Chunk(1, 0, 65, list(range(65)))
    assert size_of([prompt], 2048) == 128
    assert size_of([Chunk(1, 9, 500, list(range(500)))], 2048) == 512
    refused = [
        [Chunk(2, 9, 1), prompt],
        [prompt, prompt],
        [Chunk(1, 9, 1)],
        [Chunk(1, 0, 2049)],
        [Chunk(1, 0, 65, prompt_logits=True)],
        [Chunk(1, 0, 65, axes=bytes(780))],
        [Chunk(1, 0, 65, spans=[Span(b"", 0, 0, 4)])],
    ]
    assert [size_of(chunks, 2048) for chunks in refused] == [0] * len(refused)
    assert [graph_tokens(tokens) for tokens in (100, 1024, 8192, 1 << 20)] == [0, 256, 2048, TOKENS[-1]]


def test_a_graph_made_ahead_reads_nothing_of_a_request(rank: Rank) -> None:
    """Without a chunk, all tokens are one chunk of row 0 in page 0."""
    wide, narrow = fill(64, None, rank.runner.tables)
    assert not wide.any()
    assert list(narrow[:3]) == [0, 0, 64]
    assert not narrow[3:].any()
    assert narrow.dtype == np.int32
