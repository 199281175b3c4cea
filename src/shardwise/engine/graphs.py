"""Decode steps as CUDA graphs: one launch for the whole model, by the number of requests and their longest context.

Legend: B requests of a graph (padded with row 0), P pages of its longest context, V vocabulary, K turns, X words.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from shardwise.engine.plan import Chunk
from shardwise.engine.readback import Written
from shardwise.engine.request import Request
from shardwise.engine.sampler import LISTED, choose, parameters
from shardwise.engine.tables import PageTables
from shardwise.kernels.begin.reference import Handover
from shardwise.kernels.sequences import Sequences
from shardwise.layers.embedding import LISTED_ROWS
from shardwise.models.qwen3_5 import LayerCache, Model
from shardwise.parallel.context import RankContext

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LENGTHS = (4096, 32768, 262144)  # tokens; a graph's launch grids are made for its longest
KEEPS = (0, 1, LISTED)  # how many of the likeliest a graph chooses tokens from; 0: it gives logits
TURNS = 2  # of a graph: steps that can be under way, counted from their launch until the host has their tokens


Words = TypeVar("Words", torch.Tensor, np.ndarray)


@dataclass(frozen=True)
class Fields(Generic[Words]):
    """A step's inputs in words of int32, on the device or on the host, each aligned to 16 bytes, by which kernels are
    compiled. Padding is zeros, but for parameters of draws, which may be any."""

    wide_3B: Words  # int64: token or -row, position, KV slot
    ints_B4: Words  # int64, of draws, as of sampler.parameters; those of ranks but the first do not count
    floats_B3: Words  # fp32, of the same
    context_B: Words
    rows_B: Words
    pages_BP: Words
    turn_1: Words  # which of the graph's turns this is

    @staticmethod
    def counts(size: int, pages: int) -> list[int]:
        """Words of each."""
        return [-(-count // 4) * 4 for count in (6 * size, 8 * size, 3 * size, size, size, size * pages, 1)]

    @classmethod
    def of(cls, words_X: Words, size: int, pages: int, long: Any, real: Any) -> "Fields[Words]":
        """Views of `words_X`. long, real: int64 and fp32, as torch or numpy calls them."""
        counts = cls.counts(size, pages)
        ends = list(accumulate(counts))
        wide, ints, floats, context, rows, table, turn = (
            words_X[end - count : end] for count, end in zip(counts, ends, strict=True)
        )
        return cls(
            wide[: 6 * size].view(long).reshape(3, size),
            ints.view(long).reshape(size, 4),
            floats.view(real)[: 3 * size].reshape(size, 3),
            context[:size],
            rows[:size],
            table[: size * pages].reshape(size, pages),
            turn[:1],
        )


@dataclass(frozen=True)
class Inputs:
    """What a step takes over from the host, all in one buffer, and where it reads from then."""

    handover: Handover
    fields: Fields[torch.Tensor]
    seqs: Sequences  # views of the fields
    every_B: torch.Tensor  # int64: 0, 1, ...

    @classmethod
    def empty(cls, size: int, length: int, page_tokens: int, device: torch.device) -> "Inputs":
        pages = -(-length // page_tokens)
        handover = Handover.empty(TURNS, sum(Fields.counts(size, pages)), device)
        fields = Fields.of(handover.words_X, size, pages, torch.int64, torch.float32)
        seqs = Sequences(
            starts_S1=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_S=fields.context_B,
            state_rows_S=fields.rows_B,
            pages_SP=fields.pages_BP,
            kv_slots_T=fields.wide_3B[2],
            decodes=size,
            max_query=1,
            max_length=length,
        )
        return cls(handover, fields, seqs, torch.arange(size, device=device))


class Turns:
    """The host's side of a graph: what it reads and writes there, for each of the steps that can be under way."""

    def __init__(self, inputs: Inputs) -> None:
        size, pages = inputs.seqs.pages_SP.shape
        gpu, host_KX = inputs.handover.words_X.device.type == "cuda", inputs.handover.host_KX.numpy()
        self.fields = [Fields.of(words_X, size, pages, np.int64, np.float32) for words_X in host_KX]
        self.told_KB = torch.zeros((TURNS, size), dtype=torch.int64, pin_memory=gpu)  # tokens that the graph chose
        self.told = list(self.told_KB.numpy())
        self.done = [torch.cuda.Event() if gpu else None for _ in range(TURNS)]
        self._next = 0

    def free(self) -> int:
        """The next step's turn, once the step that had it before is done."""
        if (done := self.done[self._next]) is not None:
            done.synchronize()
        return self._next

    def launched(self) -> None:
        """The next step has been launched: as the device does by itself, go on to the turn of the one after it."""
        if (done := self.done[self._next]) is not None:
            done.record()
        self._next = (self._next + 1) % TURNS


