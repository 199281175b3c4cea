"""Which pages each row's request has, on the host of every rank."""

from collections.abc import Mapping, Sequence

import numpy as np

from shardwise.engine.plan import Chunk


class PageTables:
    """Followers rebuild it from plans alone. Row 0 and page 0 are padding."""

    def __init__(self, rows: int, max_pages: int, page_tokens: int) -> None:
        self.pages = np.zeros((rows, max_pages), dtype=np.int32)
        self.counts = [0] * rows
        self.page_tokens = page_tokens

    def update(self, chunk: Chunk) -> None:
        """Take in the chunk's new pages, after forgetting the row if the request is new in it."""
        if chunk.reset or chunk.start == 0:
            self.counts[chunk.row] = 0
        if chunk.new_pages:
            held = self.counts[chunk.row]
            self.pages[chunk.row, held : held + len(chunk.new_pages)] = chunk.new_pages
            self.counts[chunk.row] = held + len(chunk.new_pages)

    def move(self, moves: Mapping[int, int]) -> None:
        """Pages have other numbers: old to new."""
        for old, new in moves.items():  # no new number is an old one
            self.pages[self.pages == old] = new

    def slots(self, rows: int | Sequence[int], positions: np.ndarray) -> np.ndarray:
        """Where keys and values of these positions go: page * page_tokens + offset."""
        pages = self.pages[rows, positions // self.page_tokens].astype(np.int64)
        return pages * self.page_tokens + positions % self.page_tokens
