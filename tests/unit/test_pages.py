"""Page and row pools: nothing given out twice, nothing lost, number 0 never."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cache.pages import PagePool
from shardwise.cache.rows import RowPool


def test_page_zero_is_never_given_out():
    pool = PagePool(5, 64)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert (pool.free, pool.used, pool.taken_total) == (0, 5, 5)
    with pytest.raises(ValueError, match="1 pages asked for, 0 of 5 are free"):
        pool.take(1)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2)])
def test_pages_for_tokens(tokens: int, pages: int):
    assert PagePool(1, 64).needed(tokens) == pages


def test_a_shared_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(3, 4)
    pages = pool.take(2)
    pool.share(pages[:1])
    pool.release(pages)
    assert [pool.holders(page) for page in pages] == [1, 0]
    assert pool.free == 2
    pool.check()
    pool.release(pages[:1])
    assert pool.free == 3
    pool.check()


def test_wrong_releases_change_nothing():
    pool = PagePool(3, 4)
    (page,) = pool.take(1)
    for wrong in ([0], [4], [page, page], [page, 3 if page != 3 else 2]):
        with pytest.raises(ValueError, match="not held, or named twice"):
            pool.release(wrong)
        with pytest.raises(ValueError, match="not held, or named twice"):
            pool.share(wrong)
    assert pool.holders(page) == 1
    pool.check()


def test_check_finds_a_lost_page():
    pool = PagePool(3, 4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="inconsistent"):
        pool.check()


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 20))))
def test_pool_agrees_with_a_plain_count(pages: int, actions: list[tuple[str, int]]):
    pool = PagePool(pages, 2)
    held: list[list[int]] = []
    for action, number in actions:
        if action == "take" and number <= pool.free:
            held.append(pool.take(number))
        elif action == "share" and held:
            pool.share(held[number % len(held)])
            held.append(list(held[number % len(held)]))
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        pool.check()
        flat = [page for some in held for page in some]
        assert pool.used == len(set(flat))
        assert all(pool.holders(page) == flat.count(page) for page in range(pages + 1))
    for some in held:
        pool.release(some)
    assert pool.used == 0
    pool.check()


def test_rows():
    pool = RowPool(3)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3]
    with pytest.raises(ValueError, match="all 3 rows"):
        pool.take()
    pool.release(2)
    with pytest.raises(ValueError, match="row 2 is not in use"):
        pool.release(2)
    with pytest.raises(ValueError, match="row 0 is not in use"):
        pool.release(0)
    assert (pool.free, pool.used) == (1, 2)
    pool.check()
    assert pool.take() == 2
    pool._used.remove(2)
    with pytest.raises(AssertionError):
        pool.check()


@pytest.mark.parametrize("make", [lambda: PagePool(0, 1), lambda: PagePool(1, 0), lambda: RowPool(0)])
def test_empty_pools_are_refused(make):
    with pytest.raises(ValueError, match="at least one"):
        make()
