"""A prompt alone in its step as a CUDA graph, up to some thousand tokens: of more, the host launches kernels faster
than they run. Steps with several prompts, or with answers beside them, are launched kernel by kernel.

A graph is for some tokens; those that a step lacks are a chunk of their own, of row 0 and page 0, which are nobody's.

Legend: T tokens of a graph, P pages of the longest prompt, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.engine.graphs import captured
from shardwise.engine.plan import Chunk
from shardwise.engine.tables import PageTables
from shardwise.kernels.sequences import Sequences
from shardwise.models.qwen3_5 import LayerCache, Model
from shardwise.parallel.context import RankContext

TOKENS = (64, 128, 256, 384, 496, 512, 768, 1024, 1536, 2048)  # of a graph; from 512 on, linears are by other kernels
STEP_SHARE = 4  # graphs are for this part of the largest step at most: their memory is beside what that takes
PREPARED = (1024,)  # captured ahead, beside the most tokens; others on first use


def graph_tokens(step_tokens: int) -> int:
    """Of the largest graph beside steps of at most `step_tokens`; 0: there is none."""
    return max((tokens for tokens in TOKENS if tokens <= step_tokens // STEP_SHARE), default=0)


def size_of(chunks: Sequence[Chunk], most_tokens: int) -> int:
    """Tokens of the smallest graph that holds `chunks`; 0 if none does, or the step wants what graphs do not give."""
    chunk = chunks[0]
    if len(chunks) > 1 or chunk.count == 1 or chunk.axes or chunk.spans or chunk.prompt_logits:
        return 0
    return next((tokens for tokens in TOKENS if chunk.count <= tokens <= most_tokens), 0)


class Host(NamedTuple):
    """A step's inputs as a graph takes them: int64 [3 T + 1] token or -row, position, KV slot, and the row with logits;
    int32 [4 + 4 + 4 + 2 P] three starts, two contexts and two rows, each aligned to 16 bytes, and pages, of the prompt
    and of the padding."""

    wide: np.ndarray
    narrow: np.ndarray


def fill(tokens: int, chunk: Chunk | None, tables: PageTables) -> Host:
    """Inputs of a step in a graph of so many tokens; without a chunk, all is padding."""
    count, pages = (chunk.count if chunk else 0), tables.pages.shape[1]
    wide, row_1 = np.zeros((3, tokens), np.int64), np.zeros(1, np.int64)
    narrow = np.zeros(12 + 2 * pages, np.int32)
    narrow[1:3] = count, tokens
    if chunk:
        places = np.arange(chunk.start, chunk.start + count)
        wide[0, :count] = chunk.tokens or -chunk.row
        wide[1, :count] = places + chunk.shift
        wide[2, :count] = tables.slots(chunk.row, places)
        narrow[4], narrow[8] = chunk.start, chunk.row
        narrow[12 : 12 + pages] = tables.pages[chunk.row]
        row_1[0] = count - 1
    return Host(np.concatenate([wide.reshape(-1), row_1]), narrow)


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    wide: torch.Tensor
    narrow: torch.Tensor
    logits_1V: torch.Tensor


def step_inputs(
    tokens: int, wide: torch.Tensor, narrow: torch.Tensor, page_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, Sequences, torch.Tensor]:
    """Tokens, positions, sequences and the row with logits, seen in tensors laid out as Host."""
    tokens_T, positions_T, slots_T, row_1 = wide.split((tokens, tokens, tokens, 1))
    starts_4, context_4, rows_4, pages_X = narrow.split((4, 4, 4, len(narrow) - 12))
    seqs = Sequences(
        starts_S1=starts_4[:3],
        context_S=context_4[:2],
        state_rows_S=rows_4[:2],
        pages_SP=pages_X.view(2, -1),
        kv_slots_T=slots_T,
        decodes=0,
        max_query=tokens,
        max_length=len(pages_X) // 2 * page_tokens,
    )
    return tokens_T, positions_T, seqs, row_1


class PromptGraphs:
    """Captured on first use of a size, or by `capture_some`; every rank captures and replays alike."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        tables: PageTables,
        last_tokens: torch.Tensor,
        ctx: RankContext,
        step_tokens: int,
        pool: Any,
    ) -> None:
        """step_tokens: that a step may have; pool: of memory, shared with graphs that never run beside these."""
        self.model, self.caches, self.tables, self.last_tokens, self.ctx = model, caches, tables, last_tokens, ctx
        self.most_tokens = graph_tokens(step_tokens)
        self.captured: dict[int, Captured] = {}
        self.pool = pool

    def capture_some(self) -> None:
        """Capture the largest, whose memory the others share, and what is likely."""
        sizes = [tokens for tokens in TOKENS if tokens <= self.most_tokens]
        for tokens in sorted({*sizes[-1:], *(n for n in PREPARED if n in sizes)}, reverse=True):
            self._get(tokens)

    def size_of(self, chunks: Sequence[Chunk]) -> int:
        """Tokens of the graph for a step with these chunks; 0: none may be made."""
        return size_of(chunks, self.most_tokens)

    def run(self, tokens: int, chunk: Chunk) -> torch.Tensor:
        """Logits [1, V] of the chunk's last token, or [0, V] if it wants none; overwritten by the next run."""
        found = self._get(tokens)
        for host, device in zip(fill(tokens, chunk, self.tables), (found.wide, found.narrow), strict=True):
            device.copy_(torch.from_numpy(host).pin_memory(), non_blocking=True)
        found.graph.replay()
        return found.logits_1V[: int(chunk.sample or chunk.check)]

    def _get(self, tokens: int) -> Captured:
        if tokens not in self.captured:
            self.captured[tokens] = self._capture(tokens)
        return self.captured[tokens]

    @torch.inference_mode()
    def _capture(self, tokens: int) -> Captured:
        wide, narrow = (torch.from_numpy(part).to(self.ctx.device) for part in fill(tokens, None, self.tables))
        tokens_T, positions_T, seqs, row_1 = step_inputs(tokens, wide, narrow, self.tables.page_tokens)

        def step() -> torch.Tensor:
            return self.model(tokens_T, positions_T, seqs, self.caches, row_1, last_tokens_R=self.last_tokens)

        graph, logits_1V = captured(step, self.pool, self.ctx.device)
        return Captured(graph, wide, narrow, logits_1V)
