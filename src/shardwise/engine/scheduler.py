"""Who computes what in the next step: continuous batching, with prompts in chunks between the answers' tokens.

The scheduler knows lengths, not contents: a step can be planned while the tokens of earlier ones are still on the
device. Every request that it takes is served in the end: order is fixed, the first in order may take pages from all
others, and what cannot fit even alone is refused.
"""

from bisect import insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from shardwise.cache.pages import PagePool
from shardwise.cache.rows import RowPool
from shardwise.engine.messages import FinishReason
from shardwise.engine.plan import Chunk, StepPlan
from shardwise.engine.request import Limits, Request, Status, check_fits
from shardwise.engine.reuse import Reuse, ReuseOptions


@dataclass(frozen=True)
class Step:
    """A plan and, chunk by chunk, whose it is: the first rank's side of a step, until it is finished."""

    plan: StepPlan
    requests: list[Request]

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token, in the order of the rows of logits."""
        return [r for r, chunk in zip(self.requests, self.plan.chunks, strict=True) if chunk.sample]


@dataclass(frozen=True)
class Progress:
    """What a finished step meant for one request: at most one new token, and whether it was the last."""

    request: Request
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stop_token: int | None = None


@dataclass
class _Grants:
    """Tokens given to requests of the step in the making, and what is left to give."""

    left_tokens: int
    left_prompt_logits: int
    counts: dict[Request, int] = field(default_factory=dict)
    preempted: bool = False


class Scheduler:
    """Waiting and running requests, both in order of priority (lower first) and arrival; owns pages and rows."""

    def __init__(self, limits: Limits, reuse: ReuseOptions | None = None) -> None:
        self.limits = limits
        self.pages = PagePool(limits.pages, limits.page_tokens)
        self.reuse = Reuse(self.pages, limits.max_num_seqs + 1, reuse or ReuseOptions())
        self.rows = RowPool(limits.max_num_seqs)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self.steps = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue `request`. Raises RequestRefused if it could never be served."""
        check_fits(request.prompt, request.sampling.max_tokens, self.limits)
        insort(self.waiting, request, key=lambda r: r.order)

    def end(self, request: Request, failed: bool = False) -> None:
        """Let go of `request`, wherever it is; what steps in flight still say about it will be ignored.

        Its pages may be given out again at once: devices run steps in order, so a later step overwrites them later.
        What it computed goes to the prefix cache, unless it `failed`: then nothing of it stays there.
        """
        if failed:
            self.reuse.failed(request)
        if request.status is Status.RUNNING:
            if not failed:
                self.reuse.ended(request)
            self._vacate(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def plan(self) -> Step:
        """The next step: one token for each running answer, then prompts, then new requests, within the budget.

        Without anything to do, a step without chunks. Steps must be finished in the order they were planned.
        """
        decoding = [r for r in self.running if r.decoding]
        most = min(self.limits.max_num_batched_tokens, self.limits.busy_tokens if decoding else 1 << 30)
        grants = _Grants(most, self.limits.prompt_logits_tokens)
        saves = self.reuse.saves()
        for request in decoding:
            self._grant(request, grants)
        for request in [r for r in self.running if not r.decoding]:
            self._grant(request, grants)
        if not grants.preempted:
            self._admit(grants)
        chosen = sorted(grants.counts, key=lambda r: grants.counts[r] > 1)  # kernels want single tokens first
        chunks = [self._chunk(request, grants.counts[request]) for request in chosen]
        self.steps += bool(chunks)
        if not chunks:
            return Step(StepPlan(self.steps), [])
        host = self.reuse.copies()
        self.reuse.planned(len(saves))
        return Step(StepPlan(self.steps, chunks, saves=saves, host=host), chosen)

    def finish(self, step: Step, tokens: Mapping[int, int], unsound: Collection[int] = ()) -> list[Progress]:
        """Take in the sampled `tokens`, by row, of the oldest unfinished step; frees what ended.

        unsound: rows of its chunks with `check` whose logits were not finite.
        """
        progress = []
        for request, chunk in zip(step.requests, step.plan.chunks, strict=True):
            request.in_flight -= 1
            sound = chunk.row in tokens if chunk.sample else chunk.check and chunk.row not in unsound
            self.reuse.landed(request, chunk.start + chunk.count, sound)
            if request.status is Status.FINISHED:
                continue
            kept, reason, stop = [], None, None
            if chunk.sample:
                reason, stop = request.accept(tokens[chunk.row])
                kept = [] if reason == "stop" else [tokens[chunk.row]]
            elif request.sampling.max_tokens == 0 and chunk.start + chunk.count == len(request.prompt):
                reason = "length"
            if reason is not None:
                self.end(request)
            if kept or reason is not None:
                progress.append(Progress(request, kept, reason, stop))
        return progress

    def resize(self, pages: int) -> dict[int, int]:
        """Have `pages` pages of KV cache -> those that get another number, old to new. Between steps only.

        The prefix cache gives up what does not fit. Raises ValueError, and changes nothing, if requests hold more.
        """
        pool = self.pages
        if pool.used - pool.idle > pages:
            raise ValueError(f"running requests hold {pool.used - pool.idle} pages of {pool.page_tokens} tokens")
        self.reuse.cache.make_room(pool.pages - pages)
        moves = pool.resize(pages)
        self.reuse.cache.move(moves)
        for request in self.running:
            request.pages = [moves.get(page, page) for page in request.pages]
            request.copy_page = moves.get(request.copy_page, request.copy_page)
        self.limits = replace(self.limits, pages=pages)
        return moves

    def check(self) -> None:
        """Raises AssertionError if pages or rows are lost, or held by what does not run."""
        self.pages.check()
        self.rows.check()
        self.reuse.check(self.running)
        idle = [r.id for r in self.waiting if r.row or r.pages]
        if self.rows.used != len(self.running) or idle:
            raise AssertionError(
                f"{self.rows.used} rows in use by {len(self.running)} running requests; "
                f"waiting ones that hold something: {idle}"
            )

    def _grant(self, request: Request, grants: _Grants) -> None:
        """Give `request` its next tokens, as many as budget and pages allow; perhaps none this time."""
        if request.status is not Status.RUNNING or request.complete:
            return
        if request.constraint is not None and request.pending:
            return  # what may come next depends on a token that is not known yet
        count = min(grants.left_tokens, request.length - request.computed)
        wants_logits = request.wants_prompt_logits(request.computed)
        if wants_logits:
            count = min(count, grants.left_prompt_logits)
        count = self.reuse.cut(request, count)
        count = self._find_pages(request, count, grants)
        if count < 1:
            return
        grants.counts[request] = count
        grants.left_tokens -= count
        grants.left_prompt_logits -= count * wants_logits

    def _find_pages(self, request: Request, count: int, grants: _Grants) -> int:
        """Give `request` the pages for `count` more tokens; first the prefix cache, then the latest of the others give
        theirs up for it.

        The latest request itself waits for pages with what it has: those before it take that if they need it.
        Returns how many tokens there is room for.
        """
        missing = self.pages.needed(request.computed + count) - len(request.pages)
        while missing > self.pages.free:
            if self.pages.idle:
                self.reuse.cache.make_room(missing)
            elif self.running[-1] is not request:
                self._preempt(self.running[-1], grants)
            else:
                break
        request.pages += self.pages.take(max(0, min(missing, self.pages.free)))
        return min(count, len(request.pages) * self.pages.page_tokens - request.computed)

    def _preempt(self, request: Request, grants: _Grants) -> None:
        """Put `request` back in the queue. All it has computed is dropped; its tokens, and its place in order, stay."""
        grants.counts.pop(request, None)
        grants.preempted = True
        self._vacate(request)
        request.status = Status.WAITING
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=lambda r: r.order)

    def _admit(self, grants: _Grants) -> None:
        """Start waiting requests, in order, while a row and pages for all their known tokens are there.

        Pages that running requests are about to need are left to them; else the newcomer would soon be preempted.
        """
        while self.waiting and self.rows.free and grants.left_tokens:
            request = self.waiting[0]
            free = self.pages.free + self.pages.idle - sum(map(self._expected_pages, self.running))
            tokens_on_their_way = request.in_flight > 0  # preempted lately: its tokens are not all known yet
            no_logits = request.wants_prompt_logits(0) and not grants.left_prompt_logits
            if tokens_on_their_way or no_logits:
                break
            found = self.reuse.find(request)
            if self.reuse.on_its_way(found):
                break
            if self.reuse.needed_pages(request, found) > free:
                break
            self.waiting.pop(0)
            request.row = self.rows.take()
            request.status = Status.RUNNING
            self.reuse.start(request, found)
            insort(self.running, request, key=lambda r: r.order)
            self._grant(request, grants)

    def _expected_pages(self, request: Request) -> int:
        """Pages that the running `request` lacks for its known tokens and for one more page's worth of answer."""
        ahead = min(request.length + self.pages.page_tokens, request.max_length)
        return max(0, self.pages.needed(ahead) - len(request.pages))

    def _chunk(self, request: Request, count: int) -> Chunk:
        """Write the grant down, and count it as done."""
        start, end, pictures = request.computed, request.computed + count, request.pictures
        sample = end == request.length and request.sampling.max_tokens > 0
        request.computed = end
        kept = self.reuse.computed(request)
        chunk = Chunk(
            row=request.row,
            start=start,
            count=count,
            tokens=[] if request.decoding else request.tokens(start, end),
            new_pages=request.pages[request.announced_pages :],
            sample=sample,
            prompt_logits=request.wants_prompt_logits(start),
            shift=pictures.shift(start) if pictures else 0,
            axes=pictures.axes(start, end) if pictures else b"",
            spans=pictures.spans(start, end) if pictures else [],
            reset=request.reset,
            restore=request.restore if request.reset else 0,
            copy_page=request.copy_page if request.reset else 0,
            check=kept and not sample,
        )
        request.announced_pages = len(request.pages)
        request.reset = False
        request.in_flight += 1
        request.pending += sample
        request.decoding = request.decoding or sample
        return chunk

    def _vacate(self, request: Request) -> None:
        """Take everything from the running `request`."""
        self.reuse.vacated(request)
        self.running.remove(request)
        self.pages.release(request.pages)
        self.rows.release(request.row)
        request.pages = []
        request.row = request.announced_pages = request.computed = 0
        request.restore = request.copy_page = request.snapshot_at = 0
        request.snapshot_points = []
        request.decoding = request.reset = False
