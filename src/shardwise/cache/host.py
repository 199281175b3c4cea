"""The prefix cache's second tier: what the device's tree gives up goes to host memory, and comes back when it is asked
for. Numbers only: the bytes are each rank's, see store.py.
"""

import msgspec

from shardwise.cache.pages import PagePool
from shardwise.cache.prefix import PrefixCache, Snapshot


class Copies(msgspec.Struct, frozen=True, array_like=True):
    """What a plan copies, as (from, to). Out: of the device, before all else; then in, as the last before chunks are
    computed."""

    pages_out: list[tuple[int, int]] = []
    rows_out: list[tuple[int, int]] = []
    pages_in: list[tuple[int, int]] = []
    rows_in: list[tuple[int, int]] = []


class HostTier:
    """Places 1 .. `pages` for pages and 1 .. `rows` for states in host memory, in a tree like the device's.

    What is there stays when it is copied back: it may be evicted from the device again at no cost.
    """

    def __init__(self, pages: int, rows: int, page_tokens: int) -> None:
        self.pool = PagePool(pages, page_tokens)
        self.cache = PrefixCache(self.pool, rows)
        self._pages_out: dict[int, int] = {}  # by place: the latest word, should a place change hands before the plan
        self._rows_out: dict[int, int] = {}
        self._held: list[Snapshot] = []

    def take(self, gone: Snapshot, row: int) -> None:
        """Keep `gone`, whose state is in `row` and which is about to leave the device, if it is worth its room."""
        path = gone.node.path()
        data = b"".join(node.key for node in path)
        known = self.cache.place(data, gone.position)
        if known is not None:
            self.cache.use(known)
            return
        if len(path) > self.pool.pages or not self.cache.find_row(data, gone.position, gone.owner):
            return
        while self.pool.free < (missing := len(path) - self.cache.known_pages(data, gone.position)):
            before = self.pool.free
            self.cache.make_room(missing)  # perhaps at the cost of pages on the way
            if self.pool.free == before:
                return
        pages = self.pool.take(missing)
        first = len(path) - missing
        places, owners = [0] * first + pages, [node.owner for node in path]
        made = self.cache.add(data, gone.position, places, gone.owner, ready=True, owners=owners)
        self.pool.release(pages)
        made.hits = gone.hits
        self._pages_out |= {place: node.page for place, node in zip(pages, path[first:], strict=True)}
        self._rows_out[made.row] = row

    def hold(self, snapshot: Snapshot) -> None:
        """Copies back of `snapshot` are going into the plan in the making: its places keep what is in them."""
        self.cache.use(snapshot)
        snapshot.held = True
        self._held.append(snapshot)

    def out(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The pages and rows to copy, as (of the device, place)."""
        pages = [(page, place) for place, page in self._pages_out.items()]
        return pages, [(row, place) for place, row in self._rows_out.items()]

    def planned(self) -> None:
        """The copies are in a plan."""
        self._pages_out, self._rows_out = {}, {}
        for snapshot in self._held:
            snapshot.held = False
        self._held = []

    def check(self) -> None:
        """Raises AssertionError if the books do not add up, or something is still held."""
        self.cache.check()
        self.pool.check()
        if self._held or self.pool.used != self.pool.idle:
            raise AssertionError(
                f"host tier: {len(self._held)} held, {self.pool.used} pages used, {self.pool.idle} idle"
            )
