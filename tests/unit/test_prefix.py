"""The tree of pages and snapshots by itself: what is found, what is kept, what goes first."""

import random

import pytest

from shardwise.cache.pages import PagePool
from shardwise.cache.prefix import TOKEN_BYTES, PrefixCache, Snapshot, encode

PAGE = 4


class Cache:
    """A prefix cache, and requests that come, leave a snapshot at a position, and go."""

    def __init__(self, pages: int = 64, rows: int = 16) -> None:
        self.pool = PagePool(pages, PAGE)
        self.cache = PrefixCache(self.pool, rows, first_row=5)
        self.owners = 0

    def put(self, tokens: list[int], *positions: int, ready: bool = True) -> list[Snapshot | None]:
        self.owners += 1
        data, pages = encode(tokens), self.pool.take(self.pool.needed(len(tokens)))
        made = [
            self.cache.insert(data[: at * TOKEN_BYTES], at, pages, self.owners, ready)
            for at in positions or (len(tokens),)
        ]
        self.pool.release(pages)
        self.check()
        return made

    def hit(self, tokens: list[int], limit: int | None = None) -> int:
        return self.cache.find(encode(tokens), len(tokens) if limit is None else limit).position

    def check(self) -> None:
        self.cache.check()
        self.pool.check()
        assert self.pool.used == self.pool.idle == len({node.page for node in self.cache.nodes()})


def test_the_longest_beginning_with_a_snapshot_is_found():
    it = Cache()
    tokens = list(range(20))
    it.put(tokens, 3, 8, 10, 17)
    found = it.cache.find(encode([*tokens[:12], 99]), 12)
    assert (found.position, len(found.pages), found.branch) == (10, 2, 12)
    assert found.tail == it.cache.find(encode(tokens), 17).pages[2], "the page that the tail is in goes on"
    assert [it.hit(tokens[:n]) for n in range(20)] == [*[0] * 3, *[3] * 5, 8, 8, *[10] * 7, *[17] * 3]
    assert it.hit(tokens, 16) == 10
    assert it.hit([1, *tokens]) == 0
    whole = it.cache.find(encode(tokens[:9]), 9)
    assert (whole.position, whole.tail, len(whole.pages)) == (8, 0, 2)


def test_where_a_sequence_parts_from_a_cached_one():
    it = Cache()
    it.put(list(range(10)))
    for same in range(11):
        assert it.cache.find(encode([*range(same), 77, 78]), same + 1).branch == same
    assert it.cache.find(encode(list(range(10))), 6).branch == 6


def test_what_is_not_ready_is_not_found():
    it = Cache()
    (made,) = it.put([1, 2, 3], ready=False)
    assert made is not None
    assert it.hit([1, 2, 3, 4]) == 0
    made.ready = True
    assert it.hit([1, 2, 3, 4]) == 3


def test_one_place_is_taken_once():
    it = Cache()
    assert it.put([1, 2, 3, 4, 5], 4, 5, 4)[2] is None
    assert it.put([1, 2, 3, 4, 5], 4, 5) == [None, None]
    assert len(it.cache.snapshots) == 2


def test_sequences_share_the_pages_they_have_in_common():
    it = Cache()
    it.put(list(range(12)))
    it.put([*range(8), 50, 51, 52, 53])
    assert it.pool.used == 4
    it.put(list(range(10)))  # the beginning of a page is a page of its own
    assert it.pool.used == 5


def test_pages_come_back_with_the_last_snapshot_that_needs_them():
    it = Cache(pages=6)
    it.put(list(range(12)))
    it.put([*range(8), 50, 51, 52])
    it.cache.make_room(3)
    assert (it.pool.free, len(it.cache.snapshots)) == (3, 1)
    it.cache.make_room(6)
    assert (it.pool.free, it.cache.snapshots) == (6, [])
    it.check()


