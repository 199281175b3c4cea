"""A rank's side of a step: plan -> tensors -> model -> logits, and the sampled ids back to every rank.

Legend: T tokens, S sequences, P pages of the longest sequence, L rows with logits, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np
import torch

from shardwise.cache.host import Copies
from shardwise.cache.pool import copy_pages, copy_rows, resize_pages
from shardwise.cache.store import HostStore
from shardwise.engine.engine import StepLogits
from shardwise.engine.features import Features
from shardwise.engine.graphs import DecodeGraphs
from shardwise.engine.plan import Chunk, Resize, StepPlan
from shardwise.engine.prompt_graphs import PromptGraphs
from shardwise.engine.readback import Written
from shardwise.engine.request import Request
from shardwise.engine.tables import PageTables
from shardwise.experts.offload import Offload
from shardwise.kernels.sequences import Sequences
from shardwise.models.qwen3_5 import LayerCache, Model
from shardwise.parallel.context import RankContext


@dataclass(frozen=True)
class Batch:
    """What the model takes, on the device. tokens_T below zero stand for the last token of row -tokens_T.

    positions_3T are [T] where the three axes are the same all over.
    """

    tokens_T: torch.Tensor
    positions_3T: torch.Tensor
    seqs: Sequences
    logit_rows_L: torch.Tensor
    feature_rows_F: torch.Tensor  # tokens that take a feature of a picture


def positions_of(chunks: Sequence[Chunk], places: Sequence[np.ndarray]) -> np.ndarray:
    """The positions of all tokens, [T] or, if any chunk is before the end of a picture, [3, T]."""
    if not any(chunk.axes for chunk in chunks):
        return np.concatenate([place + chunk.shift for chunk, place in zip(chunks, places, strict=True)])
    axes = [
        np.frombuffer(chunk.axes, np.int32).reshape(3, -1)
        if chunk.axes
        else np.broadcast_to(place + chunk.shift, (3, len(place)))
        for chunk, place in zip(chunks, places, strict=True)
    ]
    return np.concatenate(axes, 1)


def feature_rows(chunks: Sequence[Chunk], starts: Sequence[int]) -> np.ndarray:
    """The tokens of the step that take a feature, in the order of the chunks' spans."""
    rows = [
        np.arange(start + span.at, start + span.at + span.count)
        for chunk, start in zip(chunks, starts, strict=True)
        for span in chunk.spans
    ]
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)


def logits_rows(chunk: Chunk) -> int:
    """For how many of its last tokens logits are wanted."""
    return chunk.count if chunk.prompt_logits else int(chunk.sample or chunk.check)


