"""Beginnings of sequences that need not be computed again: a radix tree of KV pages with snapshots of recurrent state.

A hybrid model can go on from position p only with the keys and values of all positions before p and the recurrent
state exactly at p. So every leaf of the tree is a snapshot, and pages stay as long as a snapshot needs them. Numbers
only: the bytes of pages and rows are the runners', on each rank.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.cache.pages import PagePool

TOKEN_BYTES = 4
MOST_HITS_COUNTED = 7  # beyond it, being used often protects no more


def encode(tokens: Sequence[int]) -> bytes:
    """The key of tokens: TOKEN_BYTES for each."""
    return array("i", tokens).tobytes()


@dataclass(eq=False, slots=True)
class Node:
    """One page: a whole one, or (`tails` of its parent) the beginning of one, which always has a snapshot."""

    parent: "Node | None" = None
    key: bytes = b""
    page: int = 0
    owner: int = -1  # the request that computed the page
    end: int = 0  # tokens from the root to the last of this page
    children: "dict[bytes, Node]" = field(default_factory=dict)
    tails: "dict[bytes, Node]" = field(default_factory=dict)
    snapshot: "Snapshot | None" = None

    def path(self) -> "list[Node]":
        """The nodes from the first page to this one."""
        nodes, node = list[Node](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(eq=False, slots=True)
class Snapshot:
    """A row that holds the recurrent state after `position` tokens. Row 0: it is gone."""

    node: Node
    position: int
    row: int
    owner: int  # the request that computed it
    base: "Snapshot | None"  # the nearest one before it on its path
    ready: bool  # known to be sound; others are not given to requests
    since: int  # the cache's clock when it was made or last used
    hits: int = 0
    held: bool = False  # copies of it are in the plan in the making, so it stays until that is sent

    @property
    def gain_tokens(self) -> int:
        """Tokens that would be computed again without it."""
        return self.position - (self.base.position if self.base else 0)

    @property
    def worth(self) -> int:
        return self.since + self.gain_tokens * (1 + min(self.hits, MOST_HITS_COUNTED))


@dataclass(frozen=True)
class Found:
    """What is known of a sequence's beginning. pages: the whole ones up to the snapshot; tail: the page that its last
    tokens are in, if they end inside one, else 0. branch: how many tokens are those of a cached sequence, at most what
    was asked for; more than the snapshot's position where it parts from them. deeper: a snapshot of the host tier that
    goes on behind what the device has."""

    snapshot: Snapshot | None = None
    pages: list[int] = field(default_factory=list)
    tail: int = 0
    branch: int = 0
    deeper: Snapshot | None = None

    @property
    def position(self) -> int:
        found = self.deeper or self.snapshot
        return found.position if found else 0


class PrefixCache:
    """Snapshot rows `first_row` .. `first_row + rows - 1` and pages of `pool`.

    Eviction is greedy-dual: a snapshot is worth the tokens it saves, times its uses, on top of a clock that moves up to
    the worth of what was evicted last. So what is not used ages out in time, and many small one-off requests take long
    to drain a large prefix. A newcomer worth less than all others is not let in, but moves the clock.
    """

    def __init__(self, pool: PagePool, rows: int, first_row: int = 1) -> None:
        self.rows = rows
        self.snapshots: list[Snapshot] = []
        self.evictions = 0
        self.evicting: Callable[[Snapshot], None] | None = None  # told of each one that is about to be evicted
        self._pool = pool
        self._page_bytes = pool.page_tokens * TOKEN_BYTES
        self._root = Node()
        self._free_rows = list(range(first_row + rows - 1, first_row - 1, -1))
        self._most_unused = max(2, rows // 4)  # of one request, so that a long prompt does not drain it either
        self._clock = 0

    def find(self, data: bytes, limit: int) -> Found:
        """The longest beginning of the encoded tokens, at most `limit` tokens, that there is a ready snapshot of."""
        node, best = self._root, None
        while True:
            here = data[node.end * TOKEN_BYTES : node.end * TOKEN_BYTES + self._page_bytes]
            for other in (node, *(tail for key, tail in node.tails.items() if here.startswith(key))):
                found = other.snapshot
                if found and found.ready and found.position <= limit and (not best or found.position > best.position):
                    best = found
            child = node.children.get(here)
            if child is None:
                break
            node = child
        branch = max((_common(key, here) for key in (*node.children, *node.tails)), default=0)
        branch = min(node.end + branch, limit)
        if best is None:
            return Found(branch=branch)
        path = [each.page for each in best.node.path()]
        tail = path.pop() if best.position % self._pool.page_tokens else 0
        return Found(best, path, tail, branch)

    def use(self, snapshot: Snapshot) -> None:
        """Note that a request starts from it."""
        snapshot.since = self._clock
        snapshot.hits += 1

    def insert(
        self,
        data: bytes,
        position: int,
        pages: Sequence[int],
        owner: int,
        ready: bool,
        owners: Sequence[int] | None = None,
    ) -> Snapshot | None:
        """Room for a snapshot of the first `position` encoded tokens, whose pages are `pages`, held by request `owner`.

        None if there is one already, or no row for it. Until its `ready` is set it will not be found. owners: of the
        pages, if others computed them.
        """
        if self.place(data, position) is not None or not self.find_row(data, position, owner):
            return None
        return self.add(data, position, pages, owner, ready, owners)

    def place(self, data: bytes, position: int) -> Snapshot | None:
        """The snapshot of just these tokens, if there is one."""
        node, _ = self._walk(data, position)
        return node.snapshot if node.end == position else None

    def known_pages(self, data: bytes, position: int) -> int:
        """Pages on the way to `position` that are in the tree."""
        node, _ = self._walk(data, position)
        return self._pool.needed(node.end)

    def find_row(self, data: bytes, position: int, owner: int) -> bool:
        """See that a row is free for a snapshot of these tokens, if it is worth it; for `add`, which must follow."""
        _, base = self._walk(data, position)
        return self._find_row(owner, position - (base.position if base else 0))

    def add(
        self,
        data: bytes,
        position: int,
        pages: Sequence[int],
        owner: int,
        ready: bool,
        owners: Sequence[int] | None = None,
    ) -> Snapshot:
        """`insert` where a row is free. pages: those that the tree has already need not be told."""
        node, base = self._walk(data, position)
        while node.end < position:
            end = min(node.end + self._pool.page_tokens, position)
            number = node.end // self._pool.page_tokens
            page, whose = pages[number], owners[number] if owners else owner
            child = Node(node, data[node.end * TOKEN_BYTES : end * TOKEN_BYTES], page, whose, end)
            self._pool.keep(page)
            (node.tails if end % self._pool.page_tokens else node.children)[child.key] = child
            node = child
        made = Snapshot(node, position, self._free_rows.pop(), owner, base, ready, self._clock)
        node.snapshot = made
        self.snapshots.append(made)
        return made

    def make_room(self, pages: int) -> None:
        """Evict until `pages` pages are free, or nothing that is left could be freed."""
        while self._pool.free < pages and self._pool.idle:
            leaves = [s for s in self.snapshots if not (s.held or s.node.children or s.node.tails)]
            if not leaves:
                return
            self._evict(min(leaves, key=lambda s: (self._pool.holders(s.node.page) > 1, s.worth)))

    def forget(self, owner: int) -> None:
        """Remove all that request `owner` computed, and what was built upon it."""
        for snapshot in list(self.snapshots):
            if snapshot.owner == owner or any(node.owner == owner for node in snapshot.node.path()):
                self.remove(snapshot)

    def remove(self, snapshot: Snapshot) -> None:
        """Let go of it and of the pages that only it needed; nothing happens if it is gone."""
        if not snapshot.row:
            return
        self._free_rows.append(snapshot.row)
        self.snapshots.remove(snapshot)
        snapshot.row = 0
        for other in self.snapshots:
            if other.base is snapshot:
                other.base = snapshot.base
        node = snapshot.node
        node.snapshot = None
        while node.parent is not None and not (node.snapshot or node.children or node.tails):
            del (node.parent.children if node.key in node.parent.children else node.parent.tails)[node.key]
            self._pool.drop(node.page)
            node = node.parent

    def move(self, moves: Mapping[int, int]) -> None:
        """Pages have other numbers: old to new."""
        for node in self.nodes():
            node.page = moves.get(node.page, node.page)

    def nodes(self) -> Iterator[Node]:
        """All pages of the tree."""
        left = [self._root]
        while left:
            node = left.pop()
            left += [*node.children.values(), *node.tails.values()]
            if node is not self._root:
                yield node

    def check(self) -> None:
        """Raises AssertionError unless rows are free or in use, once, and each leaf has a snapshot."""
        used = [snapshot.row for snapshot in self.snapshots]
        if len({*used, *self._free_rows}) != self.rows or len(used) + len(self._free_rows) != self.rows or 0 in used:
            raise AssertionError(f"prefix cache: rows {used} used and {self._free_rows} free of {self.rows}")
        nodes = list(self.nodes())
        bare = [node.end for node in nodes if not (node.snapshot or node.children or node.tails)]
        if bare or {n.snapshot for n in nodes if n.snapshot} != set(self.snapshots):
            raise AssertionError(f"prefix cache: leaves without a snapshot at {bare}, or snapshots without a place")
        if any(snapshot.base is not None and not snapshot.base.row for snapshot in self.snapshots):
            raise AssertionError("prefix cache: a snapshot is measured from one that is gone")

    def _walk(self, data: bytes, position: int) -> tuple[Node, Snapshot | None]:
        """The last node on the way to `position`, and the last snapshot before that on the way."""
        node, base = self._root, None
        while node.end < position:
            base = node.snapshot or base
            key = data[node.end * TOKEN_BYTES : min(position * TOKEN_BYTES, node.end * TOKEN_BYTES + self._page_bytes)]
            shorter = [t.snapshot for k, t in node.tails.items() if len(k) < len(key) and key.startswith(k)]
            base = max((s for s in shorter if s), key=lambda s: s.position, default=base)
            child = (node.children if len(key) == self._page_bytes else node.tails).get(key)
            if child is None:
                break
            node = child
        return node, base

    def _find_row(self, owner: int, gain_tokens: int) -> bool:
        """See that a row is free for a newcomer, if it is worth it."""
        own = [s for s in self.snapshots if s.owner == owner and not s.hits and not s.held]
        if len(own) >= self._most_unused:
            self._evict(min(own, key=lambda s: s.gain_tokens))
        if self._free_rows:
            return True
        least = min((s for s in self.snapshots if not s.held), key=lambda s: s.worth, default=None)
        if least is None:
            return False
        self._clock = max(self._clock, min(least.worth, self._clock + gain_tokens))
        if least.worth > self._clock:
            return False
        self._evict(least)
        return True

    def _evict(self, snapshot: Snapshot) -> None:
        self.evictions += 1
        if self.evicting is not None:
            self.evicting(snapshot)
        self.remove(snapshot)


def _common(one: bytes, other: bytes) -> int:
    """How many tokens two keys begin with in common."""
    size = min(len(one), len(other))
    low, high = 0, size // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
