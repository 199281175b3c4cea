"""Which rows are free. A request's row is its place in the page table, the convolution and delta states and the last
tokens of every rank.
"""


class RowPool:
    """Rows 1 .. `rows`. Row 0 belongs to padding and is never given out."""

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise ValueError(f"{rows} rows: a pool needs at least one")
        self.rows = rows
        self._free = list(range(rows, 0, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def take(self) -> int:
        """A free row. Raises ValueError if there is none: ask `free` first."""
        if not self._free:
            raise ValueError(f"all {self.rows} rows are in use")
        row = self._free.pop()
        self._used.add(row)
        return row

    def release(self, row: int) -> None:
        """Raises ValueError if `row` is not in use."""
        if row not in self._used:
            raise ValueError(f"row {row} is not in use (the pool has rows 1 to {self.rows})")
        self._used.remove(row)
        self._free.append(row)

    def check(self) -> None:
        """Raises AssertionError unless every row is either free, once, or in use."""
        free = set(self._free)
        if len(free) != len(self._free) or free | self._used != set(range(1, self.rows + 1)) or free & self._used:
            raise AssertionError(f"row pool: {sorted(free)} free and {sorted(self._used)} in use of {self.rows}")