def build_batch(chunks: Sequence[Chunk], tables: PageTables, device: torch.device) -> Batch:
    """Tensors of one step in two copies to the device, one of each integer width."""
    counts = [chunk.count for chunk in chunks]
    starts = np.cumsum([0, *counts])
    lengths = [chunk.start + chunk.count for chunk in chunks]
    places = [np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]
    positions = positions_of(chunks, places)
    tokens = [chunk.tokens or [-chunk.row] for chunk in chunks]
    logit_rows = [
        row
        for chunk, begin, end in zip(chunks, starts, starts[1:], strict=False)
        for row in range(end - logits_rows(chunk), end)
    ]
    pages = -(-max(lengths) // tables.page_tokens)
    wide = (
        np.concatenate(tokens),
        positions.reshape(-1),
        np.concatenate([tables.slots(chunk.row, span) for chunk, span in zip(chunks, places, strict=True)]),
        np.array(logit_rows, dtype=np.int64),
        feature_rows(chunks, starts[:-1]),  # pyright: ignore[reportArgumentType]
    )
    rows = [chunk.row for chunk in chunks]
    narrow = (starts, [chunk.start for chunk in chunks], rows, tables.pages[rows, :pages].reshape(-1))
    tokens_T, positions_X, kv_slots_T, logit_rows_L, feature_rows_F = to_device(wide, np.int64, device)
    starts_S1, context_S, rows_S, pages_X = to_device(narrow, np.int32, device)
    return Batch(
        tokens_T,
        positions_X.view(positions.shape),
        Sequences(
            starts_S1=starts_S1,
            context_S=context_S,
            state_rows_S=rows_S,
            pages_SP=pages_X.view(len(chunks), pages),
            kv_slots_T=kv_slots_T,
            decodes=sum(1 for count in counts if count == 1),
            max_query=max(counts),
            max_length=max(lengths),
        ),
        logit_rows_L,
        feature_rows_F,
    )


def to_device(arrays: Sequence[Sequence[int] | np.ndarray], dtype: type, device: torch.device) -> list[torch.Tensor]:
    """Each array as a tensor of `device`, all in one copy, each aligned to 16 bytes, by which kernels are compiled."""
    unit = 16 // np.dtype(dtype).itemsize
    ends = list(accumulate(-(-len(array) // unit) * unit for array in arrays))
    joined = np.zeros(ends[-1], dtype)
    places = [slice(begin, begin + len(array)) for begin, array in zip([0, *ends], arrays, strict=False)]
    for place, array in zip(places, arrays, strict=True):
        joined[place] = array
    found = torch.from_numpy(joined)
    if device.type != "cpu":
        found = found.pin_memory().to(device, non_blocking=True)
    return [found[place] for place in places]


class Runner:
    """Runs plans on one rank. The first rank also sends each plan ahead, and gets logits; all share the sampled ids."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        tables: PageTables,
        ctx: RankContext,
        features: Features | None = None,
        store: HostStore | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.model, self.caches, self.tables, self.ctx, self.features = model, caches, tables, ctx, features
        self.store = store
        self.last_tokens = torch.zeros(len(tables.counts), dtype=torch.int64, device=ctx.device)
        self.offload = offload  # experts that are not on the device
        self.graphs: DecodeGraphs | None = None
        self._committed: tuple[list[int], torch.Tensor] = [], self.last_tokens[:0]  # rows of the last commit
        self.prompt_graphs: PromptGraphs | None = None
        self._step_tokens = 0

    def capture(self, step_tokens: int = 0) -> None:
        """Make decode steps graphs, and short prompts on one rank (not tried on more); every rank at the same time.

        step_tokens: of the largest step; 0: as before.
        """
        most_tokens = self.offload.graph_tokens if self.offload else 1 << 30
        self._step_tokens = step_tokens or self._step_tokens
        parts = self.model, self.caches, self.tables, self.last_tokens, self.ctx
        graphs = DecodeGraphs(*parts, most_tokens)
        prompt_tokens = min(self._step_tokens, most_tokens) if self.ctx.world == 1 else 0
        prompt_graphs = PromptGraphs(*parts, prompt_tokens, graphs.pool)
        prompt_graphs.capture_some()
        graphs.capture_all()
        self.graphs, self.prompt_graphs = graphs, prompt_graphs

    def run(self, plan: StepPlan, sampled: Sequence[Request] = ()) -> StepLogits | Written | None:
        """First rank: one step on all ranks. As engine.Runner."""
        self.ctx.comm.send(msgspec.msgpack.encode(plan), wait=not plan.chunks)  # behind steps come others, or an end
        if plan.resize is not None:
            self.resize(plan, plan.resize)
        if not plan.chunks:
            return None
        found = self.carry_out(plan, sampled)
        return found if isinstance(found, Written) else self._parts(plan, found)

    def _parts(self, plan: StepPlan, logits_LV: torch.Tensor) -> StepLogits:
        """What each row of logits is for."""
        sampled, checked, prompt, at = list[int](), list[int](), dict[int, torch.Tensor](), 0
        for chunk in plan.chunks:
            rows = logits_rows(chunk)
            if chunk.prompt_logits:
                prompt[chunk.row] = logits_LV[at : at + rows]
            at += rows
            if chunk.sample:
                sampled.append(at - 1)
            if chunk.check:
                checked.append(at - 1)
        if len(sampled) == len(logits_LV):
            return StepLogits(logits_LV, prompt)
        index_L, index_K = to_device([sampled, checked], np.int64, self.ctx.device)
        return StepLogits(logits_LV[index_L], prompt, logits_LV[index_K] if checked else None)

    @torch.inference_mode()
    def carry_out(self, plan: StepPlan, sampled: Sequence[Request] = ()) -> torch.Tensor | Written:
        """This rank's part of a plan: its pictures, then its chunks -> logits, or if the step itself chose them, the
        tokens, which are all ranks' last tokens then. sampled: on the first rank, who gets a token."""
        if self.features is not None:
            self.features.update(plan)
        self._set_out(plan.chunks, plan.saves, plan.host)
        if plan.keep and self.graphs and self.graphs.take(plan.chunks):
            self.ctx.comm.check()
            return self.graphs.choose(plan.chunks, plan.keep, sampled)
        return self._logits(plan.chunks, plan.keep)

    @torch.inference_mode()
    def resize(self, plan: StepPlan, to: Resize) -> None:
        """Other numbers of pages and slots of experts: first what shrinks. Graphs, which know addresses, come anew."""
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)  # graphs use memory of the host, which goes with them
        captured, self.graphs, self.prompt_graphs = self.graphs is not None, None, None
        if plan.host is not None and self.store is not None:
            self.store.out(plan.host)
        shrinks = self.offload is not None and to.slots < self.offload.count
        for part in ("slots", "pages") if shrinks else ("pages", "slots"):
            if part == "pages":
                resize_pages(self.caches, to.pages, to.moves)
                self.tables.move(to.moves)
            elif self.offload is not None:
                self.offload.resize(to.slots)
            if self.ctx.device.type == "cuda":
                torch.cuda.empty_cache()
        if self.store is not None:
            self.store.rebind(self.caches)
        if captured:
            self.capture()

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits [L, V] of the chunks that want any, without a plan: to try a model."""
        self._set_out(chunks, (), None)
        return self._logits(chunks, 0)

    def _set_out(self, chunks: Sequence[Chunk], saves: Sequence[tuple[int, int]], host: Copies | None) -> None:
        """What comes before the chunks are computed: page tables and copies."""
        for chunk in chunks:
            self.tables.update(chunk)
        if host is not None and self.store is not None:
            self.store.out(host)
        self._copy(chunks, saves)
        if host is not None and self.store is not None:
            self.store.back(host)

    def _logits(self, chunks: Sequence[Chunk], keep: int) -> torch.Tensor:
        if self.graphs and self.graphs.take(chunks):
            return self.graphs.run(chunks)
        if self.prompt_graphs and (tokens := self.prompt_graphs.size_of(chunks)):
            return self.prompt_graphs.run(tokens, chunks[0])
        batch = build_batch(chunks, self.tables, self.ctx.device)
        features_FH = self.features.of(chunks) if self.features is not None else None
        return self.model(
            batch.tokens_T, batch.positions_3T, batch.seqs, self.caches, batch.logit_rows_L, features_FH,
            batch.feature_rows_F, self.last_tokens, keep,
        )  # fmt: skip

    def _copy(self, chunks: Sequence[Chunk], saves: Sequence[tuple[int, int]]) -> None:
        """Save states, then start requests from saved ones: before anything of this step is written."""
        restored = [chunk for chunk in chunks if chunk.restore]
        halves = [chunk for chunk in restored if chunk.copy_page]
        pages = [int(self.tables.pages[chunk.row, chunk.start // self.tables.page_tokens]) for chunk in halves]
        for copy, pairs in (
            (copy_rows, saves),
            (copy_rows, [(chunk.restore, chunk.row) for chunk in restored]),
            (copy_pages, [(chunk.copy_page, page) for chunk, page in zip(halves, pages, strict=True)]),
        ):
            if pairs:
                sources_N, targets_N = to_device(list(zip(*pairs, strict=True)), np.int64, self.ctx.device)
                copy(self.caches, sources_N, targets_N)

    @torch.inference_mode()
    def commit(self, rows: list[int], tokens_L: torch.Tensor) -> None:
        """Give the ids that the first rank sampled for `rows` to every rank, as their last tokens."""
        tokens_L = self.ctx.comm.broadcast(tokens_L)
        if rows != self._committed[0]:
            self._committed = list(rows), to_device([rows], np.int64, self.ctx.device)[0]
        self.last_tokens[self._committed[1]] = tokens_L

    def follow(self) -> None:
        """Any other rank: do what the first rank plans until it says stop."""
        decoder = msgspec.msgpack.Decoder(StepPlan)
        while not (plan := decoder.decode(self.ctx.comm.receive())).stop:
            if plan.resize is not None:
                self.resize(plan, plan.resize)
            if plan.chunks:
                chosen = isinstance(self.carry_out(plan), Written)
                if not chosen and (rows := [chunk.row for chunk in plan.chunks if chunk.sample]):
                    self.commit(rows, torch.zeros(len(rows), dtype=torch.int64, device=self.ctx.device))
