"""Steps with chunks of prompts as CUDA graphs, up to some thousand tokens: of more, the host launches kernels faster
than they run.

A graph is for some tokens of prompts; those that a step lacks are a chunk of their own, of row 0 and page 0, which are
nobody's. Places of chunks, and of single tokens, that a step lacks are empty, or padding likewise.

Legend: B single tokens, T tokens (those of prompts behind the single ones), S sequences, P pages of the longest, L rows
with logits, V vocabulary.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.engine.graphs import LENGTHS, captured
from shardwise.engine.plan import Chunk
from shardwise.engine.tables import PageTables
from shardwise.kernels.sequences import Sequences
from shardwise.models.qwen3_5 import LayerCache, Model
from shardwise.parallel.context import RankContext

TOKENS = (64, 128, 256, 384, 496, 512, 768, 1024, 1536, 2048)  # of prompts; from 512 on, linears are by other kernels
STEP_SHARE = 4  # graphs are for this part of the largest step at most: their memory is beside what that takes
PREPARED = (1024,)  # captured ahead, beside the most tokens; others on first use
# Single tokens beside them, and chunks. More than these were not measured: such steps are launched kernel by kernel.
DECODES, CHUNKS = (0,), (1,)


def graph_tokens(step_tokens: int) -> int:
    """Of prompts, in the largest graph beside steps of at most `step_tokens`; 0: there is none."""
    return max((tokens for tokens in TOKENS if tokens <= step_tokens // STEP_SHARE), default=0)


class Shape(NamedTuple):
    """What a graph is for: single tokens, chunks and their tokens, and the longest context of all."""

    decodes: int
    chunks: int
    tokens: int
    length: int

    @property
    def sequences(self) -> int:
        """With the chunk of padding."""
        return self.decodes + self.chunks + 1

    @property
    def rows(self) -> int:
        """With logits, at most."""
        return self.decodes + self.chunks


class Host(NamedTuple):
    """A step's inputs as a graph takes them: int64 [3 T + L] token or -row, position, KV slot, and rows with logits;
    int32 [S + 1 + 2 S + S P] starts, contexts, rows and pages."""

    wide: np.ndarray
    narrow: np.ndarray


def shape_of(chunks: Sequence[Chunk], most: Shape) -> Shape | None:
    """The smallest that holds `chunks`; None if none does, or the step wants what graphs do not give.

    most: tokens in all that a graph is made for, and the longest context.
    """
    decodes = sum(1 for chunk in chunks if chunk.count == 1)
    prompts = len(chunks) - decodes
    tokens = sum(chunk.count for chunk in chunks) - decodes
    if not prompts or any(chunk.axes or chunk.spans or chunk.prompt_logits for chunk in chunks):
        return None
    sizes = [(DECODES, decodes), (CHUNKS, prompts), ([n for n in TOKENS if n <= most.tokens], tokens)]
    found = [next((choice for choice in choices if choice >= count), -1) for choices, count in sizes]
    if min(found) < 0:
        return None
    lengths = [length for length in LENGTHS if length < most.length and found[0]] + [most.length]
    longest = max(chunk.start + chunk.count for chunk in chunks)
    return Shape(found[0], found[1], found[2], lengths[bisect_left(lengths, longest)])


def fill(shape: Shape, chunks: Sequence[Chunk], tables: PageTables) -> Host:
    """Inputs of a step, single tokens first. With no chunk: all is padding."""
    decodes = sum(1 for chunk in chunks if chunk.count == 1)
    total, sequences = shape.decodes + shape.tokens, shape.sequences
    pages = -(-shape.length // tables.page_tokens)
    wide, rows_L = np.zeros((3, total), np.int64), np.zeros(shape.rows, np.int64)
    starts, context, rows = (np.zeros(sequences + n, np.int32) for n in (1, 0, 0))
    table = np.zeros((sequences, pages), np.int32)
    starts[: shape.decodes] = np.arange(shape.decodes)
    starts[shape.decodes :] = shape.decodes
    at, wanted = 0, 0
    for n, chunk in enumerate(chunks):
        if n == decodes:
            at = shape.decodes
        sequence = n if n < decodes else shape.decodes + n - decodes
        end, places = at + chunk.count, np.arange(chunk.start, chunk.start + chunk.count)
        wide[0, at:end] = chunk.tokens or -chunk.row
        wide[1, at:end] = places + chunk.shift
        wide[2, at:end] = tables.slots(chunk.row, places)
        context[sequence], rows[sequence] = chunk.start, chunk.row
        table[sequence] = tables.pages[chunk.row, :pages]
        if n >= decodes:
            starts[sequence + 1 :] = end
        if chunk.sample or chunk.check:
            rows_L[wanted] = end - 1
            wanted += 1
        at = end
    padding = shape.decodes + len(chunks) - decodes
    starts[padding + 1 :] = total
    return Host(np.concatenate([wide.reshape(-1), rows_L]), np.concatenate([starts, context, rows, table.reshape(-1)]))


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    wide: torch.Tensor
    narrow: torch.Tensor
    logits_LV: torch.Tensor


def step_inputs(
    shape: Shape, wide: torch.Tensor, narrow: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Sequences, torch.Tensor]:
    """Tokens, positions, sequences and rows with logits, seen in tensors laid out as Host."""
    total, count = shape.decodes + shape.tokens, shape.sequences
    tokens_T, positions_T, slots_T, rows_L = wide.split((total, total, total, shape.rows))
    starts_S1, context_S, rows_S, pages_X = narrow.split((count + 1, count, count, len(narrow) - 3 * count - 1))
    seqs = Sequences(
        starts_S1=starts_S1,
        context_S=context_S,
        state_rows_S=rows_S,
        pages_SP=pages_X.view(count, -1),
        kv_slots_T=slots_T,
        decodes=shape.decodes,
        max_query=shape.tokens,
        max_length=shape.length,
    )
    return tokens_T, positions_T, seqs, rows_L


class PromptGraphs:
    """Captured on first use of a shape, or by `capture_some`; every rank captures and replays alike."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        tables: PageTables,
        last_tokens: torch.Tensor,
        ctx: RankContext,
        most_tokens: int,
        pool: Any,
    ) -> None:
        """most_tokens: of all that a step may have; pool: of memory, shared with graphs that never run beside these."""
        self.model, self.caches, self.tables, self.last_tokens, self.ctx = model, caches, tables, last_tokens, ctx
        longest = tables.pages.shape[1] * tables.page_tokens
        self.most = Shape(0, 0, graph_tokens(most_tokens), longest)
        self.captured: dict[Shape, Captured] = {}
        self.pool = pool

    def capture_some(self) -> None:
        """Capture the largest, whose memory the others share, and what is likely."""
        sizes = [tokens for tokens in TOKENS if tokens <= self.most.tokens]
        for tokens in sorted({*sizes[-1:], *(n for n in PREPARED if n in sizes)}, reverse=True):
            self._get(Shape(0, CHUNKS[0], tokens, self.most.length))

    def shape_of(self, chunks: Sequence[Chunk]) -> Shape | None:
        """Of the graph for a step with these chunks, if one may be made."""
        return shape_of(chunks, self.most)

    def run(self, shape: Shape, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits [L, V] of the chunks that want any; overwritten by the next run."""
        found = self._get(shape)
        for host, device in zip(fill(shape, chunks, self.tables), (found.wide, found.narrow), strict=True):
            device.copy_(torch.from_numpy(host).pin_memory(), non_blocking=True)
        found.graph.replay()
        return found.logits_LV[: sum(1 for chunk in chunks if chunk.sample or chunk.check)]

    def _get(self, shape: Shape) -> Captured:
        if shape not in self.captured:
            self.captured[shape] = self._capture(shape)
        return self.captured[shape]

    @torch.inference_mode()
    def _capture(self, shape: Shape) -> Captured:
        wide, narrow = (torch.from_numpy(part).to(self.ctx.device) for part in fill(shape, [], self.tables))
        tokens_T, positions_T, seqs, rows_L = step_inputs(shape, wide, narrow)

        def step() -> torch.Tensor:
            return self.model(tokens_T, positions_T, seqs, self.caches, rows_L, last_tokens_R=self.last_tokens)

        graph, logits_LV = captured(step, self.pool, self.ctx.device)
        return Captured(graph, wide, narrow, logits_LV)
