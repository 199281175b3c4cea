"""A runner whose model is a function of all the tokens of a sequence, which it knows from the plans alone."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from shardwise.engine.engine import StepLogits
from shardwise.engine.graphs import TURNS
from shardwise.engine.plan import StepPlan
from shardwise.engine.readback import Written
from shardwise.engine.request import Limits, Request
from shardwise.engine.sampler import LISTED, choose, parameters
from shardwise.kernels.draw import reference
from shardwise.layers.embedding import LISTED_ROWS

VOCAB = 13


@cache
def model(history: tuple[int, ...]) -> tuple[float, ...]:
    """Logits after `history`; coarse, so that there are exact ties."""
    mixed = 7
    for token in history:
        mixed = (mixed * 1_000_003 + token + 1) % (1 << 61)
    return tuple((((mixed ^ (i * 2_654_435_761)) * 0x9E3779B97F4A7C15 >> 21) % 29) / 4 for i in range(VOCAB))


class FakeRank:
    """Keeps pages, page tables, states and last tokens, and finds any use of them that does not add up.

    States are those of rows and, behind them, of snapshots.
    """

    def __init__(self, limits: Limits, snapshot_rows: int = 0) -> None:
        self.snapshot_rows = range(limits.max_num_seqs + 1, limits.max_num_seqs + 1 + snapshot_rows)
        self.limits = limits
        self.pages: list[list[int | None]] = [[None] * limits.page_tokens for _ in range(limits.pages + 1)]
        self.tables: dict[int, list[int]] = {}
        self.states: dict[int, tuple[int, ...]] = {}  # as the recurrent state does, they remember all that came by
        self.last: dict[int, int] = {}
        self.host_pages: dict[int, list[int | None]] = {}
        self.host_states: dict[int, tuple[int, ...]] = {}

    def apply(self, plan: StepPlan) -> list[tuple[int, ...]]:
        """By chunk, the sequence up to the chunk's last token."""
        self._check(plan)
        self._copy(plan)
        histories = []
        for chunk in plan.chunks:
            table = self.tables[chunk.row]
            tokens = chunk.tokens or [self.last[chunk.row]]
            assert len(tokens) == chunk.count
            assert len(self.states[chunk.row]) == chunk.start, "positions skipped or repeated"
            for position, token in enumerate(tokens, chunk.start):
                page, offset = divmod(position, self.limits.page_tokens)
                self.pages[table[page]][offset] = token
            self.states[chunk.row] += tuple(tokens)
        for chunk in plan.chunks:  # after all writes of the step: nobody may have written into another's pages
            cells = [cell for page in self.tables[chunk.row] for cell in self.pages[page]]
            history = self.states[chunk.row]
            assert tuple(cells[: len(history)]) == history, "a page was overwritten"
            histories.append(history)
        return histories

    def _copy(self, plan: StepPlan) -> None:
        """To the host, saves, then restores, then halves of pages, all of which are read before one is written, then
        from the host."""
        filled_rows, filled_pages = set[int](), set[int]()
        if plan.host is not None:
            self.host_pages |= {place: list(self.pages[page]) for page, place in plan.host.pages_out}
            self.host_states |= {place: self.states[row] for row, place in plan.host.rows_out}
            filled_rows = {row for _, row in plan.host.rows_in}
            filled_pages = {page for _, page in plan.host.pages_in}
            assert len(filled_rows) == len(plan.host.rows_in)
            assert len(filled_pages) == len(plan.host.pages_in)
        for row, snapshot in plan.saves:
            assert snapshot in self.snapshot_rows
            self.states[snapshot] = self.states[row]
        assert len({snapshot for _, snapshot in plan.saves}) == len(plan.saves)
        copies = {}
        for chunk in plan.chunks:
            if chunk.reset:
                self.tables[chunk.row] = []
                self.states[chunk.row] = self.states[chunk.restore] if chunk.restore else ()
            self.tables[chunk.row] += chunk.new_pages
            assert (bool(chunk.restore) or chunk.row in filled_rows) == (chunk.reset and chunk.start > 0)
            assert not (chunk.restore and chunk.row in filled_rows)
            assert chunk.restore == 0 or chunk.restore in self.snapshot_rows
            page, offset = divmod(chunk.start, self.limits.page_tokens)
            assert bool(chunk.copy_page) == bool(chunk.restore and offset)
            if chunk.copy_page:
                target = self.tables[chunk.row][page]
                assert target not in copies
                copies[target] = list(self.pages[chunk.copy_page])
        for target, cells in copies.items():
            self.pages[target] = cells
        if plan.host is not None:
            for place, row in plan.host.rows_in:
                self.states[row] = self.host_states[place]
            for place, page in plan.host.pages_in:
                self.pages[page] = list(self.host_pages[place])

    def _check(self, plan: StepPlan) -> None:
        counts = [chunk.count for chunk in plan.chunks]
        rows = [chunk.row for chunk in plan.chunks]
        assert counts
        assert min(counts) >= 1
        assert sum(counts) <= self.limits.max_num_batched_tokens
        assert [c > 1 for c in counts] == sorted(c > 1 for c in counts), "single tokens go first"
        assert len(set(rows)) == len(rows)
        assert all(1 <= row <= self.limits.max_num_seqs for row in rows)
        assert all(1 <= page <= self.limits.pages for chunk in plan.chunks for page in chunk.new_pages)
        wanted = sum(chunk.count for chunk in plan.chunks if chunk.prompt_logits)
        assert wanted <= self.limits.prompt_logits_tokens


