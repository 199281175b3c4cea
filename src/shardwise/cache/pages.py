"""Which KV pages are free and who holds the others. Numbers only: their bytes are the runners', on each rank."""


class PagePool:
    """Pages 1 .. `pages`, of `page_tokens` positions each. Page 0 takes the writes of padding and is never given out.

    A page is counted by its holders, so that requests and a prefix cache can share it; it is free again when the last
    one lets go of it. The prefix cache holds pages by `keep`, once for each place in its tree. Pages are given out in
    a fixed order: the lately freed first, then the lowest.
    """

    def __init__(self, pages: int, page_tokens: int) -> None:
        if pages < 1 or page_tokens < 1:
            raise ValueError(f"{pages} pages of {page_tokens} tokens: a pool needs at least one of each")
        self.pages = pages
        self.page_tokens = page_tokens
        self.taken_total = 0  # pages given out since the start
        self.idle = 0  # pages that only the prefix cache holds: free for the asking
        self._holders = [0] * (pages + 1)
        self._kept = [0] * (pages + 1)  # of the holders, those that are places in the prefix cache
        self._free = list(range(pages, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.pages - len(self._free)

    def needed(self, tokens: int) -> int:
        """How many pages `tokens` positions fill, the last one perhaps in part."""
        return -(-tokens // self.page_tokens)

    def take(self, count: int) -> list[int]:
        """`count` free pages, each now with one holder. Raises ValueError if fewer are free: ask `free` first."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} of {self.pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        self.taken_total += count
        return taken

    def share(self, pages: list[int]) -> None:
        """One more holder for each of `pages`, which are held already."""
        self._require_held(pages)
        for page in pages:
            self.idle -= self.only_kept(page)
            self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """One holder less for each of `pages`. Raises ValueError, and releases none, if one is not held."""
        self._require_held(pages)
        if kept := [page for page in pages if self.only_kept(page)]:
            raise ValueError(f"pages {kept} are held by the prefix cache alone, which lets go of them by drop")
        for page in reversed(pages):
            self._let_go(page)
            self.idle += self.only_kept(page)

    def keep(self, page: int) -> None:
        """The prefix cache becomes a holder of `page`, which is held already."""
        self._require_held([page])
        self.idle -= self.only_kept(page)
        self._holders[page] += 1
        self._kept[page] += 1
        self.idle += self.only_kept(page)

    def drop(self, page: int) -> None:
        """The prefix cache is a holder of `page` once less. Raises ValueError if it does not hold it."""
        if not self._kept[page]:
            raise ValueError(f"page {page} is not in the prefix cache")
        self.idle -= self.only_kept(page)
        self._kept[page] -= 1
        self._let_go(page)
        self.idle += self.only_kept(page)

    def resize(self, pages: int) -> dict[int, int]:
        """Have `pages` pages from now on -> where those in use beyond them go, old to new, to be copied by whoever has
        their bytes. Raises ValueError if more are in use.
        """
        if pages < 1 or self.used > pages:
            raise ValueError(f"a pool of {pages} pages: {self.used} are in use")
        held = [page for page in range(1, self.pages + 1) if self._holders[page]]
        room = (page for page in range(1, pages + 1) if page > self.pages or not self._holders[page])
        moves = {page: next(room) for page in held if page > pages}
        counts = {moves.get(page, page): (self._holders[page], self._kept[page]) for page in held}
        self._holders, self._kept = ([0] * (pages + 1) for _ in range(2))
        for page, (holders, kept) in counts.items():
            self._holders[page], self._kept[page] = holders, kept
        self.pages = pages
        self._free = [page for page in range(pages, 0, -1) if not self._holders[page]]
        return moves

    def holders(self, page: int) -> int:
        return self._holders[page]

    def only_kept(self, page: int) -> bool:
        """Whether nobody but the prefix cache holds `page`."""
        return 0 < self._kept[page] == self._holders[page]

    def check(self) -> None:
        """Raises AssertionError unless every page is either free, once, or held: none leaked, none given out twice."""
        free = set(self._free)
        wrong = [page for page in range(1, self.pages + 1) if (page in free) == (self._holders[page] > 0)]
        idle = sum(map(self.only_kept, range(1, self.pages + 1)))
        if idle != self.idle or any(map(int.__gt__, self._kept, self._holders)):
            raise AssertionError(f"page pool: {self.idle} pages counted as idle, {idle} are; or kept more than held")
        if wrong or len(free) != len(self._free) or 0 in free or self._holders[0]:
            raise AssertionError(f"page pool: {len(self._free)} free of {self.pages}, inconsistent pages {wrong[:8]}")

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)

    def _require_held(self, pages: list[int]) -> None:
        lost = [page for page in pages if not 1 <= page <= self.pages or self._holders[page] < 1]
        if lost or len(set(pages)) != len(pages):
            raise ValueError(f"pages {lost or pages}: not held, or named twice (the pool has pages 1 to {self.pages})")
