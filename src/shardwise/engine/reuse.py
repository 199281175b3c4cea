"""What running requests leave in the prefix cache, and how new ones start from it.

Device work happens in the order of plans, so a copy that a plan begins with sees what all steps before it wrote, and
nothing that later ones write: a row or page may be given away as soon as its copy is planned.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from shardwise.cache.host import Copies, HostTier
from shardwise.cache.pages import PagePool
from shardwise.cache.prefix import TOKEN_BYTES, Found, PrefixCache, Snapshot
from shardwise.engine.request import Request


@dataclass(frozen=True)
class ReuseOptions:
    """Where states are kept. A prompt is cut into one more chunk for each point inside it."""

    snapshot_rows: int = 0  # rows of state behind those of requests; 0: nothing is kept
    every_tokens: int = 8192
    boundaries: frozenset[int] = frozenset()  # tokens that end turns: the first and the last of a prompt are points
    least_gap_tokens: int = 32  # between snapshots of one request, see `gap`
    host_pages: int = 0  # of the host tier; 0: there is none
    host_rows: int = 0

    def gap(self, position: int) -> int:
        """Tokens between snapshots that are worth a row and a chunk: about 3 % of what comes before, within limits."""
        return max(1, self.least_gap_tokens // 8, min(self.least_gap_tokens, position // 32))


class Reuse:
    """The scheduler's side of the prefix cache."""

    def __init__(self, pool: PagePool, first_row: int, options: ReuseOptions) -> None:
        self.cache = PrefixCache(pool, options.snapshot_rows, first_row)
        self.query_tokens = 0  # of prompts that were looked up
        self.hit_tokens = 0  # of them, not computed
        self.host_hit_tokens = 0  # of those, computed but for the host tier
        self.host: HostTier | None = None
        if options.snapshot_rows and options.host_rows:
            self.host = HostTier(options.host_pages, options.host_rows, pool.page_tokens)
            self.cache.evicting = self._evicting
        self._pool = pool
        self._options = options
        self._saves: list[tuple[int, Snapshot]] = []
        # From the host, of requests that start in the plan in the making, and what these leave on the device.
        self._loads: dict[Request, tuple[Copies, Snapshot | None]] = {}

    def find(self, request: Request) -> Found:
        """What of `request` is cached. At least its last token is computed, and all whose prompt logits it wants."""
        if not self.cache.snapshots and self.host is None:
            return Found()
        data, limit = request.encoded(), request.length - 1
        if request.wants_prompt_logits(0):
            limit = min(limit, len(request.prompt_logprobs))
        found = self.cache.find(data, limit)
        if self.host is None:
            return found
        behind = self.host.cache.find(data, limit)
        worth_it = behind.position - found.position >= self._options.gap(behind.position)
        return replace(found, branch=max(found.branch, behind.branch), deeper=behind.snapshot if worth_it else None)

    def on_its_way(self, found: Found) -> bool:
        """Whether what is found on the host will be on the device with the next plan: another request brings it."""
        brought = any(made is not None for _, made in self._loads.values())
        return found.deeper is not None and found.deeper.held and brought

    def needed_pages(self, request: Request, found: Found) -> int:
        """Pages that must be free or idle for all known tokens of `request`; those it would share are not idle then."""
        idle = sum(self._pool.only_kept(page) for page in found.pages)
        return self._pool.needed(request.length) - len(found.pages) + idle

    def start(self, request: Request, found: Found) -> None:
        """Let `request`, which has a row, begin where `found` ends."""
        request.reset = True
        if found.deeper is not None:
            self._load(request, found, found.deeper)
        elif found.snapshot is not None:
            self.cache.use(found.snapshot)
            self._pool.share(found.pages)
            request.pages = list(found.pages)
            request.restore, request.copy_page = found.snapshot.row, found.tail
        request.computed = request.snapshot_at = found.position
        if self.cache.rows:
            request.snapshot_points = self._points(request, found)
        hit = min(found.position, len(request.prompt))
        if request.cached_tokens is None:
            request.cached_tokens = hit
            self.query_tokens += len(request.prompt)
            self.hit_tokens += hit
            if found.deeper is not None:
                request.host_tokens = hit - min(found.snapshot.position if found.snapshot else 0, hit)
            self.host_hit_tokens += request.host_tokens
        elif not request.answered:  # preempted before its first token
            self.hit_tokens -= max(0, request.cached_tokens - hit)
            request.cached_tokens = min(request.cached_tokens, hit)
            self.host_hit_tokens -= max(0, request.host_tokens - hit)
            request.host_tokens = min(request.host_tokens, hit)

    def cut(self, request: Request, count: int) -> int:
        """At most `count`, so that a chunk of so many tokens passes no point where the state is to be kept."""
        if request.snapshot_points:
            return min(count, request.snapshot_points[0] - request.computed)
        return count

    def computed(self, request: Request) -> bool:
        """`request.computed` has moved on: keep the state if it is a point. Whether its logits must be checked."""
        points, at = request.snapshot_points, request.computed
        if not points or points[0] > at:
            return False
        request.snapshot_points = [point for point in points if point > at]
        return self._keep(request, at, ready=False)

    def landed(self, request: Request, end: int, sound: bool) -> None:
        """The chunk up to `end` has run; `sound`: logits after it were looked at, and are finite."""
        if request.snapshots and sound:
            for snapshot in request.snapshots:
                snapshot.ready |= snapshot.position == end
            request.snapshots = [snapshot for snapshot in request.snapshots if not snapshot.ready]

    def ended(self, request: Request) -> None:
        """`request`, which still has its row and pages, was answered or cancelled: keep its state if its tokens are
        known."""
        at = request.computed
        known = len(request.prompt) + len(request.output) + (request.stop_token is not None)
        far = at - request.snapshot_at >= self._options.gap(at)
        if self.cache.rows and request.decoding and at <= known and far:
            self._keep(request, at, ready=not request.in_flight)

    def failed(self, request: Request) -> None:
        """Nothing of `request` stays."""
        self.cache.forget(request.arrival)
        if self.host is not None:
            self.host.cache.forget(request.arrival)

    def saves(self) -> list[tuple[int, int]]:
        """The copies that a plan begun now has to begin with; to be asked for before anything is planned."""
        self._saves = [(row, snapshot) for row, snapshot in self._saves if snapshot.row]
        return [(row, snapshot.row) for row, snapshot in self._saves]

    def copies(self) -> Copies | None:
        """Those to and from the host, of a plan that is complete; None if there are none."""
        if self.host is None:
            return None
        pages_out, rows_out = self.host.out()
        loads = [load for load, _ in self._loads.values()]
        copies = Copies(
            pages_out,
            rows_out,
            [pair for load in loads for pair in load.pages_in],
            [pair for load in loads for pair in load.rows_in],
        )
        return copies if rows_out or pages_out or loads else None

    def planned(self, saves: int) -> None:
        """The first `saves` copies are in a plan, and all those to and from the host."""
        del self._saves[:saves]
        if self.host is not None:
            self.host.planned()
            for made in [made for _, made in self._loads.values() if made is not None]:
                made.ready, made.held = True, False
            self._loads = {}

    def vacated(self, request: Request) -> None:
        """`request` gives its row and pages up; should they be about to be filled from the host, they are not."""
        _, made = self._loads.pop(request, (None, None))
        if made is not None:
            self.cache.remove(made)

    def check(self, running: Collection[Request]) -> None:
        """Raises AssertionError unless running requests and the cache hold exactly the pages in use."""
        self.cache.check()
        if self.host is not None:
            self.host.check()
        holders: dict[int, int] = {}
        for page in [page for r in running for page in r.pages] + [node.page for node in self.cache.nodes()]:
            holders[page] = holders.get(page, 0) + 1
        wrong = [page for page in range(1, self._pool.pages + 1) if self._pool.holders(page) != holders.get(page, 0)]
        if wrong:
            raise AssertionError(f"pages {wrong[:8]} have other holders than requests and prefix cache")

    def _load(self, request: Request, found: Found, deeper: Snapshot) -> None:
        """Have `deeper` copied into the row and pages of `request`, but for the pages that it shares on the device, and
        into a snapshot on the device if that is worth a row."""
        assert self.host is not None
        self.host.hold(deeper)
        if found.snapshot is not None:
            self.cache.use(found.snapshot)
        self._pool.share(found.pages)
        path, shared = deeper.node.path(), len(found.pages)
        self.cache.make_room(len(path) - shared)
        own = self._pool.take(len(path) - shared)
        request.pages = [*found.pages, *own]
        rows = [(deeper.row, request.row)]
        data, owners = request.encoded()[: deeper.position * TOKEN_BYTES], [node.owner for node in path]
        made = self.cache.insert(data, deeper.position, request.pages, deeper.owner, ready=False, owners=owners)
        if made is not None:
            made.hits, made.held = 1, True
            rows.append((deeper.row, made.row))
        pages = [(node.page, page) for node, page in zip(path[shared:], own, strict=True)]
        self._loads[request] = Copies(pages_in=pages, rows_in=rows), made

    def _evicting(self, snapshot: Snapshot) -> None:
        """`snapshot` goes: to the host, if it is known to be sound."""
        if self.host is not None and snapshot.ready:
            # Until its copy is in a plan, its state is in the row that it is to be saved from.
            row = next((row for row, saved in self._saves if saved is snapshot), snapshot.row)
            self.host.take(snapshot, row)

    def _keep(self, request: Request, position: int, ready: bool) -> bool:
        data = request.encoded()[: position * TOKEN_BYTES]
        snapshot = self.cache.insert(data, position, request.pages, request.arrival, ready)
        if snapshot is None:
            return False
        request.snapshot_at = position
        self._saves.append((request.row, snapshot))
        if not ready:
            request.snapshots.append(snapshot)
        return True

    def _points(self, request: Request, found: Found) -> list[int]:
        """Where to keep states on the way from `found` to the end of the known tokens."""
        options, tokens, start = self._options, request.tokens(0, request.length), found.position
        places = [found.branch, *range(options.every_tokens, len(tokens), options.every_tokens)]
        backwards = tokens[::-1]
        ends = [token for token in options.boundaries if token in tokens]
        if ends:
            places.insert(0, len(tokens) - min(map(backwards.index, ends)))
            places.append(min(map(tokens.index, ends)) + 1)
        points = list[int]()
        for place in places:  # what matters most first
            if start < place < len(tokens) and all(abs(place - p) >= options.gap(place) for p in (start, *points)):
                points.append(place)
        points.sort()
        last = points[-1] if points else start
        if last == 0 or len(tokens) - last >= options.gap(len(tokens)):
            points.append(len(tokens))
        return points