def test_pages_in_use_are_not_waited_for():
    it = Cache(pages=4)
    it.put(list(range(8)))
    it.pool.share(it.cache.find(encode(list(range(8))), 8).pages)
    it.cache.make_room(4)
    assert it.pool.free == 2


def test_the_least_useful_goes_first():
    it = Cache(rows=3)
    for first in (10, 20, 30):
        it.put([first] * 8)
    found = it.cache.find(encode([10] * 8), 8).snapshot
    assert found is not None
    it.cache.use(found)
    it.put([40] * 8)
    assert [it.hit([first] * 8) for first in (10, 20, 30, 40)] == [8, 0, 8, 8]


def test_small_one_off_requests_do_not_drain_a_conversation():
    it = Cache(pages=400, rows=4)
    turn, talk = 60, list(range(100))
    for moment in range(8):
        hit = it.cache.find(encode(talk), len(talk))
        assert moment == 0 or hit.position == len(talk) - turn, moment
        if hit.snapshot:
            it.cache.use(hit.snapshot)
        it.put(talk)
        for title in range(3):
            it.put([1000 + moment * 10 + title] * 9)
        talk = [*talk, *range(2000 + moment * turn, 2000 + (moment + 1) * turn)]


def test_what_is_not_used_any_more_makes_room_in_the_end():
    it = Cache(pages=400, rows=4)
    for first in range(4):
        it.put([first] * 100)
    for first in range(10, 60):
        it.put([first] * 20)
    assert sum(it.hit([first] * 100) > 0 for first in range(4)) < 2
    assert it.hit([59] * 20) == 20


def test_a_long_prompt_keeps_to_its_share_and_spreads_it():
    it = Cache(pages=400, rows=8)
    for first in range(6):
        it.put([100 + first] * 30)
    it.put(list(range(400)), *range(40, 401, 40))
    own = sorted(s.position for s in it.cache.snapshots if s.owner == it.owners)
    assert len(own) == 2
    assert own[-1] == 400
    assert sum(it.hit([100 + first] * 30) > 0 for first in range(6)) == 6


def test_all_that_a_failed_request_computed_is_gone():
    it = Cache()
    it.put(list(range(8)))  # owner 1
    it.put(list(range(16)), 12, 16)  # owner 2
    it.put([*range(12), 70, 71])  # owner 3, built upon the pages of 2
    it.cache.forget(2)
    assert it.hit(list(range(16))) == 8
    assert it.hit([*range(12), 70, 71]) == 8
    it.check()


def test_without_rows_nothing_is_kept():
    it = Cache(rows=0)
    assert it.put([1, 2, 3]) == [None]
    assert it.pool.used == 0


@pytest.mark.parametrize("seed", range(20))
def test_found_is_what_a_plain_search_finds(seed: int):
    rng = random.Random(seed)
    it = Cache(pages=40, rows=rng.randint(1, 9))

    def sequence() -> list[int]:
        return [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]

    held: dict[int, list[int]] = {}
    for _ in range(60):
        tokens = sequence()
        (made,) = it.put(tokens)
        if made is not None:
            held[id(made)] = tokens
        if rng.random() < 0.2 and it.cache.snapshots:
            it.cache.remove(rng.choice(it.cache.snapshots))
        if rng.random() < 0.1:
            it.cache.make_room(rng.randint(30, 40))
        it.check()
        alive = [held[id(snapshot)] for snapshot in it.cache.snapshots]
        asked = sequence()
        limit = rng.randint(0, len(asked))
        fitting = [len(one) for one in alive if len(one) <= limit and asked[: len(one)] == one]
        found = it.cache.find(encode(asked), limit)
        assert found.position == max(fitting, default=0)
        common = max((next((i for i, (a, b) in enumerate(zip(one, asked, strict=False)) if a != b),
                           min(len(one), len(asked))) for one in alive), default=0)  # fmt: skip
        assert found.branch == min(common, limit)
        assert len(found.pages) == found.position // PAGE