def likeliest(logits_LV: torch.Tensor, keep: int) -> torch.Tensor:
    """The logits, without those that are not among a row's `keep` largest, if that is not 0."""
    if not keep or not logits_LV.numel():
        return logits_LV
    least_L1 = logits_LV.topk(min(keep, VOCAB), -1).values[:, -1:]
    return logits_LV.where((logits_LV >= least_L1) | logits_LV.isnan(), -torch.inf)


class FakeRunner:
    """Two ranks that see plans and committed tokens only. `poison`: beginnings after which logits are not numbers.

    chooses: as graphs do, it gives tokens where few ids matter, in memory that it writes again TURNS such steps later.
    """

    def __init__(self, limits: Limits, snapshot_rows: int = 0, chooses: bool = False) -> None:
        self.limits, self.chooses = limits, chooses
        self.told_KB, self.chosen = np.zeros((TURNS, LISTED_ROWS), np.int64), 0
        self.ranks = [FakeRank(limits, snapshot_rows), FakeRank(limits, snapshot_rows)]
        self.plans: list[StepPlan] = []
        self.poison: set[tuple[int, ...]] = set()
        self.awaiting: list[int] = []

    def logits(self, history: tuple[int, ...]) -> list[float]:
        poisoned = any(history[: len(start)] == start for start in self.poison)
        return [float("nan")] * VOCAB if poisoned else list(model(history))

    def run(self, plan: StepPlan, sampled: Sequence[Request] = ()) -> StepLogits | Written | None:
        assert not self.awaiting, "the last step's tokens were never shared"
        self.plans.append(plan)
        histories, follower = (rank.apply(plan) for rank in self.ranks)
        assert histories == follower
        self.awaiting = [chunk.row for chunk in plan.chunks if chunk.sample]
        if not any(chunk.sample or chunk.prompt_logits or chunk.check for chunk in plan.chunks):
            return None
        if self.chooses and plan.keep and all(chunk.count == 1 and chunk.sample for chunk in plan.chunks):
            return self.choose(plan, torch.tensor([self.logits(history) for history in histories]), sampled)
        checked = [self.logits(h) for h, chunk in zip(histories, plan.chunks, strict=True) if chunk.check]
        drawn = [self.logits(h) for h, chunk in zip(histories, plan.chunks, strict=True) if chunk.sample]
        prompt = {
            chunk.row: torch.tensor([self.logits(h[: chunk.start + i + 1]) for i in range(chunk.count)])
            for h, chunk in zip(histories, plan.chunks, strict=True)
            if chunk.prompt_logits
        }
        checked_KV = torch.tensor(checked) if checked else None
        return StepLogits(likeliest(torch.tensor(drawn).reshape(-1, VOCAB), plan.keep), prompt, checked_KV)

    def choose(self, plan: StepPlan, logits_LV: torch.Tensor, sampled: Sequence[Request]) -> Written:
        assert [request.row for request in sampled] == self.awaiting
        ints, floats = zip(*map(parameters, sampled), strict=True)
        keep, every_L = 1 if plan.keep == 1 else LISTED, torch.arange(len(sampled))
        logits_LV = likeliest(logits_LV, plan.keep)
        tokens_L = choose(logits_LV, keep, every_L, torch.tensor(ints), torch.tensor(floats), reference)
        self.chosen += 1
        told_L = self.told_KB[self.chosen % TURNS, : len(sampled)]
        told_L[:] = tokens_L.numpy()
        self.commit(self.awaiting, tokens_L)
        return Written(told_L, None)

    def commit(self, rows: list[int], tokens_L: torch.Tensor) -> None:
        assert rows == self.awaiting
        assert tokens_L.dtype == torch.int64
        self.awaiting = []
        for rank in self.ranks:
            rank.last.update(zip(rows, tokens_L.tolist(), strict=True))
