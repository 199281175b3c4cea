"""Decode steps as CUDA graphs: one launch for the whole model, by the number of requests and their longest context.

Legend: B requests of a graph (padded with row 0), P pages of its longest context, V vocabulary.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.engine.plan import Chunk
from shardwise.engine.sampler import LISTED
from shardwise.engine.tables import PageTables
from shardwise.kernels.sequences import Sequences
from shardwise.models.qwen3_5 import LayerCache, Model
from shardwise.parallel.context import RankContext

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LENGTHS = (4096, 32768, 262144)  # tokens; a graph's launch grids are made for its longest
KEEPS = (0, 1, LISTED)  # how many of the likeliest a graph's logits are for; 0: all are there


@dataclass(frozen=True)
class Inputs:
    """Where a graph reads from: all in one buffer, so that one copy fills it.

    wide_3B: int64, token or -row, position, KV slot; what follows it is int32, seen through seqs.
    """

    words_X: torch.Tensor  # int32
    wide_3B: torch.Tensor
    seqs: Sequences

    @classmethod
    def empty(cls, size: int, length: int, page_tokens: int, device: torch.device) -> "Inputs":
        pages, wide = -(-length // page_tokens), cls.wide_words(size)
        words_X = torch.zeros(wide + size * (2 + pages), dtype=torch.int32, device=device)
        wide_X, context_S, rows_S, pages_X = words_X.split((wide, size, size, size * pages))
        wide_3B = wide_X[: 6 * size].view(torch.int64).view(3, size)
        seqs = Sequences(
            starts_S1=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_S=context_S,
            state_rows_S=rows_S,
            pages_SP=pages_X.view(size, pages),
            kv_slots_T=wide_3B[2],
            decodes=size,
            max_query=1,
            max_length=length,
        )
        return cls(words_X, wide_3B, seqs)

    @staticmethod
    def wide_words(size: int) -> int:
        """Words of wide_3B, up to where the next are aligned to 16 bytes, by which kernels are compiled."""
        return -(-6 * size // 4) * 4


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    logits_BV: torch.Tensor  # written anew by each replay


class DecodeGraphs:
    """Captured on first use of a size, a length and one of KEEPS, or by `capture_all`; every rank captures and replays
    alike."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        tables: PageTables,
        last_tokens: torch.Tensor,
        ctx: RankContext,
        most_tokens: int = 1 << 30,
    ) -> None:
        self.model, self.caches, self.tables, self.last_tokens, self.ctx = model, caches, tables, last_tokens, ctx
        rows, longest = min(len(tables.counts) - 1, most_tokens), tables.pages.shape[1] * tables.page_tokens
        self.sizes = [size for size in SIZES if size < rows] + [rows]
        self.lengths = [length for length in LENGTHS if length < longest] + [longest]
        self.captured: dict[tuple[int, int, int], Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def capture_all(self) -> None:
        """Capture every size at the shortest length and the smallest sizes at all; largest first, to share memory."""
        for length in self.lengths:
            for size in reversed(self.sizes if length == self.lengths[0] else self.sizes[:4]):
                for keep in KEEPS if self.model.head.lists(size) else KEEPS[:1]:
                    self._get(size, length, keep)

    def run(self, chunks: Sequence[Chunk], keep: int = 0) -> torch.Tensor:
        """Logits [len(chunks), V] of chunks of one token each; overwritten by the next run. keep: as the head's."""
        longest = max(chunk.start for chunk in chunks) + 1
        size = self.sizes[bisect_left(self.sizes, len(chunks))]
        keep = KEEPS[bisect_left(KEEPS, keep)] if keep <= KEEPS[-1] and self.model.head.lists(size) else 0
        captured = self._get(size, self.lengths[bisect_left(self.lengths, longest)], keep)
        self._fill(captured.inputs, chunks)
        captured.graph.replay()
        return captured.logits_BV[: len(chunks)]

    def _fill(self, inputs: Inputs, chunks: Sequence[Chunk]) -> None:
        size, pages = inputs.seqs.pages_SP.shape
        count = len(chunks)
        rows = np.fromiter((chunk.row for chunk in chunks), np.int64, count)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, count)
        first = Inputs.wide_words(size)
        words = np.zeros(first + size * (2 + pages), np.int32)
        wide, narrow = words[: 6 * size].view(np.int64).reshape(3, size), words[first:]
        wide[0, :count] = [chunk.tokens[0] if chunk.tokens else -chunk.row for chunk in chunks]
        wide[1, :count] = starts + np.fromiter((chunk.shift for chunk in chunks), np.int64, count)
        wide[2, :count] = self.tables.slots(rows, starts)
        narrow[:count] = starts
        narrow[size : size + count] = rows
        narrow[2 * size :].reshape(size, pages)[:count] = self.tables.pages[rows, :pages]
        inputs.words_X.copy_(torch.from_numpy(words).pin_memory(), non_blocking=True)

    def _get(self, size: int, length: int, keep: int = 0) -> Captured:
        key = size, length, keep
        if key not in self.captured:
            self.captured[key] = self._capture(*key)
        return self.captured[key]

    @torch.inference_mode()
    def _capture(self, size: int, length: int, keep: int) -> Captured:
        inputs = Inputs.empty(size, length, self.tables.page_tokens, self.ctx.device)

        def step() -> torch.Tensor:
            tokens_B, positions_B = inputs.wide_3B[:2]
            last = self.last_tokens
            return self.model(tokens_B, positions_B, inputs.seqs, self.caches, None, last_tokens_R=last, keep=keep)

        graph, logits_BV = captured(step, self.pool, self.ctx.device)
        return Captured(graph, inputs, logits_BV)


def captured(
    step: Callable[[], torch.Tensor], pool: Any, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """`step` as a graph, and what it returned: written anew by each replay. pool: of memory, shared with other graphs
    that run one after the other."""
    # Once outside the graph on the stream that captures, so that compilers and communicators set themselves up.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        out = step()
    return graph, out