@dataclass(frozen=True)
class Captured:
    """A graph of a step. out_B: logits [B, V], or tokens [B] where it chooses them; written anew by each replay."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    turns: Turns
    out_B: torch.Tensor


class DecodeGraphs:
    """Captured on first use of a size, a length and one of KEEPS, or by `capture_all`; every rank captures and replays
    alike. So that launching a step is little work, the choice of tokens is in the graph where a Sampler is not
    needed."""

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
                for keep in KEEPS if size <= LISTED_ROWS else KEEPS[:1]:
                    self._get(size, length, keep)

    def take(self, chunks: Sequence[Chunk]) -> bool:
        """Whether there is, or can be, a graph for a step of these chunks."""
        fits = len(chunks) <= self.sizes[-1]
        return fits and all(chunk.count == 1 and chunk.sample and not chunk.axes for chunk in chunks)

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits [len(chunks), V] of chunks that it takes; overwritten by the next run."""
        return self._replay(chunks, 0, ())[0].out_B[: len(chunks)]

    def choose(self, chunks: Sequence[Chunk], keep: int, requests: Sequence[Request] = ()) -> Written:
        """Tokens for at most LISTED_ROWS chunks that it takes, chosen in the graph: the last tokens on all ranks.

        keep: as of StepPlan, 1 to LISTED. requests: on the first rank, whose chunks these are.
        """
        captured, turn = self._replay(chunks, KEEPS[bisect_left(KEEPS, keep)], requests)
        return Written(captured.turns.told[turn][: len(chunks)], captured.turns.done[turn])

    def _replay(self, chunks: Sequence[Chunk], keep: int, requests: Sequence[Request]) -> tuple[Captured, int]:
        """Launch a step -> its graph, and which of the graph's turns it is."""
        longest = max(chunk.start for chunk in chunks) + 1
        size = self.sizes[bisect_left(self.sizes, len(chunks))]
        captured = self._get(size, self.lengths[bisect_left(self.lengths, longest)], keep)
        turns = captured.turns
        turn = turns.free()
        self._fill(turns.fields[turn], chunks, turn)
        if keep > 1:
            for b, request in enumerate(requests):
                turns.fields[turn].ints_B4[b], turns.fields[turn].floats_B3[b] = parameters(request)
        captured.graph.replay()
        turns.launched()
        return captured, turn

    def _fill(self, to: Fields[np.ndarray], chunks: Sequence[Chunk], turn: int = 0) -> None:
        """Write a step down on the host, but for the parameters of draws."""
        count, (size, pages) = len(chunks), to.pages_BP.shape
        if count < size:
            for field in (to.wide_3B, to.context_B, to.rows_B, to.pages_BP):
                field[...] = 0
        rows, starts = [chunk.row for chunk in chunks], np.array([chunk.start for chunk in chunks])
        to.wide_3B[0, :count] = [chunk.tokens[0] if chunk.tokens else -chunk.row for chunk in chunks]
        to.wide_3B[1, :count] = starts + [chunk.shift for chunk in chunks]
        to.wide_3B[2, :count] = self.tables.slots(rows, starts)
        to.context_B[:count] = starts
        to.rows_B[:count] = rows
        to.pages_BP[:count] = self.tables.pages[rows, :pages]
        to.turn_1[0] = turn

    def _get(self, size: int, length: int, keep: int = 0) -> Captured:
        key = size, length, keep
        if key not in self.captured:
            self.captured[key] = self._capture(*key)
        return self.captured[key]

    @torch.inference_mode()
    def _capture(self, size: int, length: int, keep: int) -> Captured:
        inputs = Inputs.empty(size, length, self.tables.page_tokens, self.ctx.device)
        turns = Turns(inputs)

        def step() -> torch.Tensor:
            fields, last_R, ctx = inputs.fields, self.last_tokens, self.ctx
            tokens_B, positions_B = fields.wide_3B[:2]
            logits_BV = self.model(
                tokens_B, positions_B, inputs.seqs, self.caches, None, last_tokens_R=last_R, keep=keep,
                handover=inputs.handover,
            )  # fmt: skip
            if not keep:
                return logits_BV
            chosen_B = choose(logits_BV, keep, inputs.every_B, fields.ints_B4, fields.floats_B3, ctx.ops)
            chosen_B = ctx.comm.broadcast(chosen_B)
            ctx.ops.keep_tokens(chosen_B, fields.rows_B, last_R, turns.told_KB, fields.turn_1)
            return chosen_B

        graph, out_B = captured(step, self.pool, self.ctx.device)
        inputs.handover.next_1.zero_()  # to be captured, the step was run
        return Captured(graph, inputs, turns, out_B)


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
